"""What a value is, to be compared with what it is later."""

from fxsplit.modules.seen import Seen, seen


def test_sets_have_no_order_and_what_is_inside_counts():
    one, other = {0}, {8}
    one.add(8), other.add(0)
    assert list(one) != list(other)  # or this shows nothing
    assert seen(one, {}).same(seen(other, {})) and not seen(one, {}).same(seen({0, 16}, {}))
    assert not seen([1, [2]], {}).same(seen([1, [3]], {})) and not seen((1,), {}).same(seen([1], {}))
    assert not seen({"a": 1}, {}).same(seen({"a": 1, "b": 2}, {}))
    for value in (one, [1, [2]], {"a": (None, "b")}):
        assert Seen.from_json(seen(value, {}).to_json()).same(seen(value, {}))
