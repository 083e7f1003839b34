"""Batch normalisation over micro-batches: its statistics, put off to the end or shared at the layer."""
