"""BatchNorm statistics of given weights, from a pass over the training data.

A training step returns running averages: m × before + (1 − m) × those of the batch. They are linear in what was before,
so two evaluations, from 0 and from 1, tell the statistics of the batch, whatever library and momentum the model has.
XLA computes what both have in common, the forward pass, once, and nothing of the gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import TrainStep
from jax_trainer.diagnostics.leaves import Batch, PyTree


class BatchStats(NamedTuple):
    """The mean of the statistics of so many batches."""

    means: list[jax.Array]
    batches: jax.Array

    @classmethod
    def of(cls, model_state: PyTree, chosen: Sequence[int]) -> "BatchStats":
        """Those of no batch yet: as they are in `model_state`, whose leaves `chosen` are statistics."""
        leaves = jax.tree.leaves(model_state)
        return cls([leaves[index] for index in chosen], jnp.zeros((), jnp.int32))

    def written_to(self, model_state: PyTree, chosen: Sequence[int]) -> PyTree:
        """`model_state` with these statistics."""
        return _replaced(model_state, chosen, self.means)

    def adding(self, step: TrainStep, state: TrainState, chosen: Sequence[int], batch: Batch) -> "BatchStats":
        """The mean over one more batch.

        Statistics that the step does not update, of layers that are not in training mode, stay as they are, and so do
        all if those of the batch are not finite.
        """

        def after(before: list[jax.Array]) -> list[jax.Array]:
            """The statistics after a step, from these; no other random numbers than in a step with this number."""
            moved = state.replace(
                step=state.step + self.batches, model_state=_replaced(state.model_state, chosen, before)
            )
            leaves = jax.tree.leaves(step(moved, batch)[0].model_state)
            return [leaves[index] for index in chosen]

        known = BatchStats.of(state.model_state, chosen).means
        updates = [(new != old).any() for new, old in zip(after(known), known, strict=True)]
        low, high = (
            after([jnp.where(is_new, jnp.full_like(old, at), old) for is_new, old in zip(updates, known, strict=True)])
            for at in (0, 1)
        )
        momenta = [jnp.mean(one - zero) for zero, one in zip(low, high, strict=True)]
        found = [zero / (1 - momentum) for zero, momentum in zip(low, momenta, strict=True)]
        fine = jnp.stack(
            [jnp.array(True), *(~new | jnp.isfinite(one).all() for new, one in zip(updates, found, strict=True))]
        ).all()
        count = self.batches + fine
        means = [
            jnp.where(fine & is_new, mean + (one - mean) / jnp.maximum(count, 1), mean).astype(mean.dtype)
            for mean, one, is_new in zip(self.means, found, updates, strict=True)
        ]
        return BatchStats(means, count)


def _replaced(tree: PyTree, chosen: Sequence[int], values: Sequence[jax.Array]) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    for index, value in zip(chosen, values, strict=True):
        leaves[index] = value
    return structure.unflatten(leaves)
