"""Packages that are loaded when something asks for them, and not before."""

from types import ModuleType

_ALLOWED = ("orbax.checkpoint", "etils.epath", "tensorboardX", "wandb", "optuna", "matplotlib.figure", "PIL.Image")


def lazy_import(name: str, *, extra: str = "") -> ModuleType:
    """The package `name`, or one sentence that says which extra of `jax-trainer` brings it.

    An import at the top of a file would cost everybody the time (orbax takes half a second; tensorboardX imports torch
    where it is installed) and would make configurations that name a tool unreadable without it. Only the names listed
    here can be loaded.
    """
    if name not in _ALLOWED:
        raise ValueError(f"{name!r} is not one of the packages that are loaded late: {', '.join(_ALLOWED)}.")
    try:
        return __import__(name, fromlist=("",))  # with a list it gives the module itself, not its first parent
    except ModuleNotFoundError as missing:
        if missing.name != name or not extra:
            raise
        hint = f"{name} is not installed; run `pip install 'jax-trainer[{extra}]'`."
        raise ModuleNotFoundError(hint, name=name) from None
