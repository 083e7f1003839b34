"""The structural proof: damage of every kind is caught by the rule that is there for it."""

import operator
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxsplit
from fxsplit import Plan
from fxsplit.codegen.emit import generate
from fxsplit.inserted.ops import checkpoint, transfer
from fxsplit.memory.regions import chosen_runs
from fxsplit.partition.shared import partition_with_homes
from fxsplit.proof.inline import inline
from fxsplit.proof.structure import RULES, verify_structure
from fxsplit.trace.front import trace
from tests.models import MODELS, build
from tests.partition.test_placement import MAPS

PLANS = [fxsplit.Plan(stages=3), fxsplit.Plan(stages=2)]


def made(name="gpt", plan=PLANS[0], checkpoints=False):
    model, batch = build(name)
    traced = trace(model, batch(4), {})
    plan = plan.replace(checkpoint="always" if checkpoints else "never")
    traced, assignment = partition_with_homes(model, traced, plan, traced.signature.flatten(batch(4), {}))
    program = generate(model, traced, assignment, chosen_runs(model, traced, assignment, plan, batch(4)))
    return model, traced, program


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_program_obeys_every_rule(name, checkpoints):
    for plan in (*PLANS, fxsplit.Plan(device_map=MAPS.get(name, {"": "cpu:1"}))):
        model, traced, program = made(name, plan, checkpoints)
        verify_structure(model, traced, program)
        assert [n.op for n in inline(program).nodes] == [n.op for n in traced.graph.nodes]


def nodes(program, op=None, target=None, stage=None):
    found = [(s, n) for s in program.stages for n in s.module.graph.nodes]
    return [
        n
        for s, n in found
        if (op is None or n.op == op)
        and (target is None or n.target is target)
        and (stage is None or s.index == stage)
    ]


def drop_a_node(program):
    node = next(n for n in nodes(program, "call_module") if n.target == "h_1_ln_2")
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def duplicate_a_node(program):
    node = nodes(program, "call_module")[2]
    with node.graph.inserting_after(node):
        copy = node.graph.call_module(node.target, (node,))
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def swap_two_arguments(program):
    node = nodes(program, "call_function", operator.add)[1]
    node.args = node.args[::-1]


def change_a_constant(program):
    node = nodes(program, "call_method")[0]
    node.args = (*node.args[:-1], 7)


def change_a_keyword(program):
    node = next(n for n in nodes(program) if "is_causal" in n.kwargs)
    node.kwargs = {"is_causal": False}


def retarget_a_module(program):
    node = next(n for n in nodes(program, "call_module") if n.target == "h_1_ln_1")
    node.target = "h_1_ln_2"


def retarget_a_function(program):
    nodes(program, "call_function", operator.add)[0].target = operator.sub


def rename_a_path(program):
    program.stages[1].paths["h_1_ln_1"] = "h.1.ln_2"


def swap_two_modules(program):
    stage = program.stages[1].module
    stage.h_1_ln_1, stage.h_1_ln_2 = stage.h_1_ln_2, stage.h_1_ln_1


def copy_a_module(program):
    stage = program.stages[1].module
    stage.h_1_ln_1 = nn.LayerNorm(16)


def swap_two_nodes(program):
    first = next(n for n in nodes(program, "call_method", "split", 1))
    first.next.append(first)


def swap_stages(program):
    calls = [n for n in program.root.graph.nodes if n.op == "call_module"]
    calls[0].target, calls[1].target = calls[1].target, calls[0].target


def skip_a_stage(program):
    call = [n for n in program.root.graph.nodes if n.op == "call_module"][1]
    call.replace_all_uses_with(call.args[0])
    program.root.graph.erase_node(call)


def swap_inputs_of_a_stage(program):
    call = next(n for n in program.root.graph.nodes if n.op == "call_module" and len(n.args) > 1)
    call.args = call.args[::-1]


def change_the_output(program):
    output = program.stages[-1].module.graph.output_node()
    output.args = (output.args[0].args[0],)


def drop_the_models_output(program):
    output = program.root.graph.output_node()
    output.args = ((),)


DAMAGE = {
    drop_a_node: "same-graph",
    duplicate_a_node: "same-graph",
    swap_two_arguments: "same-graph",
    change_a_constant: "same-graph",
    change_a_keyword: "same-graph",
    retarget_a_module: "same-graph",
    retarget_a_function: "same-graph",
    rename_a_path: "same-graph",
    swap_two_modules: "own-objects",
    copy_a_module: "own-objects",
    swap_two_nodes: "defined-before-use",
    swap_stages: "interface",
    skip_a_stage: "interface",
    change_the_output: "interface",
    drop_the_models_output: "interface",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damage_is_caught(damage):
    model, traced, program = made()
    damage(program)
    with pytest.raises(fxsplit.errors.VerifyError, match=DAMAGE[damage]):
        verify_structure(model, traced, program)


def test_swapped_inputs_are_caught():
    model, traced, program = made("unet")
    swap_inputs_of_a_stage(program)
    with pytest.raises(fxsplit.errors.VerifyError, match="interface"):
        verify_structure(model, traced, program)


def test_damage_in_a_checkpoint_region_is_caught():
    model, traced, program = made(checkpoints=True)
    call = nodes(program, "call_function", checkpoint)[1]
    region = program.stages[1].module.checkpoint_0
    add = next(n for n in region.graph.nodes if n.target is operator.add)
    add.args = add.args[::-1]
    with pytest.raises(fxsplit.errors.VerifyError, match="same-graph"):
        verify_structure(model, traced, program)
    assert call.op == "call_function"


def test_transfers_to_the_wrong_device_and_for_nothing_are_caught():
    for device, said in (("cuda:3", "moves 'out' to cuda:3"), ("cuda:0", "moves 'out' to cuda:0")):
        model, traced, program = made("gpt", fxsplit.Plan(device_map=MAPS["gpt"]))
        node = nodes(program, "call_function", transfer, 1)[0]
        node.args = (node.args[0], torch.device(device))
        with pytest.raises(fxsplit.errors.VerifyError, match="minimal-transfers") as caught:
            verify_structure(model, traced, program)
        assert said in str(caught.value)
    model, traced, program = made()
    placeholder = nodes(program, "placeholder", stage=1)[0]
    graph = placeholder.graph
    with graph.inserting_after(placeholder):
        node = graph.call_function(transfer, (placeholder, torch.device("cpu")))
    placeholder.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    with pytest.raises(fxsplit.errors.VerifyError, match="is on cpu already"):
        verify_structure(model, traced, program)


def test_verify_names_the_users_line():
    model, traced, program = made()
    retarget_a_function(program)
    with pytest.raises(fxsplit.errors.VerifyError, match=r"gpt\.py:\d+"):
        verify_structure(model, traced, program)


def test_other_numbers_than_the_models_are_an_error():
    class AsksWhoWatches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            watched = len(torch.overrides._get_current_function_mode_stack()) + torch.compiler.is_compiling()
            return self.last(self.first(x) * (2 + watched))

    said = (
        r"in train mode, .* another output 0 than the model: off by (.|\n)*first seen in the output of 'last'"
    )
    with pytest.raises(fxsplit.errors.VerifyError, match=said) as caught:
        fxsplit.compile(AsksWhoWatches(), fxsplit.Plan(), example_args=(torch.randn(3, 4),))
    assert any("torch.export" in note for note in caught.value.__notes__)


def test_state_on_the_python_side_is_refused():
    class Remembers(nn.Module):
        seen = []  # noqa: RUF012

        def forward(self, x):
            self.seen.append(1)
            return x * len(self.seen)

    with pytest.raises(fxsplit.errors.TraceError, match="from one call to the next"):
        fxsplit.compile(Remembers(), fxsplit.Plan(), example_args=(torch.randn(3, 4),))


def test_assert_equivalent_can_fail():
    model, batch = build("gpt")
    pipe = fxsplit.compile(model, fxsplit.Plan(stages=2), example_args=batch(4))
    other = type(model)(12, width=16, layers=3, heads=2, context=16)
    with pytest.raises(fxsplit.errors.VerifyError, match="output 0 differs"):
        fxsplit.testing.assert_equivalent(other, pipe, *batch(4))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x):
        self.n.add_(1)
        return self.b(self.a(x)) * self.n


def test_a_reader_of_a_buffer_after_its_last_write_is_in_the_writers_stage():
    """The next micro-batch writes again, before or after another stage reads."""
    model, x = Counts(), torch.randn(4, 4)
    pipe = fxsplit.compile(model, Plan(), example_args=(x,))
    rule = next(rule for rule in RULES if rule.name == "effects-together")
    assert not list(rule.check(model, pipe.traced, pipe.program))
    (names,) = pipe.assignment.stages
    at = names.index("b")
    parts = (names[:at], names[at:])
    cut = replace(
        pipe.assignment,
        stages=parts,
        devices=pipe.assignment.devices * 2,
        loads=pipe.assignment.loads * 2,
        rows=pipe.assignment.rows * 2,
    )
    program = generate(model, pipe.traced, cut)
    found = list(rule.check(model, pipe.traced, program))
    assert found and all("in another stage" in violation.what for violation in found)
    with pytest.raises(fxsplit.errors.PartitionError, match="cut"):
        fxsplit.compile(model, Plan(cut=["b"]), example_args=(x,))
