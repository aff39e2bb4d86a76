"""Where in the user's code an error came from is the first thing said about it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.core import with_own_line


def mismatched(x):
    return x @ jnp.ones((3, 7))


def raised(function, *args):
    with pytest.raises(TypeError) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("call", [mismatched, jax.jit(mismatched)], ids=["plain", "compiled"])
def test_the_innermost_line_of_the_users_code_is_the_first_note(call):
    error = raised(call, np.ones((2, 2)))
    error.add_note("said before")
    first, *others = with_own_line(error).__notes__
    line = inspect.getsourcelines(mismatched)[1] + 1
    assert first == f'In your code: File "{__file__}", line {line}, in mismatched\n    return x @ jnp.ones((3, 7))'
    assert "said before" in others


def test_it_is_said_once():
    error = with_own_line(raised(mismatched, np.ones((2, 2))))
    said = list(error.__notes__)
    assert with_own_line(error).__notes__ == said


def test_an_error_that_never_was_in_the_users_code_stays_as_it_is():
    assert not hasattr(with_own_line(ValueError("made, not raised")), "__notes__")
