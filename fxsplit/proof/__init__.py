"""The proof that the split is the model: by structure, and by numbers."""
