"""`lr_schedule`: linear warmup and cosine decay of the learning rate."""

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.optimizer.scheduler import cosine, linear

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
