"""Small states and stores, for cases that need no run.

`python tests/scorecard/small_stores.py tests/scorecard/goldens/format4` writes a golden checkpoint of the
current format: later versions must still read it.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.core.state import new_state
from jax_trainer.datasets import Position

TX = optax.adam(1e-3)


def state_at(step: int, params: Any = None, tx: Any = TX) -> TrainState:
    """A state whose parameters encode its step."""
    params = {"dense": {"kernel": jnp.full((4, 3), float(step)), "bias": jnp.arange(3.0)}} if params is None else params
    state = new_state(params, {"batch_stats": {"mean": jnp.full(3, 0.5)}}, tx, jax.random.key(1))
    return state.replace(step=jnp.asarray(step, jnp.int32), extra={"ema": {"kernel": jnp.ones((2, 2), jnp.bfloat16)}})


def filled_store(folder: Path, steps: tuple[int, ...] = (5, 10, 15), **options: Any) -> CheckpointStore:
    """A store with checkpoints of these steps."""
    store = CheckpointStore(folder, **{"keep_latest": len(steps), **options})
    for step in steps:
        store.save(state_at(step), Position(1, step), {"loss": 1 / step}, callbacks={"stop": {"patience": step}})
    store.wait()
    return store


class LogCapture(logging.Handler):
    """Captures log messages and warnings of the library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    @property
    def text(self) -> str:
        """All messages, one per line."""
        return "\n".join(self.messages)


@contextmanager
def captured_log() -> Iterator[LogCapture]:
    """Captures log messages and Python warnings."""
    capture, log = LogCapture(), logging.getLogger("jax_trainer")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.addHandler(capture)
        try:
            yield capture
        finally:
            log.removeHandler(capture)
            capture.messages += [str(one.message) for one in caught]


def files_of(folder: Path) -> list[Path]:
    """All files below a folder."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tree_of(folder: Path) -> dict[str, bytes]:
    """The content of all files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_of(folder)}


if __name__ == "__main__":
    filled_store(Path(sys.argv[1]), (7,))
