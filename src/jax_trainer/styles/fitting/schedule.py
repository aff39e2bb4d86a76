"""`lr_schedule`: a learning rate that warms up and falls, for a run of so many epochs."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jax_trainer.optimizer import curves
from jax_trainer.suggestions import checks_keywords

START, END = 1 / 10, 1 / 100  # of the rate, where a schedule begins and ends


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
    """From a tenth of the rate in a straight line up to it, then along a cosine down to a hundredth of it.

    The hundredth is reached exactly when all epochs are over, and stays. Use it wherever optax takes a schedule:
    `optax.adam(lr_fn)`, or `optax.inject_hyperparams(optax.adam)(lr_fn)`, which lets `fit` show the rate.

    Args:
        base_lr: the rate after warming up; `lr` is another name for it.
        steps_per_epoch: updates per epoch, such as `len(train_ds)`.
        epochs: how long the run is.
        warmup_epochs: how much of it is for warming up, 5 if left out; `warmup` is another name for it.

    >>> lr_fn = lr_schedule(1e-3, steps_per_epoch=10, epochs=20)
    >>> [round(float(lr_fn(step)), 6) for step in (0, 50, 200, 300)]
    [0.0001, 0.001, 1e-05, 1e-05]
    """
    peak = _one_of("base_lr", base_lr, "lr", lr)
    warming = _one_of("warmup_epochs", warmup_epochs, "warmup", warmup, default=5)
    if not peak > 0:
        raise ValueError(f"`base_lr` must be above 0, got {peak}.")
    for name, value in (("steps_per_epoch", steps_per_epoch), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}. `steps_per_epoch` is `len(train_ds)`.")
    if not 0 <= warming < epochs:
        raise ValueError(
            f"`warmup_epochs` must be at least 0 and below `epochs`, got {warming:g} of {epochs} epochs. Pass fewer, "
            "or 0 to begin with the whole rate."
        )
    return _schedule(peak, round(warming * steps_per_epoch), epochs * steps_per_epoch)


def _schedule(peak: float, warmup: int, total: int) -> optax.Schedule:
    up = curves.linear(peak * START, peak, max(warmup, 1))
    down = curves.cosine(peak, peak * END, total - warmup)

    def schedule(count: ArrayLike) -> jax.Array:
        count = jnp.asarray(count)
        return jnp.where(count < warmup, up(count), down(count - warmup))

    return schedule


def _one_of(name: str, value: float | None, other: str, same: float | None, default: float | None = None) -> float:
    if value is not None and same is not None:
        raise TypeError(f"`{name}` and `{other}` are two names of one thing. Pass one of them.")
    found = next((given for given in (value, same, default) if given is not None), None)
    if found is None:
        raise TypeError(f"Pass `{name}`, the learning rate after warming up.")
    return found
