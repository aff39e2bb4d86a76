"""`lr_schedule`, linear warmup and cosine decay; `lr_find`, the learning rate finder for the arguments of `fit`."""

from collections.abc import Callable
from contextlib import closing
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jax_trainer.datasets import DataSource
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.engine import sweep_batches
from jax_trainer.engine.batches import check_repeats
from jax_trainer.optimizer import LRFindResult, find_learning_rate
from jax_trainer.optimizer.scheduler import cosine, linear
from jax_trainer.runs import assemble
from jax_trainer.runs.sections import layout_for
from jax_trainer.runs.vocabulary import TrainOptions, options_of, takes_options
from jax_trainer.styles.fit_data import SplitBatch, as_fit_data, split_of
from jax_trainer.styles.fit_program import data_transforms, fit_target


@takes_options
def lr_find(
    model: Any,
    train_ds: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    num_epochs: int = 10,
    batch_size: int = 32,
    split_batch: SplitBatch | None = None,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training: int = 100,
    early_stop_threshold: float | None = 4.0,
    **options: Unpack[TrainOptions],
) -> LRFindResult:
    """Sweeps the learning rate over a few steps on a copy of `model`, and suggests one for `fit`.

    The model and the data stay as they are, and nothing is written.

    Args:
        model, train_ds, loss_fn, optimizer, num_epochs, batch_size, split_batch, options: as for `fit`.
        min_lr, max_lr: the smallest and the largest rate; factors of the learning rate if the optimizer does not record
            it, as `optax.adam(1e-3)`.
        num_training: the number of steps.
        early_stop_threshold: end when the smoothed loss is this many times the best one; None: never.
    """
    batch_size = checked_int("batch_size", batch_size, 1)
    opts = options_of("lr_find", options, train_epochs=num_epochs)
    if not is_arrays(train_ds):
        check_repeats(train_ds)  # before any of it is read
    train = as_fit_data(train_ds, "train", split_of(split_batch), batch_size=batch_size, shuffle=True, seed=opts.seed)
    target = fit_target(
        model,
        loss_fn=loss_fn,
        eval_step=None,
        optimizer=optimizer,
        split_batch=split_batch,
        total_steps=opts.plan().ends_at(DataSource(train.data, "train").lengths)[1],
        seed=opts.seed,
        example=train.example,
        options=opts,
    )
    transforms, layout = data_transforms(target.program, train_ds), layout_for(opts)
    # the last batch of an epoch may be smaller, which needs no warning
    program = assemble(target.program, opts, transforms=transforms, layout=layout, on_recompile="ignore")
    program.shapes(target.key, train.example)  # traced: mistakes show before anything is computed
    state = program.init(target.key, train.example)
    rates: dict[str, Any] = {"min_lr": min_lr, "max_lr": max_lr, "num_training": num_training}
    with closing(sweep_batches(program, train.data)) as batches:
        return find_learning_rate(program, state, batches, early_stop_threshold=early_stop_threshold, **rates)


START, END = 1 / 10, 1 / 100  # initial and final learning rate, relative to the peak


@checks_keywords
def lr_schedule(
    base_lr: float | None = None,
    steps_per_epoch: int = 0,
    epochs: int = 100,
    warmup_epochs: float | None = None,
    *,
    lr: float | None = None,
    warmup: float | None = None,
) -> optax.Schedule:
    """Linear warmup from a tenth of `base_lr`, then cosine decay to a hundredth of it.

    The final value is reached after the last epoch, and stays constant. Use it wherever optax takes a schedule:
    `optax.adam(lr_fn)`, or `optax.inject_hyperparams(optax.adam)(lr_fn)`, which lets `fit` log the learning rate.

    Args:
        base_lr: peak learning rate, after warmup; alias: `lr`.
        steps_per_epoch: updates per epoch, such as `len(train_ds)`.
        epochs: number of epochs of the run.
        warmup_epochs: number of warmup epochs, default 5; alias: `warmup`.

    >>> lr_fn = lr_schedule(1e-3, steps_per_epoch=10, epochs=20)
    >>> [round(float(lr_fn(step)), 6) for step in (0, 50, 200, 300)]
    [0.0001, 0.001, 1e-05, 1e-05]
    """
    peak = _one_of("base_lr", base_lr, "lr", lr)
    num_warmup = _one_of("warmup_epochs", warmup_epochs, "warmup", warmup, default=5)
    if not peak > 0:
        raise ValueError(f"`base_lr` must be above 0, got {peak}.")
    for name, value in (("steps_per_epoch", steps_per_epoch), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}. `steps_per_epoch` is `len(train_ds)`.")
    if not 0 <= num_warmup < epochs:
        raise ValueError(
            f"`warmup_epochs` must be at least 0 and below `epochs`, got {num_warmup:g} of {epochs} epochs. Pass "
            "fewer, or 0 for no warmup."
        )
    return _schedule(peak, round(num_warmup * steps_per_epoch), epochs * steps_per_epoch)


def _schedule(peak: float, warmup: int, total: int) -> optax.Schedule:
    up = linear(peak * START, peak, max(warmup, 1))
    down = cosine(peak, END, total - warmup)

    def schedule(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        return jnp.where(count < warmup, up(count), down(count - warmup))

    return schedule


def _one_of(name: str, value: float | None, other: str, alias: float | None, default: float | None = None) -> float:
    if value is not None and alias is not None:
        raise TypeError(f"`{other}` is an alias of `{name}`. Pass one of them.")
    found = next((one for one in (value, alias, default) if one is not None), None)
    if found is None:
        raise TypeError(f"Pass `{name}`, the learning rate after warmup.")
    return found
