"""Merges the callbacks passed in Python, objects or configurations, with those of the trainer's configuration."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig, ModelCheckpoint
from jax_trainer.runs import CallbacksLike, named_callbacks
from jax_trainer.trainer.config import TrainerConfig


def resolve_callbacks(
    config: TrainerConfig | None, callbacks: CallbacksLike, kind: type[Any], settings: Mapping[str, Any]
) -> tuple[Any, dict[str, Callback]]:
    """Returns the configuration with the configured callbacks, and the callback objects by name.

    Args:
        config: the trainer's configuration; None: make a `kind` from `settings`.
        callbacks: passed in Python.
        kind: the trainer's configuration class.
        settings: its keyword arguments.
    """
    configured = _default_callbacks(kind) if config is None else config.callbacks
    named = named_callbacks(callbacks, configured)
    objects = {name: one for name, one in named.items() if isinstance(one, Callback)}
    # the configuration must know what saves: it chooses the best checkpoint, and `rollback` needs one
    savers = {name: one.config for name, one in objects.items() if isinstance(one, ModelCheckpoint)}
    configs = {name: one for name, one in named.items() if isinstance(one, CallbackConfig)} | savers
    merged = {"callbacks": {**configured, **configs}} if configs else {}
    return (kind(**settings, **merged) if config is None else replace(config, **merged)), objects


def _default_callbacks(kind: type[Any]) -> dict[str, Any]:
    (field,) = (one for one in fields(kind) if one.name == "callbacks")
    return field.default_factory()  # type: ignore[misc]  # a dict has one
