"""Callbacks that are given in Python: objects, or configurations of them, in a list or by name."""

from dataclasses import replace
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.runs import CallbacksLike, named_callbacks
from jax_trainer.trainer.config import TrainerConfig


def resolve_callbacks(config: TrainerConfig, given: CallbacksLike) -> tuple[Any, dict[str, Callback]]:
    """`config` with the configurations among those given, which are stored with a run, and the objects by name."""
    named = named_callbacks(given, config.callbacks)
    configs = {name: one for name, one in named.items() if isinstance(one, CallbackConfig)}
    objects = {name: one for name, one in named.items() if isinstance(one, Callback)}
    return (replace(config, callbacks={**config.callbacks, **configs}) if configs else config), objects
