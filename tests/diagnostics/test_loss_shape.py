"""Which losses have rows that do not depend on each other."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_trainer.diagnostics.returned import is_row_wise
from jax_trainer.testing import cross_entropy

LOGITS, LABELS, NUMBERS = jnp.zeros((6, 3)), jnp.zeros(6, jnp.int32), jnp.zeros(6)
WEIGHTS = jnp.arange(3.0)


def contrastive(x: Any, y: Any) -> Any:
    return -jnp.diag(jax.nn.log_softmax(x @ x.T))


def counted(x: Any, y: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, z: z * 2, x[:, 0])


APART = {
    "integer labels": optax.softmax_cross_entropy_with_integer_labels,
    "by comparison": cross_entropy,
    "class weights": lambda x, y: WEIGHTS[y] * cross_entropy(x, y),
    "with metrics": lambda x, y: (cross_entropy(x, y), {"hit": x.argmax(-1) == y}),
    "one column": lambda x, y: jnp.abs(x[:, 0] - y),
    "smoothed": lambda x, y: optax.softmax_cross_entropy(x, optax.smooth_labels(jax.nn.one_hot(y, 3), 0.1)),
    "two columns": lambda x, y: cross_entropy(jnp.stack([-x[:, 0], x[:, 0]], axis=-1), y),
    "by position": lambda x, y: x[:, 0] + jnp.arange(len(y)),
}
TOGETHER = {
    "mean": lambda x, y: cross_entropy(x, y).mean(),
    "centered": lambda x, y: x[:, 0] - x[:, 0].mean(),
    "scaled": lambda x, y: jax.nn.softmax(x, axis=0)[:, 0],
    "contrastive": contrastive,
    "neighbours": lambda x, y: x[:, 0] - jnp.roll(x[:, 0], 1),
    "sorted": lambda x, y: jnp.sort(x[:, 0]),
    "cumulated": lambda x, y: jnp.cumsum(x[:, 0]),
    "reversed": lambda x, y: x[::-1, 0],
    "other rows": lambda x, y: x[y, 0],
    "first row": lambda x, y: x[:, 0] - x[0, 0],
    "flattened": lambda x, y: x.reshape(-1)[:: x.shape[1]],
    "a loop": counted,
}


def test_rows_of_a_loss_are_apart():
    for name in APART:
        assert is_row_wise(APART[name], LOGITS, LABELS)


def test_rows_of_a_loss_depend_on_each_other_or_may_do():
    for name in TOGETHER:
        assert not is_row_wise(TOGETHER[name], LOGITS, LABELS)


def test_losses_of_numbers_are_apart_unless_every_one_is_compared_with_every_other():
    for loss in (optax.l2_loss, optax.huber_loss, optax.sigmoid_binary_cross_entropy):
        assert is_row_wise(loss, NUMBERS, NUMBERS)
        assert not is_row_wise(loss, NUMBERS[:, None], NUMBERS)
