"""What a trainer is given to train, and to train with: configurations, or the things themselves."""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import optax
from compoconf import ConfigInterface
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters.bridged import lacks_variables
from jax_trainer.core import class_of
from jax_trainer.interfaces import ModelMode, build_model, model_mode
from jax_trainer.optimizer import OptimizerInterface, checked_optimizer

Module = nnx.Module | nn.Module


class OptimizerArgument(Protocol):
    """What makes the optimizer of a run."""

    def build(self, total_steps: int | None) -> optax.GradientTransformation:
        """The optimizer of a run of this many steps."""
        ...


class ModelArgument:
    """A model as it was given: a configuration, an nnx or linen module, or what builds an nnx module."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.config = given if isinstance(given, ConfigInterface) else None
        self.mode: ModelMode = _mode(given)
        self.name = _name(given)

    @property
    def has_weights(self) -> bool:
        """Whether it is an nnx module, which has its first weights already."""
        return isinstance(self._given, nnx.Module)

    @property
    def lacks_variables(self) -> bool:
        """Whether it is an nnx module with a linen one inside that was never called."""
        return isinstance(self._given, nnx.Module) and lacks_variables(self._given)

    def build(self, inputs: Any, rngs: nnx.Rngs) -> Module:
        """The module; one that was given is itself."""
        if self.config is not None:
            return build_model(self.config, inputs, rngs)
        if isinstance(self._given, nnx.Module | nn.Module):
            return self._given
        return _built(self._given, inputs, rngs)


def _mode(given: Any) -> ModelMode:
    if isinstance(given, ConfigInterface):
        return model_mode(given)
    if isinstance(given, nn.Module):
        return "linen"
    if inspect.isclass(given) and issubclass(given, nn.Module):
        raise TypeError(f"{given.__name__} is a class of linen modules. Pass one of them: `{given.__name__}(…)`.")
    if isinstance(given, nnx.Module | type | partial) or inspect.isroutine(given):
        return "nnx"
    raise TypeError(
        f"The model is a {class_of(given)}. Pass a model's configuration, an nnx or "
        "linen module, or a class or function that builds an nnx module from `rngs`."
    )


def _name(given: Any) -> str:
    if isinstance(given, ConfigInterface):
        return given.class_name.rpartition(".")[2]
    return getattr(given, "__name__", type(given).__name__).strip("<>")


def _built(build: Any, inputs: Any, rngs: nnx.Rngs) -> nnx.Module:
    names = _parameters(build)
    example = {"exmp_input": inputs} if "exmp_input" in names else {}
    if others := _others_needed(names.values(), ("rngs", *example)):
        raise TypeError(
            f"`{_name(build)}` is called with `rngs`, and asks for {', '.join(others)}, too. Pass an nnx or linen "
            f"module, or a function that needs nothing else: `lambda rngs: {_name(build)}(…, rngs=rngs)`."
        )
    module = build(rngs=rngs, **example) if "rngs" in names else build(rngs, **example)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"`{_name(build)}` built a {type(module).__name__}, and must build an nnx module.")
    return module


def _parameters(build: Any) -> dict[str, inspect.Parameter]:
    """Those of the constructor, where it is a class: Flax hides them behind its own."""
    if not inspect.isclass(build):
        return dict(inspect.signature(build).parameters)
    _, *others = inspect.signature(build.__init__).parameters.items()  # without the object itself
    return dict(others)


def _others_needed(parameters: Iterable[inspect.Parameter], given: tuple[str, ...]) -> list[str]:
    """What must be passed besides `given`; without an argument called `rngs`, the first one gets them."""
    parameters = list(parameters)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = [name for name in needed if name not in given]
    return others if any(p.name == "rngs" for p in parameters) else others[1:]


class _Ready:
    """An optax optimizer, whatever the length of the run."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx

    def build(self, total_steps: int | None) -> optax.GradientTransformation:
        return self._tx


def optimizer_of(given: Any) -> OptimizerArgument:
    """What makes the optimizer, from a configuration or an optax optimizer."""
    if isinstance(given, ConfigInterface):
        if not given.class_name:
            kind = type(given).__name__
            raise TypeError(
                f"{kind} belongs to no optimizer: its `class_name` is empty. Decorate the optimizer with `@register`, "
                f"and annotate it with `config: {kind}`."
            )
        return given.instantiate(OptimizerInterface)
    return _Ready(checked_optimizer(given, ", or an optimizer's configuration"))


def one_of(config: Any, thing: Any, names: tuple[str, str]) -> Any:
    """The one of two arguments that was given."""
    if (config is None) == (thing is None):
        raise TypeError(f"Pass either `{names[0]}` or `{names[1]}`{', not both' if thing is not None else ''}.")
    return thing if config is None else config
