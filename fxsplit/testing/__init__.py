"""Help for tests: is the split the model?"""

from .equivalence import assert_equivalent, differences, graphs_equal

__all__ = ["assert_equivalent", "differences", "graphs_equal"]
