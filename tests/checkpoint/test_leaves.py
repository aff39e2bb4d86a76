from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.checkpoint.arrays import Spec, named_leaves
from jax_trainer.checkpoint.record import CheckpointError
from jax_trainer.checkpoint.restore import check_fits
from jax_trainer.testing import numbered_data, tiny_program
from tests.rows import noted_row


def test_leaves_have_dotted_names_in_the_order_of_the_tree(flavour):
    state = jax.eval_shape(tiny_program(flavour).init, jax.random.key(0), numbered_data(8))
    named = named_leaves(state)
    assert {"step", "rng", "params.hidden.kernel", "opt_state.0.mu.out.bias"} <= named.keys()
    assert list(named.values()) == jax.tree.leaves(state)


def test_two_leaves_with_the_same_name_are_an_error():
    with pytest.raises(CheckpointError, match=r"'a\.b'"):
        named_leaves({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})


def test_a_leaf_that_is_no_numeric_array_is_an_error():
    for leaf, problem in [
        (3, "a Python int. Only arrays can be saved"),
        ("text", "a Python str"),
        (np.array(["x"]), "dtype <U1"),
        (np.array([object()]), "dtype object"),
        (np.array([1.0], ">f4"), "native byte order"),
    ]:
        with noted_row(leaf, problem), pytest.raises(CheckpointError, match=f"^extra.odd .*{problem}"):
            named_leaves({"extra": {"odd": leaf}})


def message(found: dict[str, Spec], expected: dict[str, Spec]) -> str:
    with pytest.raises(CheckpointError) as error:
        check_fits(found, expected, Path("runs/a/step_00000005"))
    return str(error.value)


A, B = Spec("float32", (8, 16)), Spec("bfloat16", (3,))


def test_equal_leaves_fit():
    check_fits({"a": A, "b": B}, {"b": B, "a": A}, Path("x"))


def test_all_differences_are_listed_at_once():
    found = {"params.a": A, "params.b": B, "params.output.kernel": A, "step": Spec("int32", ())}
    expected = {"params.a": Spec("float32", (8, 32)), "params.b": Spec("float32", (3,)), "params.out.kernel": A}
    text = message(found, expected)
    assert "runs/a/step_00000005 does not match" in text
    assert "params.a: expected float32[8,32], found float32[8,16]" in text
    assert "params.b: expected float32[3], found bfloat16[3]" in text
    renamed = "(it has params.output.kernel: renamed?)"
    assert f"params.out.kernel: expected float32[8,16], missing in the checkpoint {renamed}" in text
    assert "step: not expected, found int32[]" in text


def test_a_name_is_suggested_only_for_an_array_of_the_same_shape_and_dtype():
    assert "renamed" not in message({"params.output.kernel": B}, {"params.out.kernel": A})


def test_a_long_list_is_truncated_and_odd_names_are_escaped():
    text = message({f"\x1b[31m{number}\n": A for number in range(500)}, {"a": A})
    assert len(text.splitlines()) < 40 and "and 471 more" in text
    assert "\x1b" not in text
