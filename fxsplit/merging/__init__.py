"""How the outputs of micro-batches become those of the batch: derived from the program, confirmed by numbers."""
