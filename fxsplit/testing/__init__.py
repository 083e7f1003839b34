"""Help for tests: is the split the model?"""

from .equivalence import Comparison, assert_equivalent, compare, graphs_equal

__all__ = ["Comparison", "assert_equivalent", "compare", "graphs_equal"]
