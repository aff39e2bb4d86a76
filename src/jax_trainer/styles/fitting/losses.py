"""What a `loss_fn` and an `eval_step` want to be called with, found out from their parameters before anything runs."""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core import kinds_of, loss_and_metrics, masked_mean
from jax_trainer.core.loss_shape import check_loss, check_pairing

LOG = logging.getLogger("jax_trainer")
OFFERED = ("rng", "step", "train")  # what a loss may ask for by name
_FORMS = "`loss_fn(logits, labels)`, `loss_fn(model, batch)` (nnx) or `loss_fn(params, batch)` (linen)"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Loss:
    """A loss function of the user's, and what it wants.

    Args:
        function: `(logits, labels)` or `(model or params, batch)`; returns the loss, or the loss and a dict.
        takes_batch: whether it is of the second kind, and calls the model itself.
        first: the name of its first parameter.
        wanted: which of `rng`, `step` and `train` it asks for.
    """

    function: Callable[..., Any]
    takes_batch: bool
    first: str
    wanted: tuple[str, ...]

    @classmethod
    def of(cls, function: Any) -> "Loss":
        """What `function` wants, by the names of its parameters: a first one called `model` or `params`, or a second
        one called `batch`, make it one that calls the model itself.
        """
        first, second, others = _parameters(function, "loss_fn", f"Write {_FORMS}.")
        _check_others(others)
        takes_batch = first in ("model", "params") or second == "batch"
        return cls(function, takes_batch, first, tuple(name for name in OFFERED if name in others))

    def on_outputs(
        self, outputs: Any, targets: Any, rng: jax.Array, train: bool, step: jax.Array | int, mask: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """The loss of a model's outputs, and what else to report; one per example is averaged, over what `mask` marks.

        Args:
            mask: of the batch, if it has one.
        """
        loss, reported = self.on_batch(outputs, targets, rng, train, step)
        seen, shape = {"predictions": outputs, "targets": targets}, jnp.shape(loss)
        check_loss(loss, seen, {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(seen) if jnp.ndim(leaf)})
        check_pairing(lambda a, b: self.on_batch(a, b, rng, train, step)[0], outputs, targets)
        if not shape and mask is not None:
            raise ValueError(
                f"The batch has a `mask` of shape {jnp.shape(mask)}, and `loss_fn(logits, labels)` returned one "
                "number: the examples that are masked out count in it, too. Return one loss per example, which is then "
                "averaged over what the mask marks, or write `loss_fn(model, batch)` (linen: `loss_fn(params, batch)`) "
                "with `jax_trainer.core.masked_mean(losses, batch.mask)`."
            )
        if not shape:
            return loss, reported
        same = {name: masked_mean(value, mask) for name, value in reported.items() if _shape(value) == shape}
        return masked_mean(loss, mask), {**reported, **same}

    def on_batch(
        self, model: Any, batch: Any, rng: jax.Array, train: bool, step: jax.Array | int
    ) -> tuple[Any, dict[str, Any]]:
        """What the function makes of its two arguments: the loss, and what else to report."""
        offered = {"rng": rng, "step": step, "train": train}
        returned = self.function(model, batch, **{name: offered[name] for name in self.wanted})
        return loss_and_metrics(returned, "loss_fn")


def checked_eval_step(function: Any) -> Callable[[Any, Any], Any]:
    """`function`, if it can be called as an `eval_step(state, batch)`."""
    others = _parameters(function, "eval_step", "Write `eval_step(state, batch)`, or `eval_step(model, batch)`.")[2]
    if needed := [name for name, is_needed in others.items() if is_needed]:
        raise TypeError(f"`eval_step` is called with a state or model and a batch, and not with {_listed(needed)}.")
    return function


def evaluated_by(returned: Any) -> dict[str, Any]:
    """What an `eval_step` has returned, by name: a number is the accuracy, one per example is averaged."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list | str) or returned is None:
        raise TypeError(f"`eval_step` returns a number, or a dict of numbers; this one returned {kinds_of(returned)}.")
    return {"accuracy": jnp.mean(jnp.asarray(returned))}


def _parameters(function: Any, name: str, advice: str) -> tuple[str, str, dict[str, bool]]:
    """The names of the first two parameters, and of the others, with whether they must be given."""
    if not callable(function):
        raise TypeError(f"`{name}` is a {type(function).__name__}, and must be a function. {advice}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C tell nothing
        return "", "", {}
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = [*positional, "", ""]
    if len(positional) < 2:
        takes = f"takes only `{positional[0]}`" if positional else "has no parameters"
        raise TypeError(f"`{name}` {takes}, and is called with two arguments. {advice}")
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first, second = positional[:2]
    return first, second, {p.name: p.default is p.empty for p in named if p.name not in (first, second)}


def _check_others(others: Mapping[str, bool]) -> None:
    unknown = [name for name, is_needed in others.items() if is_needed and name not in OFFERED]
    if "epoch" in unknown:
        raise TypeError(
            "`loss_fn` asks for `epoch`, which a compiled step does not know: it is the same in every epoch. Give the "
            "parameter a default, or leave it out."
        )
    if unknown:
        raise TypeError(
            f"`loss_fn` asks for {_listed(unknown)}, and besides its first two arguments there are only "
            f"{_listed(OFFERED)}. Write {_FORMS}."
        )
    if "epoch" in others:
        LOG.warning(
            "`loss_fn` has a parameter `epoch`, which stays at its default: a compiled step is the same in every "
            "epoch. A schedule of the optimizer can do what depends on time."
        )


def _shape(value: Any) -> Any:
    return None if isinstance(value, Mapping) else jnp.shape(value)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
