"""Weights for a model that was compiled without any: where they come from, whether they fit, and their way to the stages."""
