"""`lr_find`: the learning rate finder for the arguments of `fit`."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

from jax_trainer.core import ProgramOptions
from jax_trainer.datasets import DataSource
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.engine import Plan, sweep_batches
from jax_trainer.engine.batches import check_repeats
from jax_trainer.optimizer import LRFindResult, find_learning_rate
from jax_trainer.runs import assemble
from jax_trainer.sharding import MeshLike, resolve_layout
from jax_trainer.styles.fit_data import SplitBatch, as_fit_data, split_of
from jax_trainer.styles.fit_program import data_transforms, fit_target


@checks_keywords
def lr_find(
    model: Any,
    train_ds: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    num_epochs: int = 10,
    batch_size: int = 32,
    seed: int = 0,
    split_batch: SplitBatch | None = None,
    mesh: MeshLike | None = None,
    options: ProgramOptions | None = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    early_stop_threshold: float | None = 4.0,
) -> LRFindResult:
    """Sweeps the learning rate over a few steps on a copy of `model`, and suggests one for `fit`.

    The model and the data stay as they are, and nothing is written.

    Args:
        model, train_ds, loss_fn, optimizer, num_epochs, batch_size, seed, split_batch, mesh, options: as for `fit`.
        min_lr, max_lr: the smallest and the largest rate; factors of the learning rate if the optimizer does not record
            it, as `optax.adam(1e-3)`.
        num_training: the number of steps.
        early_stop_threshold: end when the smoothed loss is this many times the best one; None: never.
    """
    batch_size, seed = checked_int("batch_size", batch_size, 1), checked_int("seed", seed, 0)
    if not is_arrays(train_ds):
        check_repeats(train_ds)  # before any of it is read
    options = ProgramOptions.of(options, detect_nans=False, mesh=mesh, policies=("raise", "stop", "skip", "rollback"))
    train = as_fit_data(train_ds, "train", split_of(split_batch), batch_size=batch_size, shuffle=True, seed=seed)
    target = fit_target(
        model,
        loss_fn=loss_fn,
        eval_step=None,
        optimizer=optimizer,
        split_batch=split_batch,
        total_steps=Plan(max_epochs=num_epochs).ends_at(DataSource(train.data, "train").lengths)[1],
        seed=seed,
        example=train.example,
        options=options,
    )
    transforms, layout = data_transforms(target.program, train_ds), resolve_layout(options.mesh)
    # the last batch of an epoch may be smaller, which needs no warning
    program = assemble(target.program, (), options, transforms=transforms, layout=layout, on_recompile="ignore")
    program.shapes(target.key, train.example)  # traced: mistakes show before anything is computed
    state = program.init(target.key, train.example)
    rates: dict[str, Any] = {"min_lr": min_lr, "max_lr": max_lr, "num_training": num_training}
    with closing(sweep_batches(program, train.data)) as batches:
        return find_learning_rate(program, state, batches, early_stop_threshold=early_stop_threshold, **rates)
