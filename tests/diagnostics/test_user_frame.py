"""The first note of an error is the line of the user's code that raised it."""

import inspect
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.diagnostics.user_frame import explaining, with_user_frame
from tests.rows import noted_row


def mismatched(x):
    return x @ jnp.ones((3, 7))


def raised(function, *args):
    with pytest.raises(TypeError) as caught:
        function(*args)
    return caught.value


def test_the_innermost_line_of_the_users_code_is_the_first_note():
    for call in [mismatched, jax.jit(mismatched)]:
        with noted_row(call):
            error = raised(call, np.ones((2, 2)))
            error.add_note("an earlier note")
            first, *others = with_user_frame(error).__notes__
            line = inspect.getsourcelines(mismatched)[1] + 1
            assert (
                first == f'In your code: File "{__file__}", line {line}, in mismatched\n    return x @ jnp.ones((3, 7))'
            )
            assert "an earlier note" in others


def test_notes_are_added_once():
    error = with_user_frame(raised(mismatched, np.ones((2, 2))))
    notes = list(error.__notes__)
    assert with_user_frame(error).__notes__ == notes


def test_an_error_outside_the_users_code_has_no_notes():
    assert not hasattr(with_user_frame(ValueError("made, not raised")), "__notes__")


def test_the_shapes_of_the_batch_are_named_once():
    batch = {"x": np.ones((2, 2), np.float32), "y": np.ones(2, np.int32)}
    error = raised(mismatched, batch["x"])
    for _ in range(2):
        with pytest.raises(TypeError), explaining(batch):
            raise error
    assert [note for note in error.__notes__ if "float32[2, 2]" in note and "int32[2]" in note] == error.__notes__[1:2]


def branches(x):
    return x if x.sum() > 0 else -x


FIXED = {
    "numpy": (lambda x: np.sum(np.asarray(x)), "jnp"),
    "if": (branches, "jnp.where"),
    "float": (lambda x: float(x.sum()), "float"),
    "a layer of another width": (mismatched, "width"),
    "float labels": (lambda x: optax.softmax_cross_entropy_with_integer_labels(x, x[:, 0]), "astype"),
    "one-hot labels": (
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, x.astype(int)),
        "argmax",
    ),
    "predictions [n, 1] against targets [n]": (lambda x: optax.l2_loss(x[:, :1], x[:, 0]), "squeeze(-1)"),
    "no return": (lambda x: None + x, "return"),
}


def test_a_frequent_error_of_a_traced_step_has_a_likely_fix():
    for name in FIXED:
        with noted_row(name):
            function, fix = FIXED[name]
            with pytest.raises((TypeError, ValueError)) as caught, explaining(np.ones((2, 2), np.float32)):
                jax.jit(function)(np.ones((2, 2), np.float32))
            assert any(note.startswith("Likely fix: ") and fix in note for note in caught.value.__notes__)


def per_example(params, batch, *, rng, train):
    return jnp.mean(batch * params), {"per_example": batch * params}


def swapped(params, batch, *, rng, train):
    return {"loss": 0.0}, jnp.mean(batch * params)


def counting(params, batch, *, rng, train):
    return jnp.argmax(batch)


def test_a_wrong_result_of_a_loss_names_where_the_loss_is_defined():
    for loss, phase in product([per_example, swapped, counting], ["train_step", "eval_step"]):
        with noted_row(loss, phase):
            program = function_program(lambda key, batch: jnp.zeros(()), loss, optax.sgd(0.1))
            batch = jnp.ones(8)
            with pytest.raises((TypeError, ValueError)) as caught, explaining(batch):
                jax.eval_shape(getattr(program, phase), program.init(jax.random.key(0), batch), batch)
            line = inspect.getsourcelines(loss)[1]
            assert caught.value.__notes__[0].startswith(
                f'In your code: File "{__file__}", line {line}, in {loss.__name__}'
            )


def test_an_error_inside_a_loss_names_its_own_line_not_the_definition():
    def failing(params, batch, *, rng, train):
        return mismatched(jnp.ones((2, 2)))

    program = function_program(lambda key, batch: jnp.zeros(()), failing, optax.sgd(0.1))
    with pytest.raises(TypeError) as caught, explaining():
        jax.eval_shape(program.eval_step, program.init(jax.random.key(0), jnp.ones(8)), jnp.ones(8))
    assert "in mismatched" in caught.value.__notes__[0]
