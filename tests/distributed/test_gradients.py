"""When the sums over replicas of what a stage has found begin to travel."""

import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.distributed.gradients import last_backwards


def tape(micro_batches, schedule, workers):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    plan = Plan(stages=4, micro_batches=micro_batches, schedule=schedule, workers=workers)
    return fxsplit.compile(model, plan, example_args=(torch.randn(micro_batches, 4),)).tape


def test_sums_begin_while_other_stages_go_backward():
    for schedule in ("interleaved_1f1b", "zb_v", "dual_pipe_v"):
        whole = tape(4, schedule, 2)
        place = {x.number: k for k, x in enumerate(whole.order)}
        found = last_backwards(whole)
        assert sorted(s for row in found.values() for s in row) == [0, 1, 2, 3]
        for number, stages in found.items():
            last = whole.order[place[number]]
            assert last.kind in ("backward", "weights")
            rest = [
                x for x in whole.order[place[number] + 1 :] if x.kind in ("backward", "inputs", "weights")
            ]
            assert not {x.stage for x in rest} & set(stages)
        first = min(found, key=place.__getitem__)
        assert place[first] < len(whole.order) - 2, schedule  # something is left to overlap with


def test_stages_come_in_one_order_whatever_the_number_of_micro_batches():
    orders = []
    for count in (1, 2, 4, 8):
        found = last_backwards(tape(count, "dual_pipe_v", 2))
        orders.append([s for row in found.values() for s in row])
    assert all(order == [3, 2, 1, 0] for order in orders)
