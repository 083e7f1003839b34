"""What is alive, added up from what each node leaves behind."""

from torch import fx

from fxsplit.cost.saved import Live, Saved, live_bytes


def test_what_is_kept_and_computed_again():
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [x]
    for name in "abc":
        nodes.append(graph.create_node("call_method", name, (nodes[-1],), name=name))
    graph.output((nodes[-1],))
    _, *nodes = nodes
    saved = Saved(
        by_node={"a": {1: 100}, "b": {2: 40}, "c": {3: 10}},
        values={"x": {10: 4}, "a": {11: 8}, "b": {12: 8}, "c": {13: 8}},
        flops={"a": 5, "b": 6, "c": 7},
    )
    assert live_bytes(saved, [nodes], [[]], 4) == Live(162, 162)  # with what the stage reads and gives
    assert live_bytes(saved, [nodes], [[(0, 2)]], 4) == Live(22, 22 + 35)  # one micro-batch at a time
    assert live_bytes(saved, [nodes], [[(0, 2)]], 3) == Live(22, 22 + 47)
    assert live_bytes(saved, [nodes[:1], nodes[1:]], [[], [(0, 1)]], 1) == Live(
        4 + 100 + 8 + 10 + 8, 130 + 40
    )
    assert saved.again("b") == 14
    assert Live(40, 60).except_last(100, 4) == Live(55, 60)
