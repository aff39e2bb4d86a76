"""Calls hooks by their parameter names, or by position, and validates them when a callback is created."""

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

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
FOREIGN = {  # names of our hooks in Lightning and Keras
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
# names that other libraries give to other values: never a name of the user's own
_FOREIGN_PARAMETERS = frozenset({"trainer", "pl_module", "outputs", "batch", "batch_idx", "logs"})


def call_hook(hook: Callable[..., Any], extra: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Calls `hook` with those of `arguments` that it has parameters for; `extra` is only passed by name."""
    return calling(hook, tuple(arguments), extra or {})(arguments)


def calling(
    hook: Callable[..., Any], known: Collection[str], extra: Mapping[str, Any] | None = None
) -> Callable[[Mapping[str, Any]], Any]:
    """A function that calls `hook` with values for the names `known`, for hooks that are called often."""
    extra = extra or {}
    names = _argument_names(hook, known, extra)
    if names is None:
        return lambda values: hook(*values.values())
    if names == {name: name for name in known}:
        return lambda values: hook(**values)
    return lambda values: hook(**{name: {**values, **extra}[source] for name, source in names.items()})


def _argument_names(hook: Callable[..., Any], known: Collection[str], extra: Collection[str]) -> dict[str, str] | None:
    """The name of the value for each parameter of `hook`; None: pass all of `known` by position."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except ValueError:  # a builtin without a signature
        return None
    if any(one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL) for one in parameters):
        return None
    named = [one for one in parameters if one.kind is not one.VAR_KEYWORD]
    source_of = lambda name: next((one for one in (*known, *extra) if name in (one, *_SYNONYMS.get(one, ()))), "")
    sources = {one.name: source_of(one.name.lstrip("_")) for one in named}
    unknown = [one.name for one in named if not sources[one.name] and one.default is one.empty]
    if unknown:
        by_position = [name for name, one in sources.items() if name in unknown or one in known]
        is_in_order = all(sources[name] in ("", one) for name, one in zip(by_position, known, strict=False))
        if len(by_position) != len(known) or not is_in_order or not _FOREIGN_PARAMETERS.isdisjoint(unknown):
            allowed = ", ".join(f"`{name}`" for name in (*known, *extra)) or "none"
            name = getattr(hook, "__qualname__", repr(hook))
            raise TypeError(
                f"The hook `{name}{inspect.signature(hook)}` has an unknown parameter `{unknown[0]}`. Its parameters "
                f"can be {allowed}, in any order; or have names of your own, all {len(known)} of them, in this order."
            )
        sources |= dict(zip(by_position, known, strict=True))
    found = {name: one for name, one in sources.items() if one}
    if len(named) < len(parameters):
        found |= {name: name for name in known if name not in found.values()}
    return found


def check_hooks(
    owner: Any, base: type, extra: Mapping[str, Collection[str]] | None = None, foreign: Mapping[str, str] | None = None
) -> None:
    """Raises a `TypeError` if `owner` has methods that look like hooks but are not, or unknown parameters.

    A method whose name almost matches one to override may be a helper of the user: it is warned of.

    Args:
        owner: an instance of a subclass of `base`.
        base: the class with all hooks.
        extra: additional parameters, by hook.
        foreign: method names of other libraries, and the equivalent here.
    """
    hooks, kind, equivalents = hooks_of(base), type(owner), {**FOREIGN, **(foreign or {})}
    ours = next(one for one in kind.__mro__ if one.__module__.startswith("jax_trainer."))
    can_be_overridden = [name for name in dir(ours) if not name.startswith("_") and callable(getattr(ours, name))]
    own = [name for name in dir(kind) if not hasattr(ours, name) and callable(inspect.getattr_static(kind, name))]
    for name in own:
        if (name.startswith("on_") or name in equivalents) and not hasattr(base, name):
            near = equivalents.get(name) or next(iter(difflib.get_close_matches(name, hooks, n=1, cutoff=0.75)), "")
            hint = f"Did you mean `{near}`?" if near else f"The hooks are {', '.join(sorted(hooks))}."
            if near in FOREIGN.values() and not hasattr(kind, near):
                hint = f"A `Callback` can have `{near}`."
            raise TypeError(f"`{kind.__name__}.{name}` is not a hook, and would never be called. {hint}")
    for name in own:
        if near := difflib.get_close_matches(name, can_be_overridden, n=1, cutoff=0.9):
            LOG.warning(f"`{kind.__name__}.{name}` is never called. Did you mean `{near[0]}`?")
    for name, known in hooks.items():
        calling(getattr(owner, name), known, dict.fromkeys((extra or {}).get(name, ())))


@cache
def hooks_of(base: type) -> dict[str, tuple[str, ...]]:
    """The hooks of a base class, with the names of their parameters."""
    names = [name for name in dir(base) if name.startswith("on_")]
    return {name: tuple(inspect.signature(getattr(base, name)).parameters)[1:] for name in names}
