"""`fxsplit.simulate`: exact small tables, the same times as the tape's, steady states, memory, and wrong calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fxsplit
from fxsplit.errors import ArgumentError, PlanError
from fxsplit.schedules.catalog import NAMES, SHARED, schedule_of
from fxsplit.schedules.lower import Flow, lower
from fxsplit.schedules.simulate import timeline
from fxsplit.simulation.chain import KINDS, chain_of
from fxsplit.simulation.simulate import played
from fxsplit.simulation.steady import AFFINE, enough, period_of, steady

LETTERS = {"forward": "F", "backward": "B", "inputs": "I", "weights": "W"}


def costs(stages=2, **figures):
    return fxsplit.StageCosts([1.0] * stages, [2.0] * stages, **figures)


def random_costs(variants, stages, generator):
    seconds = torch.rand(variants, 4, stages, 2, generator=generator, dtype=torch.float64)
    return seconds, torch.rand(variants, stages - 1, generator=generator, dtype=torch.float64) / 5


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**31))
def test_times_are_those_of_the_tape(name, workers, each, micro_batches, seed):
    each = 1 if name not in SHARED else each if name.startswith(("inter", "breadth")) else 2
    stages = workers * each
    schedule = schedule_of(name, stages, micro_batches, workers)
    tape = lower(schedule, Flow(stages, [(s, s + 1) for s in range(stages - 1)]))
    seconds, travel = random_costs(3, stages, torch.Generator().manual_seed(seed))
    ends = chain_of(name, stages, micro_batches, workers)
    found = ends.workers_end(ends.ends(seconds, travel))
    for variant in range(3):

        def cost(x, variant=variant):
            return float(seconds[variant, KINDS[LETTERS[x.kind]], x.stage, int(x.micro_batches == (0,))])

        def delay(made, read, variant=variant):
            apart = tape.worker_of[made.number] != tape.worker_of[read.number]
            return float(travel[variant, min(made.stage, read.stage)]) if apart else 0.0

        times = timeline(tape, cost, delay)
        wanted = [times[row[-1].number][1] for row in tape.workers]
        assert found[variant].tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 2, 5, 32])
def test_gpipe_of_equal_stages_has_the_published_bubble(p, m):
    for schedule in ("gpipe", "1f1b"):
        (row,) = fxsplit.simulate(costs(p), micro_batches=m, schedules=schedule).rows
        assert row.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert row.seconds == pytest.approx(3 * (m + p - 1) / m)


def test_a_table_checked_by_hand():
    found = fxsplit.simulate(
        costs(2, kept=[8, 8], parameters=[1, 1], sent=[8], link=8.0), micro_batches=(2, 4), replicas=(1, 2)
    )
    by = {(r.schedule, r.micro_batches, r.replicas): r for r in found.rows}
    # F .5, B 1, transfers .5: the first value is there at 1, forwards end at 2; gradients arrive 1.5 later and .5 on.
    assert by["gpipe", 2, 1].seconds == pytest.approx(2 + 1 + 1 + 0.5 + 1)
    # one micro-batch each: F .5, transfer .5, F .5, B 1, transfer .5, B 1, and 2 * 1/2 * 1 byte / 8 at the end
    assert by["gpipe", 2, 2].seconds == pytest.approx(4 + 1 / 8)
    assert by["gpipe", 4, 1].nbytes == 8 + 4  # all micro-batches, and four times the parameters
    assert by["1f1b", 4, 1].nbytes == 8 / 4 * 2 + 4
    assert [r.seconds for r in found.rows] == sorted(r.seconds for r in found.rows)
    assert str(found).count("*") == 1


@pytest.mark.parametrize("m", [1, 3, 4, 9, 50])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(m):
    p = 4
    changes = torch.zeros(1, 4, p, 2, dtype=torch.float64)
    changes[:, 0], changes[:, 1] = 1, -1
    seconds, travel = torch.ones(1, 4, p, 2, dtype=torch.float64), torch.zeros(1, p - 1, dtype=torch.float64)
    _, kept, _ = played("1f1b", p, m, p, seconds, travel, changes)
    assert kept[0].tolist() == [min(p - s, m) for s in range(p)]


def test_memory_rules_out_the_fastest():
    given = costs(4, kept=[100.0] * 4)
    free = fxsplit.simulate(
        given, micro_batches=8, schedules=("gpipe", "1f1b"), checkpoint=("never", "always")
    )
    tight = fxsplit.simulate(
        given, micro_batches=8, schedules=("gpipe", "1f1b"), checkpoint=("never", "always"), memory=20
    )
    assert free.best.checkpoint == "never"
    assert tight.best.checkpoint == "always"
    assert tight.best.seconds > free.best.seconds
    assert tight.best.nbytes <= 20 < free.best.nbytes
    assert not tight.rows[0].fits
    with pytest.raises(PlanError, match="none of 1 ways fits") as raised:
        _ = fxsplit.simulate(given, micro_batches=8, schedules="gpipe", memory=20).best
    assert fxsplit.simulate(given, micro_batches=8, schedules="gpipe", memory=101).best
    assert "memory=101" in raised.value.remedy


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_adds_a_forward(name):
    given = costs(4, kept=[100.0] * 4, inputs=10, sent=[10.0] * 3)
    found = fxsplit.simulate(
        given, micro_batches=8, schedules=name, checkpoint=("never", "always", "except_last")
    )
    by = {row.checkpoint: row for row in found.rows}
    assert by["never"].seconds < by["except_last"].seconds <= by["always"].seconds
    assert by["always"].nbytes < by["never"].nbytes
    busy = {k: (1 - r.bubble) * r.workers * r.seconds for k, r in by.items()}
    assert busy["never"] == pytest.approx(12)
    assert busy["always"] == pytest.approx(16)
    assert busy["except_last"] == pytest.approx(15.5)


@pytest.mark.parametrize("name", [n for n in NAMES if period_of(n, 1)])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_schedule_in_its_steady_state_repeats_itself(name, workers):
    """The rows for more micro-batches are those for fewer with periods put in, and so are the times, if ends grow alike."""
    stages = workers * (2 if name in SHARED else 1)
    generator = torch.Generator().manual_seed(workers)
    seconds, travel = random_costs(12, stages, generator)
    seconds[0] = 1.0
    seen = 0
    for rest in range(period_of(name, workers)):
        base = enough(name, 10 * workers + rest, workers)
        known = steady(name, stages, base, workers)
        assert known is not None
        ends = known.chain.ends(seconds, travel)
        growth, same = known.growth(ends)
        seen += int(same.sum())
        for more in (1, 2, 7):
            longer = chain_of(name, stages, base + more * known.period, workers)
            wanted = longer.workers_end(longer.ends(seconds, travel))
            found = known.chain.workers_end(ends) + more * growth[:, None]
            torch.testing.assert_close(found[same], wanted[same], rtol=1e-10, atol=1e-10)
    assert seen


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_is_played_is_the_whole_schedule(name, workers):
    """Whether it was put together from fewer micro-batches or not: times, and what is kept."""
    stages = workers * (2 if name in SHARED else 1)
    generator = torch.Generator().manual_seed(7)
    seconds, travel = random_costs(12, stages, generator)
    seconds[:4, 1:3] = seconds[:4, :1] + torch.rand(4, 2, stages, 1, generator=generator)  # the same for 0
    seconds[:4, :, :, 1] = seconds[:4, :, :, 0]
    changes = torch.zeros(12, 4, stages, 2, dtype=torch.float64)
    changes[:, 0] = torch.rand(12, stages, 1, generator=generator)
    changes[:, 1] = -changes[:, 0]
    changes[:, 3] = -changes[:, 0]
    if name in AFFINE:  # micro-batch 0 may be faster, never slower
        seconds[..., 1] = seconds[..., 0]
        seconds[4:, 1, :, 1] -= torch.minimum(seconds[4:, 1, :, 1], seconds[4:, 0, :, 0])
        seconds[4:, 1, :, 0] = seconds[4:, 1, :, 1] + seconds[4:, 0, :, 0]
    for m in (1, 2, 3, 4, 5, 8, 12 * workers + 24, 20 * workers + 37):
        ends, kept, _ = played(name, stages, m, workers, seconds, travel, changes)
        chain = chain_of(name, stages, m, workers)
        torch.testing.assert_close(
            ends, chain.workers_end(chain.ends(seconds, travel)), rtol=1e-10, atol=1e-10
        )
        torch.testing.assert_close(kept, chain.most_kept(changes), rtol=1e-10, atol=1e-10)


def test_stages_of_several_neighbours():
    given = fxsplit.StageCosts(
        [1, 1, 1, 3, 1, 1], kept=[1, 2, 3, 4, 5, 6], sent=[10, 20, 30, 40, 50], parameters=[1] * 6
    )
    two = given.grouped(2)
    assert two.forward == (3, 5)
    assert two.kept == (6, 15)
    assert two.sent == (30,)
    assert given.grouped(6) is given
    assert [len(given.grouped(n)) for n in range(1, 7)] == [1, 2, 3, 4, 5, 6]
    assert fxsplit.StageCosts([0.0] * 4).grouped(3).forward == (0, 0, 0)


def test_ranks_are_stages_times_replicas():
    given = costs(8, parameters=[1.0] * 8, link=1.0)
    found = fxsplit.simulate(given, micro_batches=64, stages=(2, 4, 8), ranks=16, schedules=("gpipe", "zb_v"))
    assert {(r.schedule, r.workers, r.replicas) for r in found.rows} == {
        *(("gpipe", w, 16 // w) for w in (2, 4, 8)),
        *(("zb_v", w, 16 // w) for w in (1, 2, 4)),
    }
    assert all(r.ranks == 16 for r in found.rows)
    assert fxsplit.simulate(given, micro_batches=512, ranks=4096).best.replicas == 512


def test_costs_of_a_preview_and_of_a_pipeline():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(4, 8)
    plan = fxsplit.Plan(stages=2, micro_batches=2, cost="roofline", hardware="A100-80GB")
    for planned in (
        fxsplit.preview(model, plan, example_args=(x,)),
        fxsplit.compile(model, plan, example_args=(x,)),
    ):
        found = fxsplit.StageCosts.of(planned)
        assert len(found) == 2
        assert found.sent == (4 * 8 * 4,)
        assert found.link == 300e9
        assert found.backward == tuple(2 * f for f in found.forward)
        assert fxsplit.simulate(planned, micro_batches=2).best.seconds > 0
    assert found.parameters == (2 * 72 * 4, 2 * 72 * 4)
    with pytest.raises(ArgumentError, match="seconds are wanted"):
        fxsplit.StageCosts.of(fxsplit.preview(model, fxsplit.Plan(stages=2), example_args=(x,)))
    with pytest.raises(ArgumentError, match="counted with checkpoint"):
        fxsplit.StageCosts.of(fxsplit.preview(model, plan.replace(checkpoint="always"), example_args=(x,)))


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"forward": []}, "no list of seconds"),
        ({"forward": [1.0, -1.0]}, r"forward\[1\]=-1.0"),
        ({"forward": [float("nan")]}, r"forward\[0\]=nan"),
        ({"forward": [1.0], "backward": [1.0, 2.0]}, "lists 2 numbers, not 1"),
        ({"forward": [1.0, 1.0], "sent": [1.0, 2.0]}, "lists 2 numbers, not 1"),
        ({"forward": [1.0], "weights": [3.0]}, "of which it is a part"),
        ({"forward": [1.0], "link": 0}, "link=0"),
        ({"forward": [1.0], "overhead": -1.0}, "overhead=-1.0"),
        ({"forward": [True]}, "True"),
        ({"forwards": [1.0]}, "did you mean 'forward'|no argument 'forwards'"),
    ],
)
def test_wrong_costs_are_refused(figures, said):
    with pytest.raises(ArgumentError, match=said) as raised:
        fxsplit.StageCosts(**figures)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("asked", "error", "said", "instead"),
    [
        ({"micro_batches": ()}, ArgumentError, "lists no numbers", {"micro_batches": (8,)}),
        ({"micro_batches": 0}, ArgumentError, "not a positive whole number", {"micro_batches": 8}),
        ({"schedules": "gpip"}, PlanError, "'gpip' is not known", {"schedules": "gpipe"}),
        ({"schedules": []}, ArgumentError, "no list of names", {"schedules": "gpipe"}),
        ({"checkpoint": "sometimes"}, PlanError, "not known", {"checkpoint": "always"}),
        (
            {"micro_batches": 7, "replicas": 2},
            PlanError,
            "shared out evenly",
            {"micro_batches": 8, "replicas": 2},
        ),
        (
            {"schedules": "zb_v", "stages": 3},
            PlanError,
            "stages=3 do not go",
            {"schedules": "zb_v", "stages": 2},
        ),
        ({"stages": 9}, ArgumentError, "there are costs of 4", {"stages": 4}),
        ({"memory": "much"}, PlanError, "not a size", {"memory": "80GB"}),
        ({"ranks": 5000}, PlanError, "more than 4096", {"micro_batches": 1024, "ranks": 4096}),
        ({"ranks": 7}, PlanError, "no number of stages", {"ranks": 4}),
        (
            {"replicas": 2048, "micro_batches": 2048},
            PlanError,
            "8192 ranks",
            {"replicas": 1024, "micro_batches": 1024},
        ),
    ],
)
def test_wrong_calls_are_refused_with_what_works(asked, error, said, instead):
    with pytest.raises(error, match=said) as raised:
        fxsplit.simulate(costs(4), **{"micro_batches": 8, **asked})
    assert raised.value.remedy
    assert fxsplit.simulate(costs(4), **{"micro_batches": 8, **instead}).rows
