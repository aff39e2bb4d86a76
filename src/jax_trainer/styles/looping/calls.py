"""How loops call what they are given: a model on the inputs of a batch, a loss on its outputs and the targets."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jax_trainer.adapters import LinenView
from jax_trainer.adapters.mode import mode_flags
from jax_trainer.core import Batch, PyTree, stream
from jax_trainer.datasets import DataError

Arguments = tuple[Any, ...]


class Collections(NamedTuple):
    """The names of the random streams that a model may ask for."""

    init: tuple[str, ...] = ("params", "dropout")
    apply: tuple[str, ...] = ("dropout",)

    @classmethod
    def of(cls, given: Mapping[str, Sequence[str]] | None) -> "Collections":
        """Those that the user gave, as in `{"init": ["params"], "apply": ["dropout"]}`."""
        unknown = sorted(set(given or {}) - set(cls._fields))
        if unknown:
            raise ValueError(
                f"`collections` has the key {unknown[0]!r}. Its keys are 'init' and 'apply', and its values names of "
                "random streams."
            )
        return cls(**{name: tuple(labels) for name, labels in (given or {}).items()})


class ModelCall(NamedTuple):
    """A model's `apply`, and the random streams that it may ask for."""

    apply: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(
        self, params: PyTree, model_state: PyTree, inputs: Arguments, rng: jax.Array, *, train: bool
    ) -> tuple[Arguments, PyTree]:
        """The outputs, and what became of the model state."""
        view = LinenView(_as_linen(self.apply), params, model_state, stream(rng, "model"))
        outputs, changed = view.apply(params, *inputs, train=train, rngs=self.names)
        return _several(outputs), changed


def split(batch: Batch) -> tuple[Arguments, Arguments]:
    """The inputs and the targets of a batch: a pair of these, each an array or several, or something that names them.

    >>> split((1, (2, 3)))
    ((1,), (2, 3))
    """
    if hasattr(batch, "input") and hasattr(batch, "target"):
        batch = (batch.input, batch.target)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(
            "A batch of a loop is a pair of inputs and targets: `(x, y)`, `((x, …), (y, …))` or `((x, …), ())`; got "
            f"{_in_words(batch)}."
        )
    return _several(batch[0]), _several(batch[1])


def _in_words(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return "a single array" if hasattr(batch, "shape") else f"a {type(batch).__name__}"


def _several(things: Any) -> Arguments:
    return tuple(things) if isinstance(things, tuple | list) else (things,)


def _as_linen(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply`; a plain function that is called less richly than that of a linen module, as one of these."""
    if _takes(apply, "rngs") and _takes(apply, "mutable"):
        return apply

    def call(variables: Any, *inputs: Any, train: bool, rngs: Any, mutable: Sequence[str] | None = None) -> Any:
        told = {name: value for name, value in (("train", train), ("rngs", rngs)) if _takes(apply, name)}
        told |= mode_flags(apply, train=train)
        outputs = apply(variables, *inputs, **told)
        return outputs if mutable is None else (outputs, {name: variables[name] for name in mutable})

    return call


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
