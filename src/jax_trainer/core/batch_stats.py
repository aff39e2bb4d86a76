"""BatchNorm statistics of given weights, from a pass over the training data.

A training step returns running averages: m × before + (1 − m) × those of the batch. They are linear in what was before,
so two evaluations, from 0 and from 1, tell the statistics of the batch, whatever library and momentum the model has.
XLA computes what both have in common, the forward pass, once, and nothing of the gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import TrainStep
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path

Means = dict[str, jax.Array]  # by path


class BatchStats(NamedTuple):
    """The mean of the statistics of so many batches."""

    means: Means
    batches: jax.Array

    @classmethod
    def of(cls, model_state: PyTree, is_batch_stat: Callable[[str], bool]) -> "BatchStats":
        """Those of no batch yet: as they are in `model_state`."""
        named = [(leaf_path(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model_state)]
        return cls({path: leaf for path, leaf in named if is_batch_stat(path)}, jnp.zeros((), jnp.int32))

    def adding(self, step: TrainStep, state: TrainState, batch: Batch) -> "BatchStats":
        """The mean over one more batch.

        Statistics that the step does not update, of layers that are not in training mode, stay as they are, and so do
        all if those of the batch are not finite.
        """

        def after(before: Means) -> Means:
            """The statistics after a step, from these; no other random numbers than in a step with this number."""
            moved = written(state, before).replace(step=state.step + self.batches)
            return BatchStats.of(step(moved, batch)[0].model_state, self.means.__contains__).means

        known = BatchStats.of(state.model_state, self.means.__contains__).means
        is_new = jax.tree.map(lambda new, old: (new != old).any(), after(known), known)
        start = lambda at: jax.tree.map(lambda new, old: jnp.where(new, jnp.full_like(old, at), old), is_new, known)
        # from the results after 0 and after 1, whose difference is the momentum
        of_batch = lambda zero, one: zero / (1 - jnp.mean(one - zero))
        found = jax.tree.map(of_batch, after(start(0)), after(start(1)))
        fine = jax.tree.map(lambda new, one: ~new | jnp.isfinite(one).all(), is_new, found)
        all_fine = jnp.stack([jnp.array(True), *jax.tree.leaves(fine)]).all()
        count = self.batches + all_fine

        def mean(old: jax.Array, one: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(all_fine & new, old + (one - old) / jnp.maximum(count, 1), old).astype(old.dtype)

        return BatchStats(jax.tree.map(mean, self.means, found, is_new), count)


def written(state: TrainState, means: Means) -> TrainState:
    """`state` with these statistics."""
    of_leaf = lambda path, leaf: means.get(leaf_path(path), leaf)
    return state.replace(model_state=jax.tree_util.tree_map_with_path(of_leaf, state.model_state))
