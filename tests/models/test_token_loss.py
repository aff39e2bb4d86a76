from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.models.token_loss import cross_entropy, logits_of, next_token_loss
from tests.rows import each

RNG = np.random.default_rng(0)
VOCAB, WIDTH = 11, 8
HIDDEN = RNG.normal(size=(2, 6, WIDTH)).astype(np.float32)
HEAD = RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32)
TARGETS: Any = RNG.integers(0, VOCAB, (2, 6)).astype(np.int32)


def test_the_cross_entropy_and_its_gradient_are_those_of_optax():
    logits = HIDDEN @ HEAD.T

    def both(loss: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda logits: (loss(logits, TARGETS) ** 2).sum()))(logits)

    ours, theirs = both(cross_entropy), both(optax.softmax_cross_entropy_with_integer_labels)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-5, atol=1e-6)


def test_a_target_outside_the_vocabulary_has_a_loss_of_nan():
    found = jax.jit(cross_entropy)(np.zeros((4, VOCAB), np.float32), np.array([0, VOCAB, -1, VOCAB - 1]))
    assert np.isnan(found).tolist() == [False, True, True, False]


@pytest.mark.parametrize("chunk", [4, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 12))])
def test_chunks_have_the_losses_of_all_positions_at_once(chunk: int):
    def both(chunk: int | None) -> Any:
        loss = lambda hidden, head: next_token_loss(hidden, head, TARGETS, chunk=chunk).mean()
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(HIDDEN, HEAD)

    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6), both(chunk), both(None)
    )


@each("chunk", [0, 5])
def test_turns_must_be_equally_long(chunk: int):
    with pytest.raises(ValueError, match=f"must divide the 12 .*got {chunk}"):
        next_token_loss(jnp.asarray(HIDDEN), jnp.asarray(HEAD), jnp.asarray(TARGETS), chunk=chunk)


def test_bfloat16_is_multiplied_as_such_forwards_and_backwards():
    halved = [jnp.asarray(array, jnp.bfloat16) for array in (HIDDEN, HEAD)]
    loss = lambda hidden, head: cross_entropy(logits_of(hidden, head), TARGETS).mean()
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    products = _dots(jax.make_jaxpr(step)(*halved).eqns)
    assert len(products) == 3
    assert {var.aval.dtype for eqn in products for var in eqn.invars} == {jnp.dtype(jnp.bfloat16)}
    value, slopes = step(*halved)
    exact, exact_slopes = step(*(array.astype(jnp.float32) for array in halved))
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, exact, rtol=1e-5)
    for slope, other in zip(slopes, exact_slopes, strict=True):
        assert slope.dtype == jnp.bfloat16
        np.testing.assert_allclose(slope.astype(np.float32), other, rtol=0.03, atol=0.003)


def _dots(eqns: Any) -> list[Any]:
    found = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    for eqn in eqns:
        inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
        found += [dot for part in inner if hasattr(part, "eqns") for dot in _dots(part.eqns)]
    return found
