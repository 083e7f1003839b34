"""``python -m fxsplit demo``: a small GPT, split, inspected and trained beside its unsplit twin."""
