"""Cost of every node: what the partitioner weighs."""
