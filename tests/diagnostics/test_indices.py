"""Labels and token ids out of range are detected from the traced step, before it runs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jax_trainer.diagnostics.traced import Use, check_range, index_uses, out_of_range
from tests.rows import noted_row

X, Y, WEIGHTS = np.ones((8, 4), np.float32), np.arange(8, dtype=np.int32) % 3, jnp.ones((4, 3))
IDS = np.array([[1, 2], [3, 0]], np.int32)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def scanned(w, x, y):
    parts = (x.reshape(2, 4, 4), y.reshape(2, 4))
    return jax.lax.scan(lambda total, part: (total + cross_entropy(part[0] @ w, part[1]).mean(), None), 0.0, parts)[0]


INDEXING = {
    "optax's cross entropy": lambda w, x, y: cross_entropy(x @ w, y).mean(),
    "take_along_axis": lambda w, x, y: jnp.take_along_axis(x @ w, y[:, None], -1).mean(),
    "two index arrays": lambda w, x, y: (x @ w)[jnp.arange(8), y].mean(),
    "vmap": lambda w, x, y: jax.vmap(lambda row, label: (row @ w)[label])(x, y).mean(),
    "jax.checkpoint": lambda w, x, y: jax.checkpoint(lambda w: cross_entropy(x @ w, y).mean())(w),
    "scan": scanned,
    "cond": lambda w, x, y: jax.lax.cond(w.sum() > 0, lambda: cross_entropy(x @ w, y).mean(), lambda: 0.0),
}
INNOCENT = {
    "a regression": lambda w, x, y: ((x @ w) - y[:, None]).mean(),
    "labels masked by a comparison": lambda w, x, y: jnp.where(y != -1, cross_entropy(x @ w, y), 0).mean(),
    "labels replaced where unknown": lambda w, x, y: cross_entropy(x @ w, jnp.where(y < 0, 0, y)).mean(),
    "labels clipped": lambda w, x, y: cross_entropy(x @ w, jnp.clip(y, 0, 2)).mean(),
    "a gather that clips": lambda w, x, y: jnp.take(w, y, axis=1, mode="clip").mean(),
    "one-hot labels": lambda w, x, y: optax.softmax_cross_entropy(x @ w, jax.nn.one_hot(y, 3)).mean(),
}


def uses_of(function, *batch):
    step = jax.jit(jax.value_and_grad(lambda w, batch: function(w, *batch)))
    return index_uses(step.trace(WEIGHTS, batch).jaxpr, 1)


def test_a_leaf_used_as_indices_is_found_with_the_size_of_the_axis():
    for name in INDEXING:
        assert uses_of(INDEXING[name], X, Y) == {Use(leaf=1, size=3)}


def test_labels_that_are_masked_or_no_indices_are_accepted():
    for name in INNOCENT:
        assert not out_of_range(uses_of(INNOCENT[name], X, Y), (X, Y - 1))


def test_token_ids_past_the_embedding_are_found():
    embed = nn.Embed(4, 3)
    uses = uses_of(lambda w, ids: jnp.mean(embed.apply({"params": {"embedding": w}}, ids)), IDS)  # type: ignore[arg-type]
    assert not out_of_range(uses, (IDS,))
    assert "holds 7" in out_of_range(uses, (IDS + 4,))


def test_the_message_names_the_values_the_range_and_the_fix():
    for shift, fix in [(1, "subtract 1"), (-1, "!= -1"), (5, "subtract 5")]:
        with noted_row(shift, fix):
            message = out_of_range(frozenset({Use(1, 3)}), (X, Y + shift))
            assert f"batch[1] holds {2 + shift if shift > 0 else shift}" in message
            assert f"{shift} to {2 + shift}" in message
            assert "0 to 2" in message
            assert fix in message


def test_labels_out_of_range_name_the_line_of_the_users_code_that_uses_them():
    for name in INDEXING:
        with noted_row(name):
            with pytest.raises(ValueError, match=r"batch\[1\].*3") as caught:
                check_range(uses_of(INDEXING[name], X, Y), (X, Y + 1))
            assert caught.value.__notes__[0].startswith(f'In your code: File "{__file__}"')


def test_a_batch_with_a_mask_may_have_any_labels():
    batch = {"mask": Y > 0, "x": X, "y": Y - 1}
    assert not out_of_range(frozenset({Use(2, 3)}), batch)


def test_shapes_are_not_checked():
    assert not out_of_range(frozenset({Use(0, 3)}), jax.ShapeDtypeStruct((8,), np.int32))


def test_what_a_mask_leaves_out_is_not_checked_and_all_else_is():
    uses = frozenset({Use(1, 3)})
    batch = {"mask": np.array([1, 1, 0]), "x": np.array([0, 2, 9])}
    assert out_of_range(uses, batch) == ""
    assert "holds 9" in out_of_range(uses, {**batch, "mask": np.array([True, True, True])})
    pairs = {"mask": np.array([[1, 0], [1, 1]]), "x": np.array([[0, 7], [1, 5]])}
    assert "holds 5 (its values are 0 to 5)" in out_of_range(uses, pairs)
    assert out_of_range(uses, {**batch, "mask": np.ones(7)}) == ""  # of something else
