"""What cannot be imported, with an error that says what to do: optional packages, and modules of earlier packages.

`MOVED` are modules and names of `phlippe/jax_trainer`, `kpoeppel/jax_trainer` and `flax_extra` that are elsewhere here.
There are no aliases: the names of the documents are exported by the packages.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

_OF_CHECKPOINTS = (
    *(f"{which}CheckpointFile{kind}" for which in ("", "Highest", "Lowest") for kind in ("Reader", "Writer")),
    *("SummaryLogger", "SummaryWriter"),
)
MOVED = {
    **{f"checkpoint.{name}": f"jax_trainer.{name}" for name in _OF_CHECKPOINTS},
    **dict.fromkeys(
        ("HigestCheckpointFileReader", "checkpoint.HigestCheckpointFileReader"),
        "jax_trainer.HighestCheckpointFileReader",
    ),
    **dict.fromkeys(("callbacks.disable_gc", "callbacks.profiler"), "jax_trainer.callbacks"),
    **{f"logger.{name}": "jax_trainer.logger" for name in ("backend", "enums", "loggers", "metrics")},
    **dict.fromkeys(("evaluation", "nnx_dummy", "training"), "jax_trainer"),
    "datasets.data_struct": "jax_trainer.datasets",
    "init_mesh": "jax_trainer.sharding",
    "interfaces": "jax_trainer.adapters",
    "model": "jax_trainer.models",
    "random": "jax_trainer.core.random",
}


class MissingExtraError(ModuleNotFoundError):
    """An optional package is not installed; the message names the extra of this library that installs it."""


@contextmanager
def from_extra(extra: str) -> Iterator[None]:
    """Around the import of an optional package: if it is missing, the error names the extra that installs it."""
    try:
        yield
    except ModuleNotFoundError as missing:
        hint = f"{missing.name} is not installed; run `pip install 'jax-trainer[{extra}]'`."
        raise MissingExtraError(hint, name=missing.name) from None


def require_extra(package: str, extra: str) -> None:
    """Raises `ModuleNotFoundError` if an optional package is missing, without importing it."""
    with from_extra(extra):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)


class _Moved:
    """Answers for a module, or a name imported from a package, that no other finder has found."""

    @staticmethod
    def find_spec(name: str, *path_and_target: Any) -> None:
        package, _, rest = name.partition(".")
        if package == "jax_trainer" and rest in MOVED:
            # without `name`: `from jax_trainer import training` would replace an error that has it by one of Python
            raise ModuleNotFoundError(f"There is no {name!r}. Use `{MOVED[rest]}`.")


sys.meta_path.append(_Moved)
