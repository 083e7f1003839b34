"""What is weighed: figures of nodes, described devices, seconds of one's own; and that plans come to what they forecast."""

import copy
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxsplit
from fxsplit import ACCELERATORS, Device, Plan, errors
from fxsplit.__main__ import main
from fxsplit.cost.attention import FusedAttention
from fxsplit.cost.model import node_costs, parameter_copies
from fxsplit.cost.saved import measured_saved
from fxsplit.demo.gpt import GPT
from fxsplit.plan.costs import roofline_seconds
from fxsplit.testing import assert_equivalent
from fxsplit.testing.plans import odd_seconds
from fxsplit.trace.front import trace
from tests.models import build
from tests.strategies import batches, modules

IDS = torch.randint(0, 32, (8, 16), generator=torch.Generator().manual_seed(0))


def gpt(layers=6):
    torch.manual_seed(0)
    return GPT(32, width=16, layers=layers, heads=2, context=16)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        h = self.wide(x)
        h = h.view(-1, 64)
        return self.narrow(torch.tanh(h))


def test_figures_of_nodes():
    model, x = Small(), torch.randn(5, 8)
    traced = trace(model, (x,), {})
    costs = node_costs(model, traced, measured_saved(model, traced, (x,)))
    wide, view, tanh, narrow = costs.values()
    assert (wide.flops, narrow.flops, tanh.flops, view.flops) == (2 * 5 * 8 * 64, 2 * 5 * 64 * 8, 0, 0)
    assert (wide.parameters, narrow.parameters) == (4 * (8 * 64 + 64), 4 * (64 * 8 + 8))
    assert (wide.output, narrow.output) == (4 * 5 * 64, 4 * 5 * 8)
    assert wide.moved == 4 * (5 * 8 + 8 * 64 + 64 + 5 * 64) and tanh.moved == 2 * 4 * 5 * 64
    assert view.moved == 0 and view.saved == 0
    assert tanh.saved == 4 * 5 * 64  # its result, which narrow keeps too: counted once
    assert narrow.saved == 0
    device = Device(flops=1000.0, bandwidth=1e12)
    assert roofline_seconds(wide, device) == pytest.approx(wide.flops / 1000)
    device = Device(flops=1e12, bandwidth=1000.0)
    assert roofline_seconds(tanh, device) == pytest.approx(tanh.moved / 1000)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"flops": 0}, "flops=0"),
        ({"bandwidth": "fast"}, "bandwidth='fast'"),
        ({"link": float("inf")}, "link=inf"),
        ({"memory": "80"}, "memory='80'"),
        ({"memory": 0}, "memory=0"),
    ],
)
def test_a_device_with_a_wrong_figure(fields, said):
    with pytest.raises(errors.PlanError, match=said):
        Device(**fields)


def test_known_devices_and_files(tmp_path):
    assert Plan(hardware="A100-80GB").hardware == ACCELERATORS["A100-80GB"]
    assert all(d.flops and d.bandwidth and d.memory and d.link for d in ACCELERATORS.values())
    plans = [
        Plan(stages=2, cost="roofline", hardware=["T4", Device(flops=1e12, bandwidth=1e9)]),
        Plan(cost={"a": 1.5}, optimizer_states=None, effort="search", replicas=[2]),
        Plan(replicas="auto", devices=["cpu"] * 3),
        Plan(stages=3, replicas=[1, 2, 1]),
    ]
    for plan in plans:
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan


def test_a_link_is_measured():
    assert 1e6 < fxsplit.measure_link("cpu", "cpu", nbytes=2**20, runs=3) < 1e15
    with pytest.raises(errors.ArgumentError, match="runs=0"):
        fxsplit.measure_link("cpu", "cpu", runs=0)
    with pytest.raises(errors.ArgumentError, match="not there"):
        fxsplit.measure_link("cpu", "cuda:99")


@pytest.mark.slow
@pytest.mark.parametrize("cost", ["params", "memory", "flops", "roofline", "time", odd_seconds])
def test_every_cost_runs_and_can_be_given_back(cost, tmp_path):
    model = gpt()
    plan = Plan(stages=3, cost=cost, hardware=Device(flops=1e9, bandwidth=1e9, link=1e9), micro_batches=2)
    pipe = fxsplit.compile(model, plan, example_args=(IDS,))
    assert_equivalent(model, pipe, IDS)
    assignment = pipe.assignment
    for names, load in zip(assignment.stages, assignment.loads, strict=True):
        assert load >= sum(assignment.costs.get(n, 0.0) for n in names) * (1 - 1e-9) > 0
    assert assignment.forecast.bound <= max(assignment.loads)
    if assignment.forecast.unit == "s":
        same = plan.replace(cost=assignment.costs)
        same.save(tmp_path / "plan.json")
        again = fxsplit.preview(model, Plan.load(tmp_path / "plan.json"), example_args=(IDS,))
        assert again.assignment.stages == assignment.stages
        assert again.assignment.loads == pytest.approx(assignment.loads)
    pipe.save_code(tmp_path / "split")
    loaded = fxsplit.load(tmp_path / "split", gpt())
    assert loaded.report() == pipe.report() and loaded.assignment == assignment


def test_costs_that_cannot_be_had():
    model = gpt()
    with pytest.raises(errors.PlanError, match="names 'other', which is no node"):
        fxsplit.preview(model, Plan(stages=2, cost={"other": 1.0}), example_args=(IDS,))
    with pytest.raises(errors.PlanError, match="returned nan"):
        fxsplit.preview(model, Plan(stages=2, cost=lambda node: float("nan")), example_args=(IDS,))
    with pytest.raises(errors.PlanError, match="meta device"):
        fxsplit.preview(model.to("meta"), Plan(stages=2, cost="time"), example_args=(IDS.to("meta"),))
    with pytest.raises(errors.PlanError, match=r"cost=pipe\.assignment\.costs"):
        Plan(cost=odd_seconds).to_dict()


def load_of_stage(pipe, stage, link):
    """From the generated program: its nodes' seconds, and the bytes of what it reads from others and gives to them."""
    reads = {n.name for n in pipe.traced.graph.nodes if n.op == "get_attr"}  # they take no time
    made_by, readers, facts = pipe.program.producers(), pipe.program.readers(), pipe.traced.facts
    crossing = [v for v in stage.inputs if made_by[v] >= 0]
    crossing += [v for v in stage.outputs if any(r != stage.index for r in readers[v])]
    return (
        sum(odd_seconds(facts_of(pipe, n)) for n in stage.nodes if n not in reads)
        + sum(facts[v].nbytes for v in crossing) / link
    )


def facts_of(pipe, name):
    return fxsplit.NodeCost(name, "", 0, 0, 0, 0, 0)


@pytest.mark.slow
@settings(max_examples=60)
@given(modules(), st.data())
def test_the_generated_stages_weigh_what_the_planner_said(model, data):
    args = data.draw(batches(1))
    link = data.draw(st.sampled_from([0.5, 10.0, 1000.0]))
    plan = Plan(stages=data.draw(st.integers(1, 3)), cost=odd_seconds, hardware=Device(link=link))
    try:
        pipe = fxsplit.compile(copy.deepcopy(model), plan, example_args=args)
    except (errors.PartitionError, errors.ModelError):
        return  # fewer units than stages, or a model that eager cannot run
    loads = [load_of_stage(pipe, stage, link) for stage in pipe]
    assert list(pipe.assignment.loads) == pytest.approx(loads)
    crossing = [(v, s) for s in pipe for v in s.inputs if pipe.program.producers()[v] >= 0]
    assert pipe.assignment.forecast.cut_bytes == sum(pipe.traced.facts[v].nbytes for v, _ in crossing)
    assert_equivalent(model, pipe, *args)


class Towers(nn.Module):
    """Two towers whose layers take turns in the program, and meet at the end."""

    def __init__(self, layers=4):
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.b = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x, y):
        for one, other in zip(self.a, self.b, strict=True):
            x, y = torch.tanh(one(x)), torch.tanh(other(y))
        return (x * y).sum(1)


def test_towers_that_take_turns_are_put_in_order():
    model, args = Towers(), (torch.randn(6, 8), torch.randn(6, 8))
    plan = Plan(stages=2, cost=lambda node: 1.0, hardware=Device(link=100.0), micro_batches=3)
    pipe = fxsplit.compile(model, plan, example_args=args)
    first, second = ({p[0] for p in stage.parameters} for stage in pipe)
    assert first | second == {"a", "b"} and not first & second
    assert [len(stage.inputs) for stage in pipe] == [1, 2]
    assert "orders of the program" in pipe.report()
    assert_equivalent(model, pipe, *args)
    assert "holds" in pipe.verify()
    program_order = [n.name for n in trace(model, args, {}).graph.nodes]
    assert program_order != [n.name for n in pipe.traced.graph.nodes]
    assert sorted(program_order) == sorted(n.name for n in pipe.traced.graph.nodes)


class Apart(nn.Module):
    """Two towers of two layers each, one after the other in the program."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.b = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x, y):
        return self.a(x) * self.b(y)


def test_a_cut_between_towers_makes_the_pipeline_less_deep():
    args = (torch.randn(6, 8), torch.randn(6, 8))
    plan = Plan(stages=4, cost=lambda node: 1.0, micro_batches=2)
    pipe = fxsplit.compile(Apart(), plan, example_args=args)
    begins = [stage.modules[0] for stage in pipe]
    assert "b.0" in begins  # cuts after a.2 and inside of b weigh as much, but b would wait for a
    assert pipe[begins.index("b.0")].inputs == ("y",)


def test_reordering_keeps_what_depends_on_the_order():
    class Noisy(Towers):
        def forward(self, x, y):
            for one, other in zip(self.a, self.b, strict=True):
                x, y = torch.tanh(one(x)), torch.tanh(other(y))
                x, y = nn.functional.dropout(x, 0.3), nn.functional.dropout(y, 0.3)
            return (x * y).sum(1)

    model, args = Noisy(), (torch.randn(6, 8), torch.randn(6, 8))
    plan = Plan(stages=2, cost=lambda node: 1.0, hardware=Device(link=100.0))
    pipe = fxsplit.compile(model, plan, example_args=args)
    draws = [n.name for n in pipe.traced.graph.nodes if pipe.traced.facts[n.name].random]
    assert draws == [n.name for n in trace(model, args, {}).graph.nodes if n.name in draws]
    assert_equivalent(model, pipe, *args)  # the same masks


def test_fewer_stages_are_advised_where_they_are_better():
    plan = Plan(stages=4, cost=lambda node: 1e-3, hardware=Device(link=1e3), micro_batches=2)
    preview = fxsplit.preview(Small(), plan, example_args=(torch.randn(4, 8),))
    assert "would be better" in str(preview) and len(preview.assignment.stages) == 4
    assert "would be better" not in str(
        fxsplit.preview(gpt(), Plan(stages=3, cost="flops", micro_batches=8), example_args=(IDS,))
    )


# -- unequal devices and replicas ---------------------------------------------------------------------------------


def test_a_faster_device_gets_more():
    hardware = [Device(flops=1e9, bandwidth=1e15), Device(flops=3e9, bandwidth=1e15)]
    plan = Plan(stages=2, cost="roofline", hardware=hardware)
    preview = fxsplit.preview(gpt(8), plan, example_args=(IDS,))
    flops = [s.flops for s in preview.assignment.forecast.stages]
    assert 2 < flops[1] / flops[0] < 4
    bound = preview.assignment.forecast.bound
    assert bound == pytest.approx(3 * sum(flops) / 4e9)
    slow_last = fxsplit.preview(gpt(8), plan.replace(hardware=hardware[::-1]), example_args=(IDS,))
    assert (
        2 < slow_last.assignment.forecast.stages[0].flops / slow_last.assignment.forecast.stages[1].flops < 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("stages", [None, 1, 2, 3])
def test_stages_and_replicas_are_picked_together(stages):
    model = gpt()
    plan = Plan(replicas="auto", stages=stages, devices=["cpu"] * 4, cost="flops", micro_batches=6)
    pipe = fxsplit.compile(model, plan, example_args=(IDS,))
    assert sum(pipe.assignment.replicas) == 4
    assert stages is None or len(pipe) == stages
    workers = pipe.schedule.workers
    assert len(workers) == 4
    assert_equivalent(model, pipe, IDS)
    if stages == 1:
        assert pipe.assignment.replicas == (4,)


def test_a_stage_that_cannot_be_cut_is_replicated():
    class Heavy(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.heavy = nn.Linear(8, 8), nn.Linear(8, 64)

        def forward(self, x):
            return self.heavy(self.first(x))

    seconds = {"first": 1.0, "heavy": 8.0}
    plan = Plan(
        replicas="auto",
        devices=["cuda:0", "cuda:1", "cuda:2", "cuda:3"],
        cost=seconds,
        hardware=Device(link=1e3),
        micro_batches=8,
    )
    preview = fxsplit.preview(Heavy(), plan.replace(stages=2), example_args=(torch.randn(8, 8),))
    assert preview.assignment.replicas == (1, 3)
    assert [len(row) for row in preview.assignment.rows] == [1, 3]
    # The ring moves 2 (r - 1) / r of the parameters of the stage; the value that travels is shared out.
    parameters, travels = 4 * (8 * 64 + 64), 4 * 8 * 8
    assert preview.assignment.loads == pytest.approx(
        (1.0 + travels / 1e3, (8.0 + travels / 1e3) * 3 / 8 + 4 / 3 * parameters / 1e3)
    )
    free = fxsplit.preview(Heavy(), plan.replace(hardware=None), example_args=(torch.randn(8, 8),))
    assert free.assignment.replicas == (4,)  # without traffic, pure data parallelism


def test_replicas_of_each_stage():
    model = gpt()
    pipe = fxsplit.compile(model, Plan(stages=3, replicas=[2, 1, 3], micro_batches=5), example_args=(IDS,))
    assert pipe.schedule.labels == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2))
    assert_equivalent(model, pipe, IDS)
    assert "2, 1, 3 replicas" in pipe.report()
    with pytest.raises(errors.PlanError, match="replicas= lists 2, but device_map= makes 1"):
        fxsplit.compile(model, Plan(device_map={"": "cpu"}, replicas=[1, 2]), example_args=(IDS,))


# -- memory ---------------------------------------------------------------------------------------------------------


def memory_of(preview):
    return [s.memory for s in preview.assignment.forecast.stages]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", ["h.0", "h.1", "h.4"]])
@pytest.mark.parametrize("states", [0, 2])
def test_the_forecast_is_what_the_simulation_of_the_pipeline_says(checkpoint, states):
    plan = Plan(
        stages=3,
        devices=["cpu:0", "cpu:1", "cpu:2"],
        cost="memory",
        checkpoint=checkpoint,
        optimizer_states=states,
        micro_batches=4,
    )
    pipe = fxsplit.compile(gpt(), plan, example_args=(IDS,), check=False)
    live = pipe.memory()
    for stage, said in zip(pipe, pipe.assignment.forecast.stages, strict=True):
        own = dict(stage.named_parameters())
        parameters = sum(p.numel() * p.element_size() for p in own.values())
        travelling = [n for n in stage.nodes if pipe.traced.facts[n].parameters and n.endswith("wte_weight")]
        if not travelling:
            assert said.state == (2 + states) * parameters
        assert said.memory == said.state + live[stage.device].peak


def test_a_memory_limit_moves_the_cut():
    model = gpt(8)
    even = Plan(stages=2, cost="flops", devices=["cuda:0", "cuda:1"])
    free = fxsplit.preview(model, even.replace(max_memory={"cuda:0": "1GB"}), example_args=(IDS,))
    limit = int(memory_of(free)[0] * 0.7)
    tight = fxsplit.preview(model, even.replace(max_memory={"cuda:0": limit}), example_args=(IDS,))
    assert memory_of(tight)[0] <= limit < memory_of(free)[0]
    assert max(tight.assignment.loads) > max(free.assignment.loads)
    stages = tight.assignment.forecast.stages
    assert stages[0].limit == limit and stages[1].limit is None
    assert f" of {limit / 1024:.1f} KiB" in str(tight)


@pytest.mark.slow
def test_what_does_not_fit_says_what_would_help_and_it_does():
    model = gpt(8)
    plan = Plan(stages=2, cost="flops", devices=["cuda:0", "cuda:1"], micro_batches=2)
    need = max(memory_of(fxsplit.preview(model, plan, example_args=(IDS,))))
    limit = int(need * 0.5)
    plan = plan.replace(max_memory={"cuda:0": limit, "cuda:1": limit})
    with pytest.raises(errors.PartitionError) as caught:
        fxsplit.preview(model, plan, example_args=(IDS,))
    text = str(caught.value)
    assert "no cut into 2 stages fits" in text and "too much" in text and "cuda:" in text
    remedies = text.split("instead: ")[1].split(", or ")
    assert len(remedies) >= 4
    for remedy in remedies:
        fields, _, fits = remedy.rpartition(" (")
        fits = "does not fit" not in fits
        words = fields.split(" on ")[0].split(", with")[0]
        changes = eval(f"dict({words})")
        count = changes.get("stages", 2)
        names = [f"cuda:{i}" for i in range(count)]
        other = plan.replace(**changes, devices=names, max_memory=dict.fromkeys(names, limit))
        if fits:
            assert max(memory_of(fxsplit.preview(model, other, example_args=(IDS,)))) <= limit
        else:
            with pytest.raises(errors.PartitionError):
                fxsplit.preview(model, other, example_args=(IDS,))


def test_a_cut_that_is_said_must_fit_too():
    plan = Plan(cut=["h.3"], cost="flops", devices=["cpu:0", "cpu:1"], max_memory={"cpu:1": "10KiB"})
    with pytest.raises(errors.PartitionError, match=r"stage 1 needs .* more memory than cpu:1 has"):
        fxsplit.preview(gpt(), plan, example_args=(IDS,))


def test_inference_needs_no_gradients():
    plan = Plan(stages=2, cost="flops", hardware=Device(memory="1GB"))
    train = fxsplit.preview(gpt(), plan, example_args=(IDS,))
    infer = fxsplit.preview(gpt(), plan.replace(optimizer_states=None), example_args=(IDS,))
    assert all(a < b / 4 for a, b in zip(memory_of(infer), memory_of(train), strict=True))


# -- the meta device, and the command line ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "two_tower"])
@pytest.mark.parametrize("cost", ["params", "memory", "flops", "roofline"])
def test_a_model_on_the_meta_device_is_planned_alike(name, cost):
    model, batch = build(name)
    plan = Plan(stages=3, cost=cost, hardware="T4", micro_batches=2)
    args = batch(4)
    real = fxsplit.preview(model, plan, example_args=args)
    elsewhere = tuple(
        torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), a) for a in args
    )
    with torch.device("meta"):  # .to("meta") would untie what is tied
        bare, _ = build(name)
    unreal = fxsplit.preview(bare, plan, example_args=elsewhere)
    assert unreal.assignment.stages == real.assignment.stages
    assert unreal.assignment.loads == pytest.approx(real.assignment.loads)
    assert [s.memory for s in unreal.assignment.forecast.stages] == memory_of(real)


def factory():
    return gpt(), (IDS,)


def small_factory():
    return Small(), (torch.randn(4, 8),), {}


def odd_factory():
    return gpt()


def test_the_command_line_plans(capsys, tmp_path):
    where = f"{__name__}:factory"
    file = tmp_path / "plan.json"
    assert (
        main(
            [
                "plan",
                where,
                "--stages",
                "3",
                "--cost",
                "roofline",
                "--hardware",
                "T4",
                "--link",
                "1e9",
                "--meta",
                "--save",
                str(file),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "cuda:2" in text and "gap" in text and "predicted bubble" in text
    assert json.loads(file.read_text())["hardware"]["link"] == 1e9
    assert (
        main(
            [
                "plan",
                where,
                "--replicas",
                "auto",
                "--devices",
                "cuda:0,cuda:1",
                "--micro-batches",
                "4",
                "--memory",
                "1GB",
                "--optimizer-states",
                "inference",
            ]
        )
        == 0
    )
    assert "replicas" in capsys.readouterr().out
    for wrong, said in (
        ([f"{__name__}:nothing"], "names no function"),
        ([f"{__name__}:IDS"], "is no function"),
        ([f"{__name__}:odd_factory"], "return model"),
        ([where, "--cost", "roofline"], "hardware="),
        ([where, "--hardware", "B17"], "B17"),
        ([where, "--stages", "999"], "from 0 to 127"),
        ([f"{__name__}:small_factory", "--stages", "9"], "units that can be cut apart"),
    ):
        assert main(["plan", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_plan_is_the_same_every_time():
    tables = {
        str(fxsplit.preview(gpt(), Plan(stages=3, cost="roofline", hardware="T4"), example_args=(IDS,)))
        for _ in range(3)
    }
    assert len(tables) == 1


# -- found by a review ------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Two towers from one value, which one of them uses twice in one operation: three gradients or more."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inp = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.block = Residual()
        self.alike = nn.Identity()
        self.a = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.b = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        if self.how == "mul":
            first, second = h * h, h + 1
        elif self.how == "attention":
            first, second = self.attention(h, h, h)[0], h + 1
        elif self.how == "sdpa":
            first, second = nn.functional.scaled_dot_product_attention(h, h, h), h + 1
        elif self.how == "leaf":
            first, second = self.block(h), h + 1
        elif self.how == "alias":
            g = h.contiguous()
            first, second = g.sin() + h, g.cos()
        elif self.how == "dropout":
            g = nn.functional.dropout(h, 0.5, self.training)
            first, second = g.sin() + h, g.cos()
        else:
            g = self.alike(h)
            first, second = g.sin() + h, g.cos()
        for one, other in zip(self.a, self.b, strict=True):
            second, first = torch.tanh(other(second)), torch.tanh(one(first))
        return (first * second).sum(-1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.lin(x) * x


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["mul", "attention", "sdpa", "leaf", "alias", "dropout", "identity"])
def test_sums_of_three_gradients_keep_their_order(how, training, kind):
    torch.manual_seed(0)
    model = Twice(how).to(kind).train(training)
    x = torch.randn(4, 3, 8, dtype=kind)
    for seed in range(4):
        cost = {f"{name}_{i}": float((seed + i) % 3 + 1) for name in "ab" for i in range(4)}
        plan = Plan(stages=3, cost=lambda n, cost=cost: cost.get(n.name, 0.5), hardware=Device(link=300.0))
        pipe = fxsplit.compile(model, plan, example_args=(x,), leaf_modules=[Residual])
        assert_equivalent(model, pipe, x)


class Noise(nn.Module):
    """Draws from Python's own random numbers."""

    def __init__(self, seen):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.seen = seen

    def forward(self, x):
        return self.lin(x) * random.random()


@pytest.mark.parametrize("what", ["random", "hooks"])
def test_what_modules_do_beside_computing_keeps_its_order(what):
    seen = []
    model, args = Towers(), (torch.randn(6, 8), torch.randn(6, 8))
    for name in "ab":
        for i in range(4):
            if what == "random":
                getattr(model, name)[i] = Noise(seen)
            else:
                getattr(model, name)[i].register_forward_hook(lambda m, a, y, at=(name, i): seen.append(at))
    plan = Plan(stages=2, cost=lambda node: 1.0, hardware=Device(link=100.0))
    pipe = fxsplit.compile(model, plan, example_args=args)
    seen.clear()
    random.seed(7)
    expected = model(*args)
    order = list(seen)
    seen.clear()
    random.seed(7)
    assert torch.equal(pipe(*args), expected)
    assert seen == order


def test_measuring_leaves_parameters_as_they_were():
    class Decays(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.lin = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                self.w.mul_(0.9)
            return self.lin(x) * self.w

    model = Decays()
    fxsplit.preview(model, Plan(cost="time"), example_args=(torch.randn(3, 8),))
    assert torch.equal(model.w, torch.ones(8))


class ByMode(nn.Module):
    """Another path, and another module, in each mode."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.aux = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        if self.training:
            return x, self.aux(x)
        return x * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": ["cpu:0", "cpu:1", "cpu:2"], "stages": 3},
        {"devices": ["cpu:0", "cpu:1", "cpu:2"], "stages": 3, "replicas": [1, 2, 1], "micro_batches": 3},
        {
            "devices": ["cpu:0", "cpu:1", "cpu:2"],
            "stages": 3,
            "cost": "roofline",
            "hardware": ["T4", "T4", "H100"],
        },
        {"devices": ["cpu:0", "cpu:1"], "stages": 2, "cost": "memory", "max_memory": {"cpu:0": "1GB"}},
        {"stages": 13},
        {"stages": 2, "checkpoint": ["aux"]},
        {"cut": ["aux"]},
    ],
)
def test_the_other_mode_has_stages_of_its_own(fields):
    model, x = ByMode(), torch.randn(6, 8)
    pipe = fxsplit.compile(model, Plan(**fields), example_args=(x,), check="devices" not in fields)
    for mode in (True, False):
        model.train(mode)
        assert_equivalent(model, pipe, x, rtol=1e-5, atol=1e-6)
        devices = [d.index or 0 for d in pipe.active.devices]
        assert devices == sorted(devices)  # nothing goes back and forth


def test_limits_that_nothing_is_limited_by_are_refused():
    for limits, devices in (({"cpu": "1KiB"}, ["cpu:0", "cpu:1"]), ({0: "1KiB"}, None)):
        with pytest.raises(errors.PlanError, match=r"max_memory= limits .*, but the plan's devices are cpu"):
            fxsplit.preview(gpt(), Plan(stages=2, devices=devices, max_memory=limits), example_args=(IDS,))
    with pytest.raises(errors.PartitionError, match="no cut"):
        fxsplit.preview(gpt(), Plan(stages=2, devices="cpu", max_memory={"cpu": 0}), example_args=(IDS,))


def test_a_device_maps_limit_is_for_weights_and_the_hardwares_for_training():
    model = gpt()
    weights = sum(p.numel() * 4 for p in model.parameters())
    for cost in ("params", "flops"):
        plan = Plan(device_map={"": "cpu"}, max_memory={"cpu": weights}, cost=cost)
        fxsplit.preview(model, plan, example_args=(IDS,))
        with pytest.raises(errors.PartitionError, match="more memory than cpu has"):
            plan = Plan(device_map={"": "cpu"}, hardware=Device(memory=weights), cost=cost)
            fxsplit.preview(model, plan, example_args=(IDS,))


def test_replicas_do_not_help_what_is_one_micro_batch():
    plan = Plan(replicas="auto", devices=["cpu"] * 4, cost="flops", micro_batches=1)
    assert fxsplit.preview(gpt(), plan, example_args=(IDS,)).assignment.replicas != (4,)
    five = fxsplit.preview(
        gpt(), Plan(stages=1, replicas=3, micro_batches=5, cost="flops"), example_args=(IDS,)
    )
    one = fxsplit.preview(gpt(), Plan(stages=1, cost="flops"), example_args=(IDS,))
    assert five.assignment.loads[0] == pytest.approx(
        one.assignment.loads[0] * 2 / 5
    )  # 2 of the 5 on one worker


@pytest.mark.slow
def test_more_micro_batches_than_rows_are_as_many_as_rows():
    def planned(m, schedule):
        plan = Plan(stages=2, cost="memory", checkpoint="always", micro_batches=m, schedule=schedule)
        return fxsplit.preview(gpt(), plan, example_args=(IDS[:2],)).assignment.forecast

    for schedule in ("gpipe", "1f1b"):
        assert planned(2, schedule) == planned(16, schedule)


def test_the_memory_error_names_the_device_that_is_too_small():
    limits = dict.fromkeys(["cuda:0", "cuda:1", "cuda:2"], "1GB") | {"cuda:3": 100}
    plan = Plan(replicas="auto", devices=list(limits), max_memory=limits, cost="flops", micro_batches=4)
    with pytest.raises(errors.PartitionError, match=r"of 100 B on cuda:3"):
        fxsplit.preview(gpt(), plan, example_args=(IDS,))


@pytest.mark.slow
def test_frozen_parameters_and_recomputation_are_weighed_as_they_are():
    model = Small()
    plan = Plan(stages=1, cost="memory", optimizer_states=2)
    trained = fxsplit.preview(model, plan, example_args=(torch.randn(4, 8),)).assignment
    weights = sum(p.numel() * 4 for p in model.parameters())
    frozen = fxsplit.preview(model.requires_grad_(False), plan, example_args=(torch.randn(4, 8),)).assignment
    assert trained.loads[0] - 4 * weights == pytest.approx(
        trained.forecast.stages[0].memory - 4 * weights, rel=0.5
    )
    assert frozen.loads[0] == weights

    def flops(**fields):
        return fxsplit.preview(
            gpt(), Plan(stages=1, cost="flops", **fields), example_args=(IDS,)
        ).assignment.loads[0]

    forward = flops(optimizer_states=None)
    assert flops() == 3 * forward and flops(checkpoint="always") == 4 * forward
    assert flops(checkpoint="except_last", micro_batches=4) == pytest.approx(3.75 * forward)
    assert 3 * forward < flops(checkpoint=["h.0"]) < flops(checkpoint=["h.0", "h.1"]) < 4 * forward


def test_costs_that_are_no_seconds():
    x = torch.randn(4, 8)
    for cost in (lambda node: 0.0, lambda node: 1e308):
        with pytest.raises(errors.PlanError, match=r"cost="):
            fxsplit.preview(Small(), Plan(stages=2, cost=cost), example_args=(x,))
    with pytest.raises(ZeroDivisionError) as caught:
        fxsplit.preview(Small(), Plan(stages=2, cost=lambda node: 1 / 0), example_args=(x,))
    assert "in cost=, for NodeCost(name=" in caught.value.__notes__[0]


def test_attention_of_any_spelling_on_the_meta_device():
    class Named(nn.Module):
        def __init__(self, broadcast):
            super().__init__()
            self.lin, self.broadcast = nn.Linear(8, 24), broadcast

        def forward(self, x):
            q, k, v = self.lin(x).view(4, 16, 3, 2, 4).permute(2, 0, 3, 1, 4)
            q = q[:1] if self.broadcast else q
            return nn.functional.scaled_dot_product_attention(query=q, key=k, value=v).sum(0)

    for broadcast in (False, True):
        plan = Plan(cost="flops")
        real = fxsplit.preview(Named(broadcast), plan, example_args=(torch.randn(4, 16, 8),)).assignment
        with torch.device("meta"):
            unreal = fxsplit.preview(Named(broadcast), plan, example_args=(torch.randn(4, 16, 8),)).assignment
        assert unreal.loads == real.loads
        if not broadcast:  # where it is taken apart after all, more seems to be kept
            assert unreal.forecast.stages[0].memory == real.forecast.stages[0].memory


def test_the_command_line_says_what_is_wrong_with_it(capsys, tmp_path):
    def run(*words):
        code = main(["plan", *words])
        return code, capsys.readouterr().err

    assert run(f"{__name__}:gpt_of", "--stages", "2") == (2, run(f"{__name__}:gpt_of", "--stages", "2")[1])
    assert "missing a required argument" in run(f"{__name__}:gpt_of")[1]
    assert "No such file" in run(f"{__name__}:factory", "--save", str(tmp_path / "no" / "plan.json"))[1]
    assert "stages=0" in run(f"{__name__}:factory", "--stages", "0")[1]


def test_the_command_line_places_a_v(capsys):
    assert main(["plan", f"{__name__}:factory", "--stages", "4", "--schedule", "zb_v", "--meta"]) == 0
    text = capsys.readouterr().out
    placed = [line.split()[:2] for line in text.splitlines() if "cuda:" in line]
    assert placed == [["0", "cuda:0"], ["1", "cuda:1"], ["2", "cuda:1"], ["3", "cuda:0"]], text


def gpt_of(layers):
    return gpt(layers), (IDS,)


def test_costs_come_back_where_a_parameter_travels():
    """A tied weight on two devices adds nodes to the program; the recorded seconds are still those of the model."""
    plan = Plan(stages=3, devices=["cpu:0", "cpu:1", "cpu:2"], cost=odd_seconds)
    pipe = fxsplit.compile(gpt(), plan, example_args=(IDS,), check=False)
    assert "call_with" in "".join(stage.code for stage in pipe)
    again = fxsplit.preview(gpt(), plan.replace(cost=pipe.assignment.costs), example_args=(IDS,)).assignment
    assert again.stages == pipe.assignment.stages and again.loads == pipe.assignment.loads


def test_a_weight_that_is_read_twice_is_counted_once():
    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(torch.tanh(self.a(x)))

    model = Reused()
    found = node_costs(model, trace(model, (torch.randn(2, 4),), {}), None)
    assert [n.parameters for n in found.values()] == [80, 0, 0]
    assert [parameter_copies(states) for states in (None, 0, 2)] == [1, 2, 4]


def test_attention_to_more_than_the_queries():
    q, k, v = (torch.empty(2, 3, n, width, device="meta") for n, width in ((5, 4), (7, 4), (7, 6)))
    with FusedAttention() as fused:
        assert nn.functional.scaled_dot_product_attention(q, k, v).shape == (2, 3, 5, 6)
    assert fused.flops == 2 * (2 * 3 * 5 * 7) * (4 + 6)
