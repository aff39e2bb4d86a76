"""Who watches a run: in which order they are told, and what they remember over an interruption."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig, ModelCheckpoint
from jax_trainer.checkpoint.record import SavedCheckpoint, damage
from jax_trainer.config import config_from
from jax_trainer.core import class_of
from jax_trainer.settings import Settings

CallbackLike = Callback | CallbackConfig | Mapping[str, Any] | None
CallbacksLike = Sequence[Callback | CallbackConfig] | Mapping[str, CallbackLike]


class CallbackList:
    """Everybody who is told of a run. Who saves is told last, and saves what the others have learnt.

    Args:
        callbacks: by name.
        records: others that have something to remember (`state_dict`), by names that no callback has.
    """

    def __init__(self, callbacks: Mapping[str, Callback], records: Mapping[str, Any]) -> None:
        self.callbacks, self.records = callbacks, records

    def observers(self, first: Iterable[Any] = (), more: Iterable[Any] = ()) -> list[Any]:
        """In the order in which they are told: `first`, records, `more`, callbacks, and those that save."""
        savers = [one for one in self.callbacks.values() if isinstance(one, ModelCheckpoint)]
        others = [one for one in self.callbacks.values() if not isinstance(one, ModelCheckpoint)]
        return [*first, *self.records.values(), *more, *others, *savers]

    def states(self) -> dict[str, Any]:
        """What everybody must know to go on; nothing of those that need nothing."""
        states = {name: one.state_dict() for name, one in self._stateful.items()}
        return {name: state for name, state in states.items() if state}

    def load_states(self, saved: SavedCheckpoint) -> None:
        """Everybody goes on with what they knew at a checkpoint."""
        for name, one in self._stateful.items():
            if name in saved.callbacks:
                with damage(saved.path, f"the state of {name}"):
                    one.load_state_dict(saved.callbacks[name])

    @property
    def _stateful(self) -> dict[str, Any]:
        return {**self.callbacks, **self.records}


def named_callbacks(given: CallbacksLike | Callback | CallbackConfig, taken: Iterable[str] = ()) -> dict[str, Any]:
    """Callbacks, or configurations of them, by name: that of their class, with a number where it is taken.

    Under a name, the keys of a configuration may stand as in a file: `{"EarlyStopping": {"monitor": "val/acc"}}`.
    """
    given = [given] if isinstance(given, Callback | CallbackConfig) else given
    named = dict(_named(given, set(taken)))
    written = {name: one for name, one in named.items() if one is None or isinstance(one, Mapping)}
    named |= config_from({"callbacks": written}, _Callbacks).callbacks
    for name, one in named.items():
        if not isinstance(one, Callback | CallbackConfig):
            raise TypeError(f"The callback {name!r} is {_what_it_is(one)}")
        if isinstance(one, Callback) and "config" not in vars(one):
            kind = type(one).__name__
            raise TypeError(f"`{kind}.__init__` does not call `super().__init__()`. Call it before anything else.")
    return named


def _what_it_is(given: Any) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}. Pass an object: `{given.__name__}(…)`."
    if isinstance(given, str):
        return f"{given!r}, a text. Pass an object, or names with their keys: `callbacks={{{given!r}: {{}}}}`."
    if inspect.isfunction(given):
        return "a function. Say when it is called: `LambdaCallback(on_validation_epoch_end=…)`."
    return f"a {class_of(given)}. Derive its class from `jax_trainer.Callback`, or pass a configuration of a callback."


@dataclass
class _Callbacks(Settings):
    callbacks: dict[str, Callback.cfgtype]


def _named(given: CallbacksLike, taken: set[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(given, Mapping):
        yield from given.items()
        return
    for one in given:
        base = name = getattr(one, "class_name", "").rpartition(".")[2] or type(one).__name__
        number = 1
        while name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        yield name, one
