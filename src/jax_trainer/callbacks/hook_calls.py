"""Hooks are called by the names of their parameters, and checked when the object that has them is made."""

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

LOG = logging.getLogger("jax_trainer")
_SYNONYMS = {
    "epoch": ("epoch_idx",),
    "epoch_idx": ("epoch",),
    "train_metrics": ("metrics",),
    "eval_metrics": ("metrics", "val_metrics"),
    "test_metrics": ("metrics",),
    "step_metrics": ("metrics",),
    "step_idx": ("step",),
}
FOREIGN = {  # what Lightning and Keras call our hooks
    **dict.fromkeys(("on_fit_start", "on_train_start", "on_train_begin"), "on_training_start"),
    **dict.fromkeys(("on_fit_end", "on_train_end"), "on_training_end"),
    **dict.fromkeys(("on_train_epoch_start", "on_epoch_start", "on_epoch_begin"), "on_training_epoch_start"),
    **dict.fromkeys(("on_train_epoch_end", "on_epoch_end", "training_epoch_end"), "on_training_epoch_end"),
    **dict.fromkeys(("on_train_batch_end", "on_batch_end"), "on_training_step"),
    "on_validation_start": "on_validation_epoch_start",
    **dict.fromkeys(("on_validation_end", "validation_epoch_end"), "on_validation_epoch_end"),
    **dict.fromkeys(("on_test_start", "on_test_begin"), "on_test_epoch_start"),
    **dict.fromkeys(("on_test_end", "test_epoch_end"), "on_test_epoch_end"),
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
}

_of_methods: "WeakKeyDictionary[Any, dict[Any, dict[str, str] | None]]" = WeakKeyDictionary()


def call_hook(hook: Callable[..., Any], extra: Mapping[str, Any] | None = None, **arguments: Any) -> None:
    """Calls `hook` with those of `arguments` that it names; with `extra` only what it asks for by name."""
    calling(hook, tuple(arguments), extra or {})(arguments)


def calling(
    hook: Callable[..., Any], known: Collection[str], extra: Mapping[str, Any] | None = None
) -> Callable[[Mapping[str, Any]], Any]:
    """How to call `hook` with values by the names `known`, for one that is called often."""
    extra = extra or {}
    names = _known_names(hook, tuple(known), tuple(extra))
    if names is None:
        return lambda values: hook(*values.values())
    if names == {name: name for name in known}:
        return lambda values: hook(**values)
    return lambda values: hook(**{name: {**values, **extra}[meant] for name, meant in names.items()})


def _known_names(hook: Callable[..., Any], known: tuple[str, ...], extra: tuple[str, ...]) -> dict[str, str] | None:
    """As `_asked_for`, which of a method is found out once: hooks are called at every event."""
    function = getattr(hook, "__func__", None)
    if function is None:
        return _asked_for(hook, known, extra)
    names = _of_methods.setdefault(function, {})
    if (known, extra) not in names:
        names[known, extra] = _asked_for(hook, known, extra)
    return names[known, extra]


def _asked_for(hook: Callable[..., Any], known: Collection[str], extra: Collection[str]) -> dict[str, str] | None:
    """What `hook` is to get for each of its parameters; None: all of `known`, in their order."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except ValueError:  # something built in, which does not tell
        return None
    if any(one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL) for one in parameters):
        return None
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    meant = {one.name: _meant(one.name, (*known, *extra)) for one in named}
    unknown = [one.name for one in named if not meant[one.name] and one.default is one.empty]
    if len(known) == len(unknown) == len(named) == 1:
        return None  # there is only one argument that it can mean
    if unknown:
        there = ", ".join(f"`{name}`" for name in (*known, *extra)) or "none"
        name = getattr(hook, "__qualname__", repr(hook))
        raise TypeError(
            f"The hook `{name}` has a parameter `{unknown[0]}` that nothing is known about. Its parameters can be "
            f"{there}, in any order."
        )
    found = {name: one for name, one in meant.items() if one}
    if len(named) < len(parameters):
        found |= {name: name for name in known if name not in found.values()}
    return found


def _meant(name: str, known: Iterable[str]) -> str:
    return next((one for one in known if name.lstrip("_") in (one, *_SYNONYMS.get(one, ()))), "")


def check_hooks(
    owner: Any,
    base: type,
    extra: Mapping[str, Collection[str]] | None = None,
    foreign: Mapping[str, str] | None = None,
) -> None:
    """Raises what is wrong with the hooks of `owner`: names that nobody calls, parameters that nobody passes.

    Args:
        owner: an object of a class that derives from `base`.
        base: has all hooks, with their parameters.
        extra: by hook, what can be asked for besides.
        foreign: other methods that nobody calls, and what does their work.
    """
    hooks, kind = hooks_of(base), type(owner)
    meant = {**FOREIGN, **(foreign or {})}
    for name in dir(kind):
        is_meant_to_be_called = name.startswith("on_") or name in meant
        if is_meant_to_be_called and not hasattr(base, name) and callable(inspect.getattr_static(kind, name)):
            raise TypeError(_nobody_calls(kind, name, base, meant.get(name, "")))
    _warn_of_near_misses(kind)
    for name, known in hooks.items():
        calling(getattr(owner, name), known, dict.fromkeys((extra or {}).get(name, ())))


def _warn_of_near_misses(kind: type) -> None:
    """Says where a method is spelt almost like one that could be overridden; it may be a helper of the user's."""
    ours = next(one for one in kind.__mro__ if one.__module__.startswith("jax_trainer."))
    can_be_overridden = [name for name in dir(ours) if not name.startswith("_") and callable(getattr(ours, name))]
    for name in sorted(set(dir(kind)) - set(dir(ours))):
        near = difflib.get_close_matches(name, can_be_overridden, n=1, cutoff=0.9)
        if near and callable(inspect.getattr_static(kind, name)):
            LOG.warning(f"`{kind.__name__}.{name}` is called by nothing here. Did you mean `{near[0]}`?")


@cache
def hooks_of(base: type) -> dict[str, tuple[str, ...]]:
    """The hooks of a base class, each with the names of its parameters."""
    names = [name for name in dir(base) if name.startswith("on_")]
    return {name: tuple(inspect.signature(getattr(base, name)).parameters)[1:] for name in names}


def _nobody_calls(kind: type, name: str, base: type, meant: str) -> str:
    hooks = hooks_of(base)
    near = meant or next(iter(difflib.get_close_matches(name, hooks, n=1, cutoff=0.75)), "")
    cure = f"Did you mean `{near}`?" if near else f"The hooks are {', '.join(sorted(hooks))}."
    if near in FOREIGN.values() and not hasattr(kind, near):
        cure = f"A `Callback` can have `{near}`."
    return f"`{kind.__name__}.{name}` is no hook, and would never be called. {cure}"
