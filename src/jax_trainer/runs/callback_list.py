"""The callbacks of a run: their order, and their states in checkpoints."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig, ModelCheckpoint, RunContext
from jax_trainer.callbacks.callback import Need, NoFolder
from jax_trainer.checkpoint.errors import damage
from jax_trainer.checkpoint.record import SavedCheckpoint
from jax_trainer.config import config_from
from jax_trainer.config.settings import Settings
from jax_trainer.diagnostics.returned import class_of

CallbackLike = Callback | CallbackConfig | Mapping[str, Any] | None
CallbacksLike = Sequence[Callback | CallbackConfig] | Mapping[str, CallbackLike]


class CallbackList:
    """All callbacks and loggers of a run. Those that save come last, and so save the updated states of the others.

    Args:
        callbacks: by name.
        records: other stateful observers (with `state_dict`), by names that no callback has.
    """

    def __init__(self, callbacks: Mapping[str, Callback], records: Mapping[str, Any]) -> None:
        self.callbacks, self.records = callbacks, records

    def observers(self, first: Iterable[Any] = (), more: Iterable[Any] = ()) -> list[Any]:
        """The observers in the order of notification: `first`, records, `more`, callbacks, callbacks that save."""
        savers = [one for one in self.callbacks.values() if isinstance(one, ModelCheckpoint)]
        others = [one for one in self.callbacks.values() if not isinstance(one, ModelCheckpoint)]
        return [*first, *self.records.values(), *more, *others, *savers]

    def states(self) -> dict[str, Any]:
        """The states of all callbacks and records, without empty ones."""
        states = {name: one.state_dict() for name, one in self._stateful.items()}
        return {name: state for name, state in states.items() if state}

    def load_states(self, saved: SavedCheckpoint) -> None:
        """Restores the states of all callbacks and records from a checkpoint."""
        for name, one in self._stateful.items():
            if name in saved.callbacks:
                with damage(saved.path, f"the state of {name}"):
                    one.load_state_dict(saved.callbacks[name])

    @property
    def _stateful(self) -> dict[str, Any]:
        return {**self.callbacks, **self.records}


def named_callbacks(callbacks: CallbacksLike | Callback | CallbackConfig, used: Iterable[str] = ()) -> dict[str, Any]:
    """Callbacks, or their configurations, by class name, with a number if the name is in use.

    A mapping may have the keys of a configuration as in a file: `{"EarlyStopping": {"monitor": "val/acc"}}`.
    """
    callbacks = [callbacks] if isinstance(callbacks, Callback | CallbackConfig) else callbacks
    named = dict(_named(callbacks, set(used)))
    written = {name: one for name, one in named.items() if one is None or isinstance(one, Mapping)}
    named |= config_from({"callbacks": written}, _Callbacks).callbacks
    for name, one in named.items():
        if not isinstance(one, Callback | CallbackConfig):
            raise TypeError(f"The callback {name!r} is {_describe(one)}")
        if isinstance(one, Callback) and "config" not in vars(one):
            kind = type(one).__name__
            raise TypeError(f"`{kind}.__init__` does not call `super().__init__()`. Call it before anything else.")
    return named


def attached(named: Mapping[str, Callback | CallbackConfig], run: RunContext) -> dict[str, Callback]:
    """The callbacks of a run by name: those of configurations are created, all others attached."""
    made = {}
    for name, one in named.items():
        made[name] = one if isinstance(one, Callback) else one.instantiate(Callback, run)
        if isinstance(one, Callback):
            one.attach(run)
    return made


def attached_without_folder(
    named: Mapping[str, Callback | CallbackConfig], style: str, offers: Iterable[Need], **facts: Any
) -> dict[str, Callback]:
    """The callbacks of a style without a run folder, attached to a run with these facts.

    Raises for one that needs more than the style `offers`.
    """
    absent: Any = NoFolder(style)
    run = RunContext(absent, absent, **facts)
    made = {name: one if isinstance(one, Callback) else one.instantiate(Callback) for name, one in named.items()}
    for name, one in made.items():
        if lacking := [need for need in one.needs if need not in offers]:
            raise ValueError(
                f"`{style}` cannot have the callback {name!r}: it has no {_NEEDS[lacking[0]]}. Use `fit` or "
                f"`TrainerModule`{_INSTEAD.get(style, '')}."
            )
        one.attach(run)
    return made


_NEEDS = {"folder": "run folder", "validation": "validation of its own", "end": "known end"}
_INSTEAD = {"TrainLoop": ", or decide in your loop, and change the state with `loop.edit(…)`"}


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}. Pass an instance: `{value.__name__}(…)`."
    if isinstance(value, str):
        return f"{value!r}, a string. Pass an instance, or a dict of names and keys: `callbacks={{{value!r}: {{}}}}`."
    if inspect.isfunction(value):
        return "a function. Name its hook: `LambdaCallback(on_validation_epoch_end=…)`."
    return f"a {class_of(value)}. Derive its class from `jax_trainer.Callback`, or pass a configuration of a callback."


@dataclass
class _Callbacks(Settings):
    callbacks: dict[str, Callback.cfgtype]


def _named(callbacks: CallbacksLike, used: set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(callbacks, Mapping):
        yield from callbacks.items()
        return
    for one in callbacks:
        base = name = getattr(one, "class_name", "").rpartition(".")[2] or type(one).__name__
        number = 1
        while name in used:
            number += 1
            name = f"{base}_{number}"
        used.add(name)
        yield name, one
