"""A program as data: what was captured, where it is cut, and the stages that are made of it."""
