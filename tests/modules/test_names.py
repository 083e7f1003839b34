"""Names of modules and tensors in generated code."""

from fxsplit.modules.names import is_free, local_names


def test_a_name_reads_like_the_path_and_is_nobody_elses():
    found = local_names(
        ["0", "0.a", "h.0.a", "a.b", "a_b", "a-b", "class", "", "checkpoint_0", "forward", "h_0_a"]
    )
    assert found == {
        "0": "layer_0",
        "0.a": "layer_0_a",
        "h.0.a": "h_0_a",
        "a.b": "a_b",
        "a_b": "a_b__1",
        "a-b": "a_b__2",
        "class": "class_",
        "": "value",
        "checkpoint_0": "the_checkpoint_0",
        "forward": "forward__1",
        "h_0_a": "h_0_a__1",
    }
    assert all(map(is_free, found.values()))
    assert not any(map(is_free, ("class", "forward", "checkpoint_0", "a.b", "0")))
