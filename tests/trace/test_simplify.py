"""What computes nothing is gone, and what is said of sizes is true of other calls."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxsplit
from fxsplit import Plan
from fxsplit.errors import GuardError
from fxsplit.graph.ir import NodeFacts, TensorSpec
from fxsplit.graph.nodes import resolve
from fxsplit.inserted.ops import guard
from fxsplit.testing import assert_equivalent
from fxsplit.trace.sizes import Shape, Size, compared, divided, named, plus, sizes_of, times
from tests import models

A, B = named("x.0"), named("x.1")


def test_numbers_are_polynomials_in_sizes():
    area = times(plus(A, 2), plus(B, 3))
    assert plus(area, area, -1) == 0 and plus(A, 0) == A and times(A, 1) == A
    assert divided(times(times(A, B), 6), times(B, 3)) == times(A, 2)
    assert divided(plus(times(A, 4), 2), 2) == plus(times(A, 2), 1)
    assert times(plus(A, 1), plus(A, 1, -1)) == plus(times(A, A), 1, -1)
    assert times(plus(A, B), plus(A, B)) == plus(plus(times(A, A), times(B, B)), times(times(A, B), 2))
    assert divided(A, 2) is None and divided(A, B) is None and divided(A, 0) is None


@pytest.mark.parametrize(
    ("kind", "a", "b", "is_it"),
    [
        ("le", 0, A, True),
        ("lt", A, 0, False),
        ("gt", plus(A, 1), 0, True),
        ("eq", plus(A, 1), A, False),
        ("ne", plus(A, 1), A, True),
        ("ge", plus(A, B), A, True),
        ("eq", A, A, True),
        ("gt", A, 0, None),
        ("eq", A, B, None),
        ("eq", A, 0, None),
        ("le", A, B, None),
        ("lt", 0, A, None),
    ],
)
def test_what_always_holds_is_known(kind, a, b, is_it):
    import operator

    assert compared(getattr(operator, kind), a, b) is is_it


def test_nothing_is_said_that_is_wrong_of_the_example():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    graph.output((y,))
    for rows, known in (
        (2, Shape((A, B))),
        (3, None),
    ):  # somebody's function that is only called like torch's
        sizes = {x.name: (2, 4), y.name: (rows, 4), "output": ()}
        facts = {
            n: NodeFacts("", None, value=TensorSpec(s, torch.float32, torch.device("cpu")))
            for n, s in sizes.items()
        }
        found = sizes_of(graph, facts, {})[y]
        assert found == known or (known is None and not isinstance(found, Shape))


class Shapes(fx.Interpreter):
    """The sizes that values have in a call."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=False)
        self.seen = {}

    def run_node(self, n):
        self.seen[n.name] = value = super().run_node(n)
        return value


def of_call(number, seen):
    if not isinstance(number, Size):
        return number
    whole = 0
    for names, n in number.terms:
        for name in names:
            node, _, dim = name.rpartition(".")
            n *= seen[node].shape[int(dim)]
        whole += n
    return whole


def is_true(value, actual, seen):
    if isinstance(value, Shape):
        return tuple(of_call(s, seen) for s in value.sizes) == tuple(actual.shape)
    if isinstance(value, int | Size):
        return of_call(value, seen) == actual
    if isinstance(value, tuple | list):
        return len(value) == len(actual) and all(
            v is None or is_true(v, a, seen) for v, a in zip(value, actual, strict=True)
        )
    return True


@pytest.mark.parametrize("name", sorted(models.MODELS))
def test_sizes_are_those_of_calls_with_other_batches(name):
    torch.manual_seed(0)
    model, batch = models.build(name)
    model.eval()

    def args(rows):
        found = batch(rows)
        return found if isinstance(found, tuple) else (found,)

    traced = fxsplit.compile(model, Plan(stages=2), example_args=args(6)).traced
    objects = {
        str(n.target): traced.constants.get(str(n.target), None)
        if str(n.target) in traced.constants
        else resolve(model, str(n.target))
        for n in traced.graph.nodes
        if n.op in ("call_module", "get_attr")
    }
    found = sizes_of(traced.graph, traced.facts, objects)
    known = [v for v in found.values() if isinstance(v, Shape)]
    assert known
    for rows in (1, 2, 5):
        run = Shapes(traced.module)
        with torch.no_grad():
            run.run(*torch.utils._pytree.tree_leaves(args(rows)))
        for node, value in found.items():
            assert is_true(value, run.seen[node.name], run.seen), (node.name, value)


def nodes_of(forward, *args, module=None):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, *args):
            return forward(self, *args)

    model = Model()
    pipe = fxsplit.compile(model, Plan(stages=2), example_args=args)
    return model, pipe, list(pipe.traced.graph.nodes)


X = torch.randn(6, 4)


def test_a_size_that_never_changes_is_a_number_and_its_guard_is_gone():
    def forward(m, x):
        q, k = m.a(x).chunk(2, dim=1)
        if q.size(1) > 1:
            q = q * q.size(1)
        return m.b(torch.cat([q, k], 1))

    model, pipe, nodes = nodes_of(forward, X)
    assert not [n for n in nodes if n.target is guard or n.target == "size"]
    assert "q, k = " in pipe[0].code + pipe[1].code
    assert_equivalent(model, pipe, torch.randn(3, 4))


def test_a_guard_that_may_fail_stays_once():
    def forward(m, x):
        for layer in (m.a, m.b):
            x = layer(x) * 2 if x.size(0) > 2 else layer(x)
        return x

    _, pipe, nodes = nodes_of(forward, X)
    assert len([n for n in nodes if n.target is guard]) == 1
    with pytest.raises(GuardError):
        pipe(torch.randn(2, 4))


def test_an_activation_does_not_travel_for_its_size():
    def forward(m, x):
        h = m.a(x)
        y = torch.tanh(h)
        rows = h.size(0)
        return m.b(y) / rows

    _, pipe, _ = nodes_of(forward, X)
    assert len(pipe[1].inputs) <= 2
    facts = pipe.traced.facts
    tensors = [n for n in pipe[1].inputs if isinstance(facts[n].value, TensorSpec)]
    assert len(tensors) == 1


@pytest.mark.parametrize(
    ("keep", "forward"),
    [
        (False, lambda m, x: m.b(m.a(x).to(x.device))),
        (False, lambda m, x: m.b(m.a(x).to(torch.float32))),
        (True, lambda m, x: m.b(m.a(x).to(torch.float64).float())),
        (False, lambda m, x: m.b(m.a(x)) * (torch.arange(x.size(1)) + 0)),
        (True, lambda m, x: m.b(m.a(x) + 0)),  # -0.0 + 0 is 0.0
        (True, lambda m, x: m.b(m.a(x)) * (x.argmax() + 0)),
    ],
    ids=["to its device", "to its type", "to others", "integers + 0", "numbers + 0", "integers of x + 0"],
)
def test_what_does_nothing(keep, forward):
    model, pipe, nodes = nodes_of(forward, X)
    names = [n.name for n in nodes]
    assert any(n.startswith(("to", "add")) for n in names) is (keep and "argmax" not in names)
    assert_equivalent(model, pipe, torch.randn(3, 4))


def test_a_copy_that_somebody_may_notice_stays():
    def forward(m, x):
        n = torch.arange(x.size(1))
        other = n + 0
        other.add_(1)
        return m.b(m.a(x)) * n + other

    model, pipe, _ = nodes_of(forward, X)
    assert_equivalent(model, pipe, torch.randn(3, 4))


def test_what_nobody_reads_is_gone_unless_it_does_something():
    def forward(m, x):
        torch.zeros(x.size(0), 3)
        x.transpose(0, 1)
        F.dropout(x, 0.5)  # draws
        return m.b(m.a(x))

    model, pipe, nodes = nodes_of(forward, X)
    names = [n.name for n in nodes]
    assert "zeros" not in names and "transpose" not in names and "dropout" in names
    assert_equivalent(model, pipe, torch.randn(3, 4))


def test_a_tensor_whose_rank_or_size_is_changed_in_place():
    def forward(m, x):
        h = m.a(x) * 1
        h.unsqueeze_(0)
        return m.b(h) * h.size(0)

    model, pipe, _ = nodes_of(forward, X)
    assert_equivalent(model, pipe, torch.randn(3, 4))


def test_other_names_of_what_did_nothing():
    """In eval() dropout gives back what it gets: two names of one tensor cross the cut, the second of one that is gone."""

    def forward(m, x):
        h = m.a(x).to(x.device)
        y = F.dropout(h, 0.1, m.training)
        return m.b(y) + h

    model, pipe, nodes = nodes_of(forward, X)
    assert "to" not in [n.name for n in nodes]
    names = {n.name for n in nodes}
    facts = pipe.traced.facts.values()
    assert all(f.alias in names | {None} and f.returns in names | {None} for f in facts)
    model.eval()
    assert_equivalent(model, pipe, torch.randn(3, 4))
