"""The peers' partitioners of a list of costs, each called as it stands; and the best that there is.

All return how many costs each part has.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence


def by_torchgpipe(costs: Sequence[float], parts: int) -> list[int]:
    """`torchgpipe.balance`'s: Bárány and Grinberg's block partition, whose blocks may be empty."""
    from torchgpipe.balance import blockpartition

    return [len(block) for block in blockpartition.solve(list(costs), parts)]


def by_fairscale(costs: Sequence[float], parts: int) -> list[int]:
    """fairscale's copy of it."""
    from fairscale.nn.pipe.balance import blockpartition

    return [len(block) for block in blockpartition.solve(list(costs), parts)]


def by_deepspeed(costs: Sequence[float], parts: int) -> list[int]:
    """`partition_balanced`, as `PipelineModule(partition_method="parameters")` calls it."""
    from deepspeed.runtime.utils import partition_balanced

    bounds = [int(bound) for bound in partition_balanced(list(costs), parts)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def evenly(costs: Sequence[float], parts: int) -> list[int]:
    """As many in each, by hand: what torch.distributed.pipelining leaves to its users."""
    bounds = [len(costs) * i // parts for i in range(parts + 1)]
    return [end - begin for begin, end in itertools.pairwise(bounds)]


PARTITIONERS = {"torchgpipe": by_torchgpipe, "deepspeed": by_deepspeed}


def heaviest(costs: Sequence[float], counts: Sequence[int]) -> float:
    """The load of the heaviest part."""
    sums = [0.0, *itertools.accumulate(costs)]
    bounds = [0, *itertools.accumulate(counts)]
    return max(sums[end] - sums[begin] for begin, end in itertools.pairwise(bounds))


def lightest(costs: Sequence[float], parts: int) -> float:
    """The least that the heaviest of so many parts in a row can have: exact, by bisection over what fits."""
    sums = [0.0, *itertools.accumulate(costs)]

    def packed(limit):
        """The heaviest part if each takes what fits, or None if that needs more parts."""
        at, worst = 0, 0.0
        for _ in range(parts):
            end = bisect.bisect_right(sums, sums[at] + limit) - 1
            worst, at = max(worst, sums[end] - sums[at]), end
            if at == len(costs):
                return worst
        return None

    low, high = max(costs), sums[-1]
    while high - low > 1e-12 * sums[-1]:
        middle = (low + high) / 2
        low, high = (middle, high) if packed(middle) is None else (low, middle)
    found = packed(high)
    return high if found is None else found
