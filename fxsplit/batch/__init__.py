"""Cut a batch into micro-batches, and put together what they give."""
