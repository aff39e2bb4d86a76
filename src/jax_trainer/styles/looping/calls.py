"""How loops call a model with the inputs of a batch, and a loss with its outputs and the targets."""

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
    """The names of the random streams of a model."""

    init: tuple[str, ...] = ("params", "dropout")
    apply: tuple[str, ...] = ("dropout",)

    @classmethod
    def of(cls, collections: Mapping[str, Sequence[str]] | None) -> "Collections":
        """From the argument `collections`, such as `{"init": ["params"], "apply": ["dropout"]}`."""
        unknown = sorted(set(collections or {}) - set(cls._fields))
        if unknown:
            raise ValueError(
                f"`collections` has the unknown key {unknown[0]!r}. Its keys are 'init' and 'apply', its values "
                "names of random streams."
            )
        return cls(**{name: tuple(labels) for name, labels in (collections or {}).items()})


class ModelCall(NamedTuple):
    """A model's `apply`, and the names of its random streams."""

    apply: Callable[..., Any]
    names: tuple[str, ...]

    def __call__(
        self, params: PyTree, model_state: PyTree, inputs: Arguments, rng: jax.Array, *, train: bool
    ) -> tuple[Arguments, PyTree]:
        """Returns the outputs and the new model state."""
        view = LinenView(_as_linen(self.apply), params, model_state, stream(rng, "model"))
        outputs, changed = view.apply(params, *inputs, train=train, rngs=self.names)
        return _as_tuple(outputs), changed


def split(batch: Batch) -> tuple[Arguments, Arguments]:
    """Splits a batch into inputs and targets, each a tuple of arrays.

    >>> split((1, (2, 3)))
    ((1,), (2, 3))
    """
    if hasattr(batch, "input") and hasattr(batch, "target"):
        batch = (batch.input, batch.target)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(
            "A batch must be a pair of inputs and targets: `(x, y)`, `((x, …), (y, …))` or `((x, …), ())`; got "
            f"{_describe(batch)}."
        )
    return _as_tuple(batch[0]), _as_tuple(batch[1])


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return "a single array" if hasattr(batch, "shape") else f"a {type(batch).__name__}"


def _as_tuple(value: Any) -> Arguments:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _as_linen(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a plain function so that it accepts the arguments of a linen module's `apply`."""
    if _takes(apply, "rngs") and _takes(apply, "mutable"):
        return apply

    def call(variables: Any, *inputs: Any, train: bool, rngs: Any, mutable: Sequence[str] | None = None) -> Any:
        options = {name: value for name, value in (("train", train), ("rngs", rngs)) if _takes(apply, name)}
        options |= mode_flags(apply, train=train)
        outputs = apply(variables, *inputs, **options)
        return outputs if mutable is None else (outputs, {name: variables[name] for name in mutable})

    return call


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
