"""The arguments of a trainer: its configuration and callbacks, the model, the optimizer and the example batch."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from compoconf import ConfigInterface

from jax_trainer.adapters import ModelHandle, ModelMode
from jax_trainer.callbacks import Callback, CallbackConfig, LightningLogger, ModelCheckpoint, is_lightning_logger
from jax_trainer.config.settings import SettingsError, config_of, errors_of
from jax_trainer.core import Batch
from jax_trainer.datasets import DatasetModule
from jax_trainer.datasets.foreign import as_example, check_batch
from jax_trainer.diagnostics.suggestions import check_keywords, keywords_of
from jax_trainer.optimizer import OptimizerInterface, build_optimizers, checked_optimizer
from jax_trainer.optimizer.alternating import evaluating_optimizer, stored_optimizers
from jax_trainer.runs import CallbacksLike, named_callbacks
from jax_trainer.trainer.config import TrainerConfig


def overruled(
    trainer: type[Any],
    base: type[Any],
    *,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    stored: Mapping[str, Any],
    may_lack: Collection[str],
) -> dict[str, Any]:
    """The arguments of a trainer of a file or a stored run, which win over those that its class passes to `base`.

    Args:
        trainer, base: as for `resolve`.
        given: arguments that the class passes.
        settings: further keywords that it passes: a Lightning logger, or keys of the configuration.
        stored: arguments of the file or the run.
        may_lack: parts that nobody needs to pass.
    """
    _check_settings(trainer, base, settings)
    merged = {name: value for name, value in settings.items() if is_lightning_logger(value)} | {**given, **stored}
    for part in ("model", "optimizer"):
        names = part, f"{part}_config"
        merged |= {name: (stored if stored.keys() & names else given).get(name) for name in names}
        if part not in may_lack and all(merged[name] is None for name in names):
            text = f"The {part} of this run was passed in Python and is not stored: pass `{part}` again."
            raise SettingsError([(part, text)])
    if merged["exmp_input"] is None and merged["dataset"] is None:
        raise SettingsError([("dataset", "This run has no stored dataset: pass `exmp_input`, an example batch.")])
    known = stored["config"].callbacks
    own = {name: one for name, one in named_callbacks(given["callbacks"]).items() if name not in known}
    return {**merged, "callbacks": own | named_callbacks(stored.get("callbacks", ()), {*known, *own})}


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
    if is_lightning_logger(settings.get("logger")):
        own = LightningLogger(settings["logger"])
        callbacks = {**callbacks, "LightningLogger": own} if isinstance(callbacks, Mapping) else [*callbacks, own]
        settings = {name: value for name, value in settings.items() if name != "logger"}
    if config is not None and settings:
        raise TypeError(
            f"`config` and keywords are both set: put {', '.join(settings)} into `config`, or leave out `config`."
        )
    kind = config_of(trainer)
    if config is not None and not isinstance(config, TrainerConfig):
        raise TypeError(
            f"`config` must be a {kind.__name__}, got a {type(config).__name__}. Pass the model and the optimizer "
            "by keyword: `model=…, optimizer=…`."
        )
    _check_settings(trainer, base, settings)
    default: Any = next(one.default_factory for one in fields(kind) if one.name == "callbacks")
    configured = default() if config is None else config.callbacks
    named = named_callbacks(callbacks, configured)
    objects = {name: one for name, one in named.items() if isinstance(one, Callback)}
    # the configuration must know what saves: it chooses the best checkpoint, and `rollback` needs one
    savers = {name: one.config for name, one in objects.items() if isinstance(one, ModelCheckpoint)}
    configs = {name: one for name, one in named.items() if isinstance(one, CallbackConfig)} | savers
    merged = {"callbacks": {**configured, **configs}} if configs else {}
    return (kind(**settings, **merged) if config is None else replace(config, **merged)), objects


def _check_settings(trainer: type[Any], base: type[Any], settings: Mapping[str, Any]) -> None:
    others = [name for name in inspect.signature(base).parameters if name != "settings"]
    check_keywords(trainer.__name__, settings, [*(keywords_of(config_of(trainer)) or settings), *others])


def one_of(part: str, config: Any, value: Any, *, may_lack: bool = False) -> Any:
    """The one of the arguments `<part>_config` and `<part>` that is not None."""
    if (config is None) == (value is None) and not (may_lack and value is None):
        raise TypeError(f"Pass either `{part}_config` or `{part}`{', not both' if value is not None else ''}.")
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
    if optimizer is None:
        return lambda total_steps: optax.identity()
    if isinstance(optimizer, Mapping):
        return partial(build_optimizers, optimizer, trains=False)
    return lambda total_steps: evaluating_optimizer(optimizer)


def optimizer_of(optimizer: Any) -> Callable[[int | None], optax.GradientTransformation]:
    """A function that builds the optimizer for a number of steps, from a configuration or an optax optimizer.

    Several by name become `Optimizers`. None: `init_optimizer` is overridden.
    """
    if optimizer is None:
        return lambda total_steps: one_of("optimizer", None, None)
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
        with errors_of("optimizer"):
            return configured.build(total_steps)

    return build
