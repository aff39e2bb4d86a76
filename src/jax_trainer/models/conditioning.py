"""Embeddings of the conditions of generative networks: the diffusion time, and a label."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

NO_LABEL = -1  # the label of an example without one, or whose label was dropped

WAVES = 256
TIME_SCALE = 1000.0  # times are from 0 to 1, the sinusoids are for steps from 0 to 1000
LONGEST_WAVE = 10_000.0
INIT_STD = 0.02


class TimeEmbedding(nnx.Module):
    """Sinusoids of the time through two linear layers: [batch] → [batch, width]."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(INIT_STD)
        self.hidden = nnx.Linear(WAVES, width, kernel_init=small, rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=small, rngs=rngs)

    def __call__(self, t: Float[Array, "batch"]) -> Float[Array, "batch width"]:
        """[batch] → [batch, width]."""
        # in float32: bfloat16 would round the angle by more than 2π
        waves = sinusoids(TIME_SCALE * t.astype(jnp.promote_types(t.dtype, jnp.float32)), WAVES)
        return self.out(jax.nn.silu(self.hidden(waves.astype(self.hidden.kernel.dtype))))


class LabelEmbedding(nnx.Module):
    """A vector for each label, and one for `NO_LABEL`, which is the last: [batch] → [batch, width]."""

    def __init__(self, num_classes: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.num_classes = num_classes
        self.table = nnx.Param(nnx.initializers.normal(INIT_STD)(rngs.params(), (num_classes + 1, width)))

    def __call__(self, labels: Int[Array, "batch"] | None, batch: int) -> Float[Array, "batch width"]:
        """[batch] → [batch, width]; None is `NO_LABEL` for all `batch` examples. An invalid label gives NaN."""
        labels = jnp.full(batch, NO_LABEL) if labels is None else labels.astype(jnp.int32)
        row = jnp.where(labels == NO_LABEL, self.num_classes, labels)
        is_label = (labels >= NO_LABEL) & (labels < self.num_classes)
        outside = self.num_classes + 1
        return jnp.take(self.table[...], jnp.where(is_label, row, outside), axis=0)


class Conditioning(nnx.Module):
    """The sum of time and label embeddings: [batch], [batch] or None → [batch, width]."""

    def __init__(self, num_classes: int, width: int, *, rngs: nnx.Rngs) -> None:
        self.time = TimeEmbedding(width, rngs=rngs)
        self.labels = LabelEmbedding(num_classes, width, rngs=rngs) if num_classes else None

    def __call__(
        self, t: Float[Array, "batch"], condition: Int[Array, "batch"] | None = None
    ) -> Float[Array, "batch width"]:
        """[batch], [batch] or None → [batch, width]."""
        if t.ndim != 1:
            raise ValueError(f"The time must have the shape [batch], got {t.shape}.")
        _check_condition(condition, t.shape[0], has_classes=self.labels is not None)
        return self.time(t) if self.labels is None else self.time(t) + self.labels(condition, t.shape[0])


def sinusoids(positions: Float[Array, "*shape"], count: int) -> Float[Array, "*shape count"]:
    """Sinusoidal embeddings: cosines and sines of `count` / 2 frequencies, from 1 downwards."""
    steps = jnp.arange(count // 2, dtype=positions.dtype) / (count // 2)
    angles = positions[..., None] * jnp.exp(-math.log(LONGEST_WAVE) * steps)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _check_condition(condition: jax.Array | None, batch: int, has_classes: bool) -> None:
    if condition is None:
        return
    if not has_classes:
        raise ValueError(
            f"This network has `num_classes: 0`, but got a condition of shape {condition.shape}. "
            "Set `num_classes`, or call it without a condition."
        )
    if condition.shape != (batch,) or not jnp.issubdtype(condition.dtype, jnp.integer):
        raise ValueError(
            f"The condition must be an integer label for each of {batch} examples, "
            f"got {condition.dtype} of shape {condition.shape}."
        )
