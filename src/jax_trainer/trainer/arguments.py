"""The model and optimizer arguments of a trainer: configurations or objects."""

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
    """Builds the optimizer of a run."""

    def build(self, total_steps: int | None) -> optax.GradientTransformation:
        """The optimizer for a run of `total_steps` steps."""
        ...


class ModelArgument:
    """The model argument: a configuration, an nnx or linen module, or a function that builds an nnx module."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model if isinstance(model, ConfigInterface) else None
        self.mode: ModelMode = _mode(model)
        self.name = _name(model)

    @property
    def has_weights(self) -> bool:
        """Whether it is an nnx module, which already has its initial weights."""
        return isinstance(self._model, nnx.Module)

    @property
    def lacks_variables(self) -> bool:
        """Whether it is an nnx module that contains a linen module which was never called."""
        return isinstance(self._model, nnx.Module) and lacks_variables(self._model)

    def build(self, inputs: Any, rngs: nnx.Rngs) -> Module:
        """Builds the module; a module that was passed is returned as it is."""
        if self.config is not None:
            return build_model(self.config, inputs, rngs)
        if isinstance(self._model, nnx.Module | nn.Module):
            return self._model
        return _built(self._model, inputs, rngs)


def _mode(model: Any) -> ModelMode:
    if isinstance(model, ConfigInterface):
        return model_mode(model)
    if isinstance(model, nn.Module):
        return "linen"
    if inspect.isclass(model) and issubclass(model, nn.Module):
        raise TypeError(f"The model is the linen class {model.__name__}. Pass an object: `{model.__name__}(…)`.")
    if isinstance(model, nnx.Module | type | partial) or inspect.isroutine(model):
        return "nnx"
    raise TypeError(
        f"The model is a {class_of(model)}. Pass a model configuration, an nnx or linen module, or a class or function "
        "that builds an nnx module from `rngs`."
    )


def _name(model: Any) -> str:
    if isinstance(model, ConfigInterface):
        return model.class_name.rpartition(".")[2]
    return getattr(model, "__name__", type(model).__name__).strip("<>")


def _built(build: Any, inputs: Any, rngs: nnx.Rngs) -> nnx.Module:
    names = _parameters(build)
    example = {"exmp_input": inputs} if "exmp_input" in names else {}
    if others := _others_needed(names.values(), ("rngs", *example)):
        raise TypeError(
            f"`{_name(build)}` is called with `rngs` only, but also requires {', '.join(others)}. Pass an nnx or linen "
            f"module, or a function of `rngs`: `lambda rngs: {_name(build)}(…, rngs=rngs)`."
        )
    module = build(rngs=rngs, **example) if "rngs" in names else build(rngs, **example)
    if not isinstance(module, nnx.Module):
        raise TypeError(f"`{_name(build)}` must return an nnx module, got a {type(module).__name__}.")
    return module


def _parameters(build: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function or of a class's `__init__`, which Flax hides behind its own."""
    if not inspect.isclass(build):
        return dict(inspect.signature(build).parameters)
    _, *others = inspect.signature(build.__init__).parameters.items()  # without `self`
    return dict(others)


def _others_needed(parameters: Iterable[inspect.Parameter], passed: tuple[str, ...]) -> list[str]:
    """The required parameters besides `passed`; without a parameter `rngs`, the first one receives them."""
    parameters = list(parameters)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    others = [name for name in needed if name not in passed]
    return others if any(p.name == "rngs" for p in parameters) else others[1:]


class _OptaxOptimizer:
    """An optax optimizer, independent of the length of the run."""

    def __init__(self, tx: optax.GradientTransformation) -> None:
        self._tx = tx

    def build(self, total_steps: int | None) -> optax.GradientTransformation:
        return self._tx


def optimizer_of(optimizer: Any) -> OptimizerArgument:
    """The optimizer argument, from a configuration or an optax optimizer."""
    if isinstance(optimizer, ConfigInterface):
        if not optimizer.class_name:
            kind = type(optimizer).__name__
            raise TypeError(
                f"No optimizer is registered for {kind}: its `class_name` is empty. Decorate the optimizer with "
                f"`@register`, and annotate it with `config: {kind}`."
            )
        return optimizer.instantiate(OptimizerInterface)
    return _OptaxOptimizer(checked_optimizer(optimizer, ", or an optimizer's configuration"))


def one_of(config: Any, value: Any, names: tuple[str, str]) -> Any:
    """The one of two arguments that is not None."""
    if (config is None) == (value is None):
        raise TypeError(f"Pass either `{names[0]}` or `{names[1]}`{', not both' if value is not None else ''}.")
    return value if config is None else config
