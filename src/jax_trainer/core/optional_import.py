"""Lazy imports of optional packages."""

from types import ModuleType

_ALLOWED = ("orbax.checkpoint", "etils.epath", "tensorboardX", "wandb", "optuna", "matplotlib.figure", "PIL.Image")


def lazy_import(name: str, *, extra: str = "") -> ModuleType:
    """The package `name`; if it is missing, the error names the extra of `jax-trainer` that installs it.

    An import at the top of a file would slow down every start (orbax takes half a second; tensorboardX imports torch if
    installed) and make configurations that name a tool unreadable without it. Only the names in `_ALLOWED` can be
    loaded.
    """
    if name not in _ALLOWED:
        raise ValueError(f"{name!r} is not one of the lazily imported packages: {', '.join(_ALLOWED)}.")
    try:
        return __import__(name, fromlist=("",))  # with a list it returns the module itself, not its top-level package
    except ModuleNotFoundError as missing:
        if missing.name != name or not extra:
            raise
        hint = f"{name} is not installed; run `pip install 'jax-trainer[{extra}]'`."
        raise ModuleNotFoundError(hint, name=name) from None
