"""Callbacks that are given in Python: objects, or configurations of them, in a list or by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.trainer.config import TrainerConfig

Given = Sequence[Callback | CallbackConfig] | Mapping[str, Callback | CallbackConfig]


def taken_in(config: TrainerConfig, given: Given) -> tuple[Any, dict[str, Callback]]:
    """`config` with the configurations among those given, which are stored with a run, and the objects by name."""
    named = dict(_named(given, set(config.callbacks)))
    configs = {name: one for name, one in named.items() if isinstance(one, CallbackConfig)}
    objects = {name: one for name, one in named.items() if isinstance(one, Callback)}
    if odd := [name for name in named if name not in configs and name not in objects]:
        kind = type(named[odd[0]]).__name__
        raise TypeError(f"The callback {odd[0]!r} is a {kind}. Pass a callback, or the configuration of one.")
    return (replace(config, callbacks={**config.callbacks, **configs}) if configs else config), objects


def _named(given: Given, taken: set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    for one in given:
        base = name = getattr(one, "class_name", "") or type(one).__name__
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        yield name, one
