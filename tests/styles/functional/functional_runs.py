"""A small training in the style of `train_fn`, for the tests of its parts."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jax_trainer.styles.functional import train_fn
from jax_trainer.testing import nnx_loss, numbered_loader

KEY = jax.random.key(3)
STEPS = 10
TX = optax.sgd(0.1, momentum=0.9)
Trained = tuple[Any, Any]  # a model and its optimizer


def train_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
    return nnx.value_and_grad(lambda model: nnx_loss(model, batch, True), has_aux=True)(model)


def val_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
    return nnx_loss(model, batch, False)


class Net(nnx.Module):
    """The smallest classifier with BatchNorm and Dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dropout = nnx.BatchNorm(8, momentum=0.9, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(8, 4, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(self.norm(x)))


def fresh() -> Trained:
    """A model with BatchNorm and Dropout, and its optimizer."""
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def data() -> Any:
    """Six batches, in another order in every epoch."""
    return numbered_loader(200, drop_last=True)


def trained(
    subject: Trained | None = None,
    *,
    fns: Any = (train_step, val_step),
    n_steps: int = STEPS,
    source: Any = None,
    val: Any = (),
    **options: Any,
) -> Trained:
    """A model and its optimizer after a training that evaluates every four steps."""
    subject = subject or fresh()
    options = {"eval_every_n_steps": 4, "n_eval_batches": 2, "progress": False, **options}
    train = train_fn(fns=fns, n_steps=n_steps, **options)
    train(KEY, *subject, data() if source is None else source, data() if val == () else val)
    return subject


def arrays(subject: Trained) -> Any:
    """All that was trained, as plain arrays."""
    model, optimizer = subject
    weights = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))
    return jax.tree.map(np.asarray, (weights, nnx.as_pure(optimizer.opt_state), optimizer.step.get_value()))


@cache
def straight() -> Any:
    """What comes out of a training without anything else."""
    return arrays(trained())


class Calls:
    """A hook that records its metrics."""

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self.metrics: dict[int, dict[str, Any]] = {}

    def __call__(self, step: int, *, model: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        self.metrics[step] = metrics


@cache
def every_weight() -> list[Any]:
    """The parameters before the first step, and after each."""
    model, optimizer = fresh()
    found = [jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))]

    def look(step: int, *, model: Any, **kwargs: Any) -> None:
        found.append(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param))))

    trained((model, optimizer), hooks=[look])
    return found
