"""Tests of fxsplit/weights."""
