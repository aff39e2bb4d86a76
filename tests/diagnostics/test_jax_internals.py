"""What is read of the inside of JAX: a version that keeps it in another way fails here first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.diagnostics.jax_internals import (
    body_of,
    constants_of,
    evaluated,
    function_of,
    inner_functions,
    is_literal,
    key_impl,
    needed_inputs,
    scan_counts,
    scopes_of,
    takes_constants,
    traceback_of,
)
from tests.rows import noted_row

X = np.ones(3, np.float32)
TABLE = np.arange(3, dtype=np.float32)


def equation_of(function: Any, *args: Any) -> Any:
    return body_of(jax.make_jaxpr(function)(*args)).eqns[-1]


def test_the_operands_of_a_scan_are_constants_then_carried_values_then_slices():
    scan = lambda a, b, c, xs: lax.scan(lambda carry, x: ((carry[0] + a * x, carry[1] + b), x), (c, c), xs)
    equation = equation_of(scan, 1.0, 2.0, 3.0, X)
    assert (equation.primitive.name, scan_counts(equation), len(equation.invars)) == ("scan", (2, 2), 5)


def test_the_functions_that_an_equation_calls_are_found():
    for function, names in [
        (jax.jit(jnp.sin), ["sin"]),
        (jax.checkpoint(jnp.sin), ["sin"]),
        (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), ["cos", "sin"]),
        (lambda x: lax.while_loop(lambda x: x[0] > 0, jnp.sin, x), ["sin", "gt"]),
        (lambda x: lax.scan(lambda _, x: (_, jnp.sin(x)), 0.0, x), ["sin"]),
        (jax.custom_gradient(lambda x: (jnp.sin(x), lambda g: g)), ["sin"]),
        (jnp.sin, []),
    ]:
        with noted_row(function, names):
            found = [body_of(one).eqns[-1].primitive.name for one in inner_functions(equation_of(function, X))]
            assert found == names


def test_an_equation_has_its_scopes_its_transformations_and_its_place():
    def scoped(x: Any) -> Any:
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x * x * x

    equation = equation_of(jax.grad(scoped), 1.0)
    assert scopes_of(equation) == (("outer", "inner"), {"jvp", "transpose"})
    assert scoped.__code__.co_filename in str(traceback_of(equation))


def test_a_part_of_a_function_is_evaluated_with_its_constants():
    closed = jax.make_jaxpr(lambda x: jnp.asarray(TABLE) * 2 * x)(X)
    jaxpr = body_of(closed)
    assert [np.asarray(value).tolist() for value in constants_of(closed).values()] == [TABLE.tolist()]
    [found] = function_of(jaxpr, jaxpr.eqns, jaxpr.invars, jaxpr.outvars, constants_of(closed))(3 * X)
    np.testing.assert_array_equal(found, 6 * TABLE)


def test_an_equation_is_evaluated_for_other_operands_and_has_its_literals():
    equation = equation_of(lambda x: x * 2.0, 1.0)
    assert [is_literal(one) for one in equation.invars] == [False, True]
    assert evaluated(equation, [3.0, 2.0])[0] == 6
    assert needed_inputs(body_of(jax.make_jaxpr(lambda x, y: x + 1)(1.0, 2.0)), [True]) == [True, False]


def test_constants_that_are_passed_as_arguments_and_implementations_of_keys_are_known():
    assert not takes_constants(jax.jit(jnp.sin).lower(X))
    shape = jax.eval_shape(jax.random.key, 0)
    assert key_impl(shape.dtype) == str(jax.random.key_impl(jax.random.key(0)))
