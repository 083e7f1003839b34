"""Losses of micro-batches that are the loss of the whole batch."""
