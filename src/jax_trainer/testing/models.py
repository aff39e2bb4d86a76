"""Tiny real models with BatchNorm and Dropout, linen and nnx, and a loss for each."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import LinenView, function_program, linen_program, nnx_program
from jax_trainer.core import Program

FEATURES, HIDDEN, CLASSES = 8, 16, 4


class TinyLinen(nn.Module):
    """Dense, BatchNorm, relu, Dropout, Dense."""

    dropout: float = 0.1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[batch, features] → [batch, classes]."""
        x = nn.Dense(HIDDEN, name="hidden")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES, name="out")(x)


class TinyNNX(nnx.Module):
    """`TinyLinen` as an nnx module."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.1) -> None:
        self.hidden = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, features] → [batch, classes]."""
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def cross_entropy(logits: jax.Array, labels: jax.Array | np.ndarray) -> jax.Array:
    """Of each example: [batch, classes], [batch] → [batch]. Compiles in half the time of Optax's, which gathers."""
    of_label = jnp.where(labels[..., None] == jnp.arange(logits.shape[-1]), logits, 0.0).sum(-1)
    return jax.nn.logsumexp(logits, -1) - of_label


def _evaluate(logits: jax.Array, batch: Mapping[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    loss = cross_entropy(logits, batch["y"]).mean()
    return loss, {"acc": (logits.argmax(-1) == batch["y"]).mean(dtype=jnp.float32)}


def linen_loss(params: Any, state: LinenView, batch: Any, rng: jax.Array, train: bool) -> Any:
    """Cross entropy and accuracy of a linen classifier."""
    logits, mutable = state.apply(params, batch["x"], train=train)
    loss, metrics = _evaluate(logits, batch)
    return loss, (mutable, metrics)


def nnx_loss(model: Any, batch: Any, train: bool) -> Any:
    """Cross entropy and accuracy of an nnx classifier."""
    return _evaluate(model(batch["x"]), batch)


def tiny_program(
    flavour: str, tx: optax.GradientTransformation | None = None, *, dropout: float = 0.1, **options: Any
) -> Program:
    """A program of the tiny model; `flavour` is "linen" or "nnx", options are those of `make_program`."""
    tx = optax.adamw(1e-2) if tx is None else tx
    if flavour == "linen":
        return linen_program(TinyLinen(dropout), linen_loss, tx, to_input=lambda batch: batch["x"], **options)
    if flavour == "nnx":
        model = lambda rngs: TinyNNX(rngs, dropout)
        return nnx_program(model, nnx_loss, tx, to_input=lambda batch: batch["x"], **options)
    raise ValueError(f"`flavour` must be 'linen' or 'nnx', got {flavour!r}.")


def linear_program(tx: optax.GradientTransformation | None = None, **options: Any) -> Program:
    """A program of a linear classifier that starts at zero; options are those of `make_program`.

    For tests in which the model does not matter: it draws no random numbers, and compiles in a sixth of the time of
    `tiny_program`.
    """

    def init(key: jax.Array, batch: Any) -> dict[str, jax.Array]:
        return {"bias": jnp.zeros(CLASSES), "kernel": jnp.zeros((FEATURES, CLASSES))}

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> tuple[jax.Array, dict[str, Any]]:
        return _evaluate(batch["x"] @ params["kernel"] + params["bias"], batch)

    return function_program(init, loss, optax.sgd(0.1) if tx is None else tx, **options)
