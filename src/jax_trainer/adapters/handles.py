"""`handle_of`: the only place that tells the kinds of models apart."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from compoconf import ConfigInterface
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters.functions import FunctionHandle, is_function_model
from jax_trainer.adapters.handle import ModelHandle, ModelHooks
from jax_trainer.adapters.interfaces import model_mode
from jax_trainer.adapters.linen import FlaxStateHandle, LinenHandle, is_flax_state, is_linen
from jax_trainer.adapters.nnx_handle import NnxHandle
from jax_trainer.diagnostics.returned import class_of

_OF_MODE: dict[str, type[ModelHandle]] = {one.mode: one for one in (LinenHandle, NnxHandle, FunctionHandle)}


def handle_of(model: Any, hooks: ModelHooks | None = None) -> ModelHandle:
    """The handle of a model.

    Args:
        model: a linen or nnx module; a callable pytree, such as an Equinox module; an object with `init` and `apply`,
            such as a `FunctionModel`; a configuration of a registered model; a class or function that builds an nnx
            module; or a state of `TrainState.create` or flax.training.
        hooks: what the owner of the handle knows and overrides.
    """
    return _kind_of(model)(model, hooks)


def module_kind(value: Any) -> Literal["linen", "nnx"] | None:
    """The kind of a Flax module, or of a class of modules; None for anything else."""
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, nnx.Module):
        return "nnx"
    return "linen" if issubclass(kind, nn.Module) else None


def _kind_of(model: Any) -> type[ModelHandle]:
    if isinstance(model, ConfigInterface):
        return _OF_MODE[model_mode(model)]
    if is_linen(model):
        return LinenHandle
    if isinstance(model, nnx.Module):
        return NnxHandle
    if is_flax_state(model):
        return FlaxStateHandle
    if is_function_model(model):
        return FunctionHandle
    if isinstance(model, type | partial) or inspect.isroutine(model):
        return NnxHandle
    raise TypeError(
        f"The model is a {class_of(model)}. Pass a linen or nnx module, a callable pytree (such as an Equinox module), "
        f"a `FunctionModel`, a model configuration, or a class or function that builds an nnx module from `rngs`."
        f"{_hint(model)}"
    )


def _hint(model: Any) -> str:
    if class_of(model).startswith("torch."):
        return " Write the network in Flax; a torch `DataLoader` can be passed unchanged."
    if isinstance(model, Mapping) or (isinstance(model, tuple | list) and model):
        return (
            " To pass initial weights, create a state for `fit`: "
            "`TrainState.create(apply_fn=model.apply, params=…, tx=…)`."
        )
    return ""
