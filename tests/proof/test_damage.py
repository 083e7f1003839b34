"""Damage of many kinds at random places of correct programs: all of it is caught, by the rule that is there for it."""

import copy
import gc
import linecache
import operator
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxsplit
from fxsplit.codegen.emit import generate
from fxsplit.graph.code import Printed, StageModule, printed
from fxsplit.graph.nodes import compute_nodes, region_modules
from fxsplit.inserted.ops import checkpoint, transfer
from fxsplit.memory.regions import chosen_runs
from fxsplit.partition.assign import partition
from fxsplit.proof.structure import verify_structure
from fxsplit.trace.front import trace


class Victim(nn.Module):
    """Something of everything: skips, buffers, dropout, state, contexts, factories, methods, keywords."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.norm, self.drop, self.counter = nn.BatchNorm1d(4), nn.Dropout(0.5), Counter()

    def forward(self, x, y):
        h = self.a(x).relu() - y
        h = self.norm(h) / torch.full((4,), 2.0, device=x.device)
        with torch.no_grad():
            scale = self.b(h).softmax(dim=-1)
            scale = scale - scale.mean(-1, keepdim=True)
        k = self.drop(self.c(h)) * scale - x
        k = self.counter(k)
        k = F.gelu(k, approximate="tanh")
        z = self.d(k - h)
        z.sub_(y)
        return {"z": z - h, "k": k.sum(1), "n": 3}


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count


PLACED = {"": "cuda:0", "b": "cuda:1", "c": "cuda:1", "drop": "cuda:1", "counter": "cuda:1", "d": "cuda:0"}
PLANS = [
    fxsplit.Plan(stages=3, checkpoint="always"),
    fxsplit.Plan(stages=4, checkpoint="always"),
    fxsplit.Plan(device_map=PLACED, checkpoint="always"),
]


class Subject:
    """A correct program to be damaged, and a source of chance."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        self.model, self.inputs = Victim(), [torch.randn(5, 4), torch.randn(5, 4)]
        self.traced = trace(self.model, tuple(self.inputs), {})
        self.plan = self.chance.choice(PLANS)
        self.traced, assignment = partition(self.model, self.traced, self.plan, self.inputs)
        runs = (
            chosen_runs(self.model, self.traced, assignment, self.plan, self.inputs)
            if seed % 2 == 0
            else None
        )
        self.program = generate(self.model, self.traced, assignment, runs)
        verify_structure(self.model, self.traced, self.program)

    def modules(self):
        return [m for s in self.program.stages for m in (s.module, *region_modules(s.module))]

    def pick(self, wanted):
        found = [n for m in self.modules() for n in m.graph.nodes if wanted(n)]
        if not found:
            raise NotApplicableError
        return self.chance.choice(found)

    def stage(self, wanted=lambda s: True):
        found = [s for s in self.program.stages if wanted(s)]
        if not found:
            raise NotApplicableError
        return self.chance.choice(found)

    def change(self, stage, **fields):
        stages = tuple(replace(s, **fields) if s.index == stage.index else s for s in self.program.stages)
        self.program = replace(self.program, stages=stages)


class NotApplicableError(Exception):
    pass


def is_model_node(node):
    own = node.target not in (transfer, checkpoint) and not node.meta.get("again")
    return (
        node.op in ("call_module", "call_function", "call_method")
        and own
        and node.target is not operator.getitem
    )


def computes(node):
    return (
        is_model_node(node)
        and node.users
        and not str(node.target).startswith("__")
        and "grad" not in str(node.target)
    )


def reads_a_value(node):
    return computes(node) and node.args and isinstance(node.args[0], fx.Node)


def drop_an_operation(s):
    node = s.pick(reads_a_value)
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def duplicate_an_operation(s):
    node = s.pick(reads_a_value)
    with node.graph.inserting_after(node):
        twin = node.graph.node_copy(node)
    twin.args = (node, *node.args[1:])
    node.replace_all_uses_with(twin, delete_user_cb=lambda user: user is not twin)


def swap_two_operands(s):
    node = s.pick(lambda n: computes(n) and len(n.args) == 2 and n.args[0] is not n.args[1])
    node.args = node.args[::-1]


def replace_an_operand(s):
    node = s.pick(reads_a_value)
    earlier = [
        n
        for n in node.graph.nodes
        if n < node and n is not node.args[0] and n.op in ("placeholder", "call_module")
    ]
    if not earlier:
        raise NotApplicableError
    node.args = (s.chance.choice(earlier), *node.args[1:])


def change_a_constant(s):
    node = s.pick(lambda n: computes(n) and any(isinstance(a, int | float) for a in n.args))
    node.args = tuple(a + 1 if isinstance(a, int | float) else a for a in node.args)


def change_a_keyword(s):
    node = s.pick(lambda n: computes(n) and any(isinstance(v, bool | str | int) for v in n.kwargs.values()))
    node.kwargs = {k: "none" if isinstance(v, str) else not v for k, v in node.kwargs.items()}


def drop_a_keyword(s):
    node = s.pick(lambda n: computes(n) and n.kwargs)
    node.kwargs = {}


def retarget_a_module(s):
    node = s.pick(lambda n: n.op == "call_module")
    node.target = s.chance.choice([t for t in ("a", "b", "c", "d", "norm", "drop") if t != node.target])


def retarget_a_function(s):
    node = s.pick(
        lambda n: n.op == "call_function" and n.target in (operator.sub, operator.mul, operator.truediv)
    )
    node.target = operator.add


def retarget_a_method(s):
    s.pick(
        lambda n: n.op == "call_method" and n.target in ("relu", "softmax", "sum", "mean", "sub_")
    ).target = "abs"


def write_in_place_instead(s):
    s.pick(lambda n: n.op == "call_method" and n.target == "relu").target = "relu_"


def add_an_effect(s):
    node = s.pick(computes)
    with node.graph.inserting_after(node):
        node.graph.call_method("zero_", (node,))


def reorder_two_operations(s):
    node = s.pick(lambda n: computes(n) and computes(n.next) and n not in n.next.all_input_nodes)
    node.next.append(node)


def use_before_it_is_computed(s):
    node = s.pick(lambda n: computes(n) and any(u.op != "output" for u in n.users))
    last = max(u for u in node.users if u.op != "output")
    last.append(node)


def drop_a_context(s):
    node = s.pick(lambda n: n.target == "__enter__" and not n.meta.get("again"))
    node.graph.erase_node(node)


def leave_a_context_early(s):
    node = s.pick(lambda n: n.target == "__exit__" and not n.meta.get("again") and computes(n.prev))
    node.prev.prepend(node)


def do_not_enter_a_context_again(s):
    node = s.pick(lambda n: n.meta.get("again") and n.op == "call_function" and len(n.users) > 1)
    for user in list(node.users):
        if user.target == "__enter__":
            node.graph.erase_node(user)
    node.meta.pop("again")


def enter_another_context_again(s):
    node = s.pick(lambda n: n.meta.get("again") and n.op == "call_function")
    node.target = torch.enable_grad


def do_not_leave_a_context(s):
    node = s.pick(lambda n: n.target == "__exit__" and n.meta.get("again"))
    node.graph.erase_node(node)


def erase_a_repeated_entry(s):
    node = s.pick(lambda n: n.meta.get("again") and n.target == "__enter__")
    node.graph.erase_node(node)


def enter_again_too_late(s):
    node = s.pick(lambda n: n.meta.get("again") and n.target == "__enter__")
    own = [n for n in node.graph.nodes if computes(n) and not n.meta.get("again")]
    if not own:
        raise NotApplicableError
    own[-1].append(node)


def swap_two_outputs_of_a_stage(s):
    stage = s.stage(lambda t: len(t.outputs) > 1)
    output = stage.module.graph.output_node()
    output.args = (output.args[0][::-1],)


def drop_an_output_of_a_stage(s):
    stage = s.stage(lambda t: len(t.outputs) > 1)
    output = stage.module.graph.output_node()
    output.args = (output.args[0][:-1],)


def calls(s):
    return [n for n in s.program.root.graph.nodes if n.op == "call_module"]


def swap_the_inputs_of_a_call(s):
    node = s.chance.choice([n for n in calls(s) if len(n.args) > 1])
    node.args = node.args[::-1]


def swap_two_stages(s):
    first, second = s.chance.sample(calls(s), 2)
    first.target, second.target = second.target, first.target


def call_a_stage_twice(s):
    node = s.chance.choice(calls(s))
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)


def swap_two_results(s):
    output = s.program.root.graph.output_node()
    output.args = ((output.args[0][1], output.args[0][0], *output.args[0][2:]),)


def change_a_constant_result(s):
    output = s.program.root.graph.output_node()
    output.args = ((*output.args[0][:-1], 4),)


def drop_a_transfer(s):
    node = s.pick(lambda n: n.target is transfer)
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def transfer_twice(s):
    node = s.pick(lambda n: n.target is transfer)
    with node.graph.inserting_after(node):
        node.graph.node_copy(node)


def transfer_to_another_device(s):
    node = s.pick(lambda n: n.target is transfer)
    node.args = (node.args[0], torch.device("cuda:3"))


def transfer_for_nothing(s):
    stage = s.stage(lambda t: t.inputs)
    node = next(n for n in stage.module.graph.nodes if n.op == "placeholder" and n.users)
    if any(u.target is transfer for u in node.users):
        raise NotApplicableError
    with node.graph.inserting_after(node):
        moved = node.graph.call_function(transfer, (node, stage.device))
    node.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)


def keep_the_examples_device(s):
    if s.plan.device_map is None:
        raise NotApplicableError
    node = s.pick(lambda n: "device" in n.kwargs)
    node.kwargs = {**node.kwargs, "device": torch.device("cpu")}


def place_a_stage_elsewhere(s):
    if s.plan.device_map is None:
        raise NotApplicableError
    s.change(s.stage(), device=torch.device("cuda:3"))


def copy_a_module(s):
    stage = s.stage(lambda t: any(isinstance(getattr(t.module, n, None), nn.Linear) for n in t.paths))
    name = next(n for n in stage.paths if isinstance(getattr(stage.module, n, None), nn.Linear))
    setattr(stage.module, name, copy.deepcopy(getattr(stage.module, name)))


def swap_two_modules(s):
    holder = next((m for m in s.modules() if sum(isinstance(c, nn.Linear) for c in m.children()) > 1), None)
    if holder is None:
        raise NotApplicableError
    first, second = [n for n, c in holder.named_children() if isinstance(c, nn.Linear)][:2]
    one, two = getattr(holder, first), getattr(holder, second)
    setattr(holder, first, two)
    setattr(holder, second, one)


def rename_a_path(s):
    stage = s.stage(lambda t: "a" in t.paths or "c" in t.paths)
    s.change(stage, paths={n: {"a": "c", "c": "a"}.get(f, f) for n, f in stage.paths.items()})


def say_other_inputs(s):
    stage = s.stage(lambda t: len(t.inputs) > 1)
    s.change(stage, inputs=stage.inputs[::-1])


def say_other_outputs(s):
    stage = s.stage(lambda t: t.outputs)
    s.change(stage, outputs=(*stage.outputs[:-1], "other"))


def say_other_results(s):
    s.program = replace(
        s.program, outputs=(s.program.outputs[1], s.program.outputs[0], *s.program.outputs[2:])
    )


def say_other_arguments(s):
    s.program = replace(s.program, inputs=s.program.inputs[::-1])


def forget_an_operation(s):
    stage = s.stage(lambda t: len(t.nodes) > 1)
    s.change(stage, nodes=stage.nodes[:-1])


def say_an_operation_twice(s):
    one, two = s.chance.sample(list(s.program.stages), 2)
    s.change(one, nodes=(*one.nodes, two.nodes[0]))


def hide_a_written_buffer(s):
    s.change(s.stage(lambda t: t.writes), writes=())


def hide_state(s):
    s.change(s.stage(lambda t: t.stateful), changes=())


def hide_random_numbers(s):
    s.change(s.stage(lambda t: t.random), random=False)


def hide_a_parameter(s):
    stage = s.stage(lambda t: t.parameters)
    s.change(stage, parameters=stage.parameters[1:])


def regions(s, wanted=lambda r: True):
    found = [r for m in s.program.stages for r in region_modules(m.module) if wanted(r)]
    if not found:
        raise NotApplicableError
    return s.chance.choice(found)


def drop_an_input_of_a_region(s):
    node = s.pick(lambda n: n.target is checkpoint and len(n.args) > 2)
    node.args = node.args[:-1]
    region = getattr(node.graph.owning_module, str(node.args[0].target))
    last = [n for n in region.graph.nodes if n.op == "placeholder"][-1]
    last.replace_all_uses_with(next(n for n in region.graph.nodes if n.op == "placeholder"))
    region.graph.erase_node(last)


def swap_two_inputs_of_a_region(s):
    node = s.pick(lambda n: n.target is checkpoint and len(n.args) > 2)
    node.args = (node.args[0], *node.args[1:][::-1])


def forget_the_random_numbers_of_a_region(s):
    regions(s, lambda r: r.meta["random"]).meta["random"] = False


def forget_the_buffers_of_a_region(s):
    regions(s, lambda r: r.meta["writes"]).meta["writes"] = []


def put_back_another_buffer(s):
    meta = regions(s, lambda r: len(r.meta["writes"]) > 1).meta
    meta["writes"] = [meta["writes"][-1]] * len(meta["writes"])


def forget_whose_modules_they_are(s):
    s.change(s.stage(lambda t: t.paths), paths={})


def repeat_an_effect(s):
    """The counter is put into a region."""
    stage = s.stage(lambda t: t.stateful and any(n.target == "counter" for n in t.module.graph.nodes))
    node = next(n for n in stage.module.graph.nodes if n.target == "counter")
    region_graph = fx.Graph()
    inner = region_graph.create_node("placeholder", "value", name="value")
    region_graph.output(region_graph.create_node("call_module", "counter", (inner,), name=node.name))
    region = StageModule({"counter": stage.module.counter}, region_graph, "Region")
    region.meta.update(random=False, writes=[])
    stage.module.again = region
    with node.graph.inserting_before(node):
        call = node.graph.call_function(checkpoint, (node.graph.get_attr("again"), node.args[0]))
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)


def cut_between_a_write_and_its_reader(s):
    nodes = compute_nodes(s.traced.graph)
    write = next(i for i, n in enumerate(nodes) if n.target == "sub_")
    bounds = [[n.name for n in nodes[:write]], [n.name for n in nodes[write:]]]
    _, assignment = partition(s.model, s.traced, fxsplit.Plan(stages=2), s.inputs)
    s.program = generate(s.model, s.traced, replace(assignment, stages=tuple(map(tuple, bounds))))


def run_another_text(s):
    stage = s.stage(lambda t: " - " in t.module.code)
    kind = type(stage.module)
    text = printed(stage.module).text
    kind._fxsplit_printed = Printed(replace(text, code=text.code.replace(" - ", " + ", 1)), [])


SAME = {"same-graph"}
DAMAGE = {
    drop_an_operation: {"same-graph", "interface"},  # the latter where a stage gives the value
    duplicate_an_operation: {"same-graph", "interface"},  # the latter where a stage gives the value
    swap_two_operands: SAME,
    replace_an_operand: SAME,
    change_a_constant: SAME,
    change_a_keyword: SAME,
    drop_a_keyword: SAME,
    retarget_a_module: SAME,
    retarget_a_function: SAME,
    retarget_a_method: SAME,
    write_in_place_instead: SAME,
    add_an_effect: SAME,
    reorder_two_operations: SAME,
    use_before_it_is_computed: {"defined-before-use"},
    drop_a_context: SAME,
    leave_a_context_early: SAME,
    do_not_enter_a_context_again: {"same-graph", "contexts"},
    enter_another_context_again: {"contexts"},
    do_not_leave_a_context: {"contexts"},
    erase_a_repeated_entry: {"contexts"},
    enter_again_too_late: {"contexts"},
    swap_two_outputs_of_a_stage: {"interface"},
    drop_an_output_of_a_stage: {"interface"},
    swap_the_inputs_of_a_call: {"interface"},
    swap_two_stages: {"interface"},
    call_a_stage_twice: {"interface"},
    swap_two_results: {"interface"},
    change_a_constant_result: {"interface"},
    drop_a_transfer: {"minimal-transfers"},
    transfer_twice: {"minimal-transfers"},
    transfer_to_another_device: {"minimal-transfers"},
    transfer_for_nothing: {"minimal-transfers"},
    keep_the_examples_device: {"devices-follow"},
    place_a_stage_elsewhere: {"minimal-transfers"},
    copy_a_module: {"own-objects"},
    swap_two_modules: {"own-objects"},
    rename_a_path: SAME,
    say_other_inputs: {"interface"},
    say_other_outputs: {"interface"},
    say_other_results: {"interface"},
    say_other_arguments: {"interface"},
    forget_an_operation: {"complete"},
    say_an_operation_twice: {"complete"},
    hide_a_written_buffer: {"effects-known"},
    hide_state: {"effects-known"},
    hide_random_numbers: {"effects-known"},
    hide_a_parameter: {"effects-known"},
    drop_an_input_of_a_region: SAME,
    swap_two_inputs_of_a_region: SAME,
    forget_the_random_numbers_of_a_region: {"repeatable"},
    forget_the_buffers_of_a_region: {"repeatable"},
    put_back_another_buffer: {"repeatable"},
    forget_whose_modules_they_are: {"own-objects", "same-graph"},
    repeat_an_effect: {"repeatable"},
    cut_between_a_write_and_its_reader: {"effects-together"},
    run_another_text: {"text"},
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damage_is_caught(damage):
    done = 0
    for seed in range(24):
        subject = Subject(seed)
        try:
            damage(subject)
        except NotApplicableError:
            continue
        done += 1
        with pytest.raises(fxsplit.errors.VerifyError) as caught:
            verify_structure(subject.model, subject.traced, subject.program)
        assert any(f"rule {rule!r}" in str(caught.value) for rule in DAMAGE[damage]), str(caught.value)
        if done == 4:
            return
    assert done, "no place for this damage was found"


def test_a_violation_shows_the_program_around_it_and_the_users_line():
    subject = Subject(2)
    change_a_keyword(subject)
    with pytest.raises(fxsplit.errors.VerifyError) as caught:
        verify_structure(subject.model, subject.traced, subject.program)
    assert "\n  > " in str(caught.value) and "test_damage.py:" in str(caught.value)


class MakesItsParts(nn.Module):
    """What was None is a parameter and a module after its first forward."""

    def __init__(self):
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(4, 4), None, None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(4))
        if self.last is None:
            self.last = nn.Linear(4, 4)
        return self.last(self.first(x)) * self.scale


@pytest.mark.parametrize("nested", [False, True])
def test_parts_that_forward_makes_where_there_was_none(nested):
    model = nn.Sequential(nn.Linear(4, 4), MakesItsParts()) if nested else MakesItsParts()
    part = model[1] if nested else model
    before = list(model.state_dict())
    try:
        fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.randn(4, 4),))
    except fxsplit.errors.FxsplitError:
        assert part.scale is None and part.last is None and list(model.state_dict()) == before
        assert model(torch.randn(2, 4)).shape == (2, 4)
    else:
        assert torch.isfinite(model(torch.randn(2, 4))).all()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_submodule_keeps_its_modes():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2, micro_batches=2), example_args=(torch.randn(4, 4),))
    assert all(m.training for m in model.modules())
    model.eval()
    x = torch.randn(4, 4)
    assert torch.allclose(pipe(x), model(x)) and not any(m.training for m in model.modules())


def test_lines_of_generated_code_go_with_their_modules():
    def compiled():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=(torch.randn(4, 4),))

    def ours():
        gc.collect()
        return {name for name in linecache.cache if name.startswith("<fxsplit")}

    pipe, before = None, ours()
    for _ in range(3):
        pipe = compiled()
    held = ours() - before
    assert held  # tracebacks show them
    del pipe
    assert not ours() - before
