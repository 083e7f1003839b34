"""What of a file is refused before anything of it is used."""

import pytest

from fxsplit.errors import SerializeError
from fxsplit.saving.fits import check_call, check_names
from fxsplit.saving.harmless import is_attribute, operation


@pytest.mark.parametrize(
    ("op", "target", "args", "said"),
    [
        ("call_method", "numpy", (), "none that computes with tensors"),
        ("call_method", "__reduce__", (), "none that computes with tensors"),
        ("call_function", getattr, (None, "__class__"), "reads an attribute"),
        ("call_function", getattr, (None, "_hidden"), "reads an attribute"),
        ("get_attr", "a.__dict__", (), "no path"),
        ("placeholder", "not a name", (), "no name of an input"),
        ("call_method", "add", None, "are no arguments"),
        ("call_module", 3, (), "no target"),
    ],
)
def test_calls_that_no_program_has(op, target, args, said):
    with pytest.raises(SerializeError, match=said):
        check_call(op, target, args, {})


def test_calls_that_a_program_has():
    check_call("call_method", "add", (1,), {"alpha": 2})
    check_call("call_function", getattr, (None, "shape"), {})
    check_call("placeholder", "x", (), {})
    assert is_attribute("shape") and not is_attribute("_x") and not is_attribute(3)
    assert operation("torch:ops.aten.add.Tensor") is not None and operation("torch:ops.mine.add") is None


@pytest.mark.parametrize("names", [{"a": "x", "b": "x"}, {"a": "forward"}, {"a": "class"}, {"a": "a.b"}])
def test_names_that_are_somebody_elses(names):
    check_names({"a": "x", "b": "y"})
    with pytest.raises(SerializeError):
        check_names(names)
