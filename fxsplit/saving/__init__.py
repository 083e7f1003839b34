"""A pipeline as a folder: plain Python that people read and import, and one JSON file; no pickles, no paths."""
