"""The arguments of a trainer: its configuration and callbacks, the model, the optimizer and the example batch."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from compoconf import ConfigInterface

from jax_trainer.adapters import ModelHandle
from jax_trainer.callbacks import Callback, CallbackConfig, LightningLogger, ModelCheckpoint, is_lightning_logger
from jax_trainer.core import Batch
from jax_trainer.datasets import DatasetModule
from jax_trainer.datasets.foreign import as_example, check_batch
from jax_trainer.interfaces import ModelMode
from jax_trainer.optimizer import OptimizerInterface, build_optimizers, checked_optimizer
from jax_trainer.optimizer.alternating import evaluating_optimizer, stored_optimizers
from jax_trainer.runs import CallbacksLike, named_callbacks
from jax_trainer.settings import SettingsError, config_of
from jax_trainer.suggestions import check_keywords, keywords_of
from jax_trainer.trainer.config import TrainerConfig


def resolve(
    trainer: type[Any], base: type[Any], config: Any, callbacks: CallbacksLike, settings: Mapping[str, Any]
) -> tuple[Any, dict[str, Callback]]:
    """The configuration of a trainer with all configured callbacks, and the callback objects by name.

    Args:
        trainer: the trainer's class.
        base: the class whose constructor has the other keywords.
        config: its configuration; None: make it from `settings`.
        callbacks: passed in Python, objects or configurations.
        settings: keys of the configuration, passed as keywords.
    """
    if config is not None and settings:
        raise TypeError(
            f"`config` and keywords are both set: put {', '.join(settings)} into `config`, or leave out `config`."
        )
    kind, others = config_of(trainer), [name for name in inspect.signature(base).parameters if name != "settings"]
    if config is not None and not isinstance(config, TrainerConfig):
        raise TypeError(
            f"`config` must be a {kind.__name__}, got a {type(config).__name__}. Pass the model and the optimizer "
            "by keyword: `model=…, optimizer=…`."
        )
    check_keywords(trainer.__name__, settings, [*(keywords_of(kind) or settings), *others])
    if is_lightning_logger(settings.get("logger")):
        own = LightningLogger(settings["logger"])
        callbacks = {**callbacks, "LightningLogger": own} if isinstance(callbacks, Mapping) else [*callbacks, own]
        settings = {name: value for name, value in settings.items() if name != "logger"}
    default: Any = next(one.default_factory for one in fields(kind) if one.name == "callbacks")
    configured = default() if config is None else config.callbacks
    named = named_callbacks(callbacks, configured)
    objects = {name: one for name, one in named.items() if isinstance(one, Callback)}
    # the configuration must know what saves: it chooses the best checkpoint, and `rollback` needs one
    savers = {name: one.config for name, one in objects.items() if isinstance(one, ModelCheckpoint)}
    configs = {name: one for name, one in named.items() if isinstance(one, CallbackConfig)} | savers
    merged = {"callbacks": {**configured, **configs}} if configs else {}
    return (kind(**settings, **merged) if config is None else replace(config, **merged)), objects


def one_of(config: Any, value: Any, names: tuple[str, str]) -> Any:
    """The one of two arguments that is not None."""
    if (config is None) == (value is None):
        raise TypeError(f"Pass either `{names[0]}` or `{names[1]}`{', not both' if value is not None else ''}.")
    return value if config is None else config


def example_of(exmp_input: Batch, dataset: DatasetModule | None) -> Batch:
    """The example batch that was passed, or the first one of the dataset."""
    if exmp_input is None and dataset is None:
        raise TypeError("Pass `exmp_input`, an example batch, such as `next(iter(train_loader))`.")
    if callable(getattr(exmp_input, "__next__", getattr(exmp_input, "epoch", None))):
        kind = type(exmp_input).__name__
        raise TypeError(f"`exmp_input` is a {kind}, and must be one batch: `exmp_input=next(iter(train_loader))`.")
    if dataset is not None and not isinstance(dataset, DatasetModule):
        kind = type(dataset).__name__
        raise TypeError(f"`dataset` must be a DatasetModule, got a {kind}. Pass loaders to `train_model`.")
    if exmp_input is None and dataset is not None:
        return dataset.example()
    exmp_input = as_example(exmp_input)
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(exmp_input)):
        check_batch(exmp_input, "example batch (`exmp_input`)")
    return exmp_input


def mode_of(model: ModelHandle, expected: ModelMode | None) -> ModelMode:
    """The kind of the model, which must be the `expected` one, if that is set."""
    if model.tx is not None:
        raise TypeError(
            f"The model is a {type(model.model).__name__}, which has its own optimizer. Pass its module, or train the "
            "state with `fit`."
        )
    if expected not in (None, model.mode):
        text = f"`model_mode` is {expected}, but {model.name} is a {model.mode} model."
        raise SettingsError([("trainer.model_mode", f"{text} Leave it out: it is inferred from the model.")])
    return model.mode


def config_or_none(argument: Any) -> Any:
    """The configuration of a model or an optimizer, or of several optimizers by name; None for an object."""
    if isinstance(argument, Mapping):
        return stored_optimizers(argument)
    return argument if isinstance(argument, ConfigInterface) else None


def evaluating(optimizer: Any) -> Callable[[int | None], optax.GradientTransformation]:
    """Like `optimizer_of`, but without updates: what an evaluation needs of the optimizer."""
    if isinstance(optimizer, Mapping):
        return partial(build_optimizers, optimizer, trains=False)
    return lambda total_steps: evaluating_optimizer(optimizer)


def optimizer_of(optimizer: Any) -> Callable[[int | None], optax.GradientTransformation]:
    """A function that builds the optimizer for a number of steps, from a configuration or an optax optimizer.

    Several by name become `Optimizers`.
    """
    if isinstance(optimizer, Mapping):
        return partial(build_optimizers, optimizer)
    if not isinstance(optimizer, ConfigInterface):
        tx = checked_optimizer(optimizer, ", or an optimizer's configuration")
        return lambda total_steps: tx
    if not optimizer.class_name:
        kind = type(optimizer).__name__
        raise TypeError(
            f"No optimizer is registered for {kind}: its `class_name` is empty. Decorate the optimizer with "
            f"`@register`, and annotate it with `config: {kind}`."
        )
    configured = optimizer.instantiate(OptimizerInterface)

    def build(total_steps: int | None) -> optax.GradientTransformation:
        try:
            return configured.build(total_steps)
        except SettingsError as error:
            raise error.under("optimizer") from None

    return build
