"""Inspects the parameters of `loss_fn` and `eval_step`, and calls them accordingly."""

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
OPTIONAL = ("rng", "step", "train")  # parameters that a loss may have besides the first two
_FORMS = "`loss_fn(logits, labels)`, `loss_fn(model, batch)`, or for linen models `loss_fn(params, batch)`"
_OUTPUTS = ("y_pred", "logits", "predictions", "outputs", "preds", "pred", "output", "prediction", "y_hat")
_TARGETS = ("y_true", "labels", "targets", "label", "target", "true")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Loss:
    """The user's loss function and its signature.

    Args:
        function: `(logits, labels)` or `(model or params, batch)`; returns the loss, or the loss and a dict.
        takes_batch: whether it has the second form, and calls the model.
        first: name of its first parameter.
        optional: which of `rng`, `step` and `train` are among its parameters.
    """

    function: Callable[..., Any]
    takes_batch: bool
    first: str
    optional: tuple[str, ...]

    @classmethod
    def of(cls, function: Any) -> "Loss":
        """Inspects `function`: a first parameter `model` or `params`, or a second one `batch`, means that it calls the
        model.
        """
        first, second, others = _parameters(function, "loss_fn", f"Write {_FORMS}.")
        _check_others(others)
        takes_batch = first in ("model", "params") or second == "batch"
        if first in _TARGETS and second in _OUTPUTS:
            raise TypeError(
                f"`loss_fn({first}, {second})` has its parameters in the order of Keras. It is called with the model's "
                f"outputs first and the targets second: write `loss_fn({second}, {first})`."
            )
        return cls(function, takes_batch, first, tuple(name for name in OPTIONAL if name in others))

    def on_outputs(
        self, outputs: Any, targets: Any, rng: jax.Array, train: bool, step: jax.Array | int, mask: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the loss of the model's outputs, and metrics; per-example values are averaged over the `mask`.

        Args:
            mask: the mask of the batch, if it has one.
        """
        loss, reported = self.on_batch(outputs, targets, rng, train, step)
        seen, shape = {"predictions": outputs, "targets": targets}, jnp.shape(loss)
        check_loss(loss, seen, {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(seen) if jnp.ndim(leaf)})
        check_pairing(lambda a, b: self.on_batch(a, b, rng, train, step)[0], outputs, targets)
        if not shape and mask is not None:
            raise ValueError(
                f"The batch has a `mask` of shape {jnp.shape(mask)}, but `loss_fn(logits, labels)` returned a scalar, "
                "which includes the masked-out examples. Return one loss per example, which is averaged over the mask, "
                "or write `loss_fn(model, batch)` (linen: `loss_fn(params, batch)`) with "
                "`jax_trainer.core.masked_mean(losses, batch.mask)`."
            )
        if not shape:
            return loss, reported
        same = {name: masked_mean(value, mask) for name, value in reported.items() if _shape(value) == shape}
        return masked_mean(loss, mask), {**reported, **same}

    def on_batch(
        self, model: Any, batch: Any, rng: jax.Array, train: bool, step: jax.Array | int
    ) -> tuple[Any, dict[str, Any]]:
        """Calls the function; returns the loss and metrics."""
        available = {"rng": rng, "step": step, "train": train}
        returned = self.function(model, batch, **{name: available[name] for name in self.optional})
        return loss_and_metrics(returned, "loss_fn")


def checked_eval_step(function: Any) -> Callable[[Any, Any], Any]:
    """Returns `function` if it can be called as `eval_step(state, batch)`."""
    others = _parameters(function, "eval_step", "Write `eval_step(state, batch)`, or `eval_step(model, batch)`.")[2]
    if needed := [name for name, is_needed in others.items() if is_needed]:
        raise TypeError(
            f"`eval_step` is called with a state or model and a batch, but also requires {_listed(needed)}."
        )
    return function


def evaluated_by(returned: Any) -> dict[str, Any]:
    """The metrics that an `eval_step` returned, by name: a number is the accuracy, per-example values are averaged."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list | str) or returned is None:
        raise TypeError(f"`eval_step` must return a number, or a dict of numbers, got {kinds_of(returned)}.")
    return {"accuracy": jnp.mean(jnp.asarray(returned))}


def _parameters(function: Any, name: str, hint: str) -> tuple[str, str, dict[str, bool]]:
    """The names of the first two parameters, and of the others, with whether they are required."""
    if not callable(function):
        raise TypeError(f"`{name}` must be a function, got a {type(function).__name__}. {hint}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return "", "", {}
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = [*positional, "", ""]
    if len(positional) < 2:
        takes = f"takes only `{positional[0]}`" if positional else "has no parameters"
        raise TypeError(f"`{name}` {takes}, but is called with two arguments. {hint}")
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first, second = positional[:2]
    return first, second, {p.name: p.default is p.empty for p in named if p.name not in (first, second)}


def _check_others(others: Mapping[str, bool]) -> None:
    unknown = [name for name, is_needed in others.items() if is_needed and name not in OPTIONAL]
    if "epoch" in unknown:
        raise TypeError(
            "`loss_fn` requires `epoch`, which is not available: the step is compiled once for all epochs. Give the "
            "parameter a default, or remove it; `step` is available."
        )
    if unknown:
        raise TypeError(
            f"`loss_fn` requires {_listed(unknown)}; besides the first two arguments, only {_listed(OPTIONAL)} are "
            f"available. Write {_FORMS}."
        )
    if "epoch" in others:
        LOG.warning(
            "`loss_fn` has a parameter `epoch`, which keeps its default: the step is compiled once for all epochs. Use "
            "`step`, or an optimizer schedule, for what depends on time."
        )


def _shape(value: Any) -> Any:
    return None if isinstance(value, Mapping) else jnp.shape(value)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
