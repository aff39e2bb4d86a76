"""Checks before the first step that checkpoints can be written: permissions and free space."""

import logging
import os
import stat
from pathlib import Path

from jax_trainer.checkpoint.disk import free_bytes
from jax_trainer.checkpoint.durable import write_atomically
from jax_trainer.checkpoint.failures import readable
from jax_trainer.checkpoint.partial import partial_folder, sweep
from jax_trainer.checkpoint.record import CheckpointError

_OVERHEAD = 1 << 16  # bytes of a checkpoint besides its arrays
_log = logging.getLogger("jax_trainer")


def check_writable(folder: Path, array_bytes: int) -> None:
    """Creates `folder`, and fails unless a checkpoint with `array_bytes` of arrays can be written to it."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder for checkpoints. Choose another path.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(folder)
        with partial_folder(folder) as partial:
            write_atomically(partial / "probe", "x")
    except OSError as error:
        raise CheckpointError(
            f"Checkpoints cannot be written to {folder}: {error.strerror}. Choose a writable path."
        ) from error
    _check_space(folder, array_bytes + _OVERHEAD)
    if os.stat(folder).st_mode & stat.S_IWOTH:
        _log.warning("%s is world-writable: anyone can alter your checkpoints.", folder)


def _check_space(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"Not enough space for a checkpoint in {folder}: it needs about {readable(needed)}, and {readable(free)} "
            "are free. Free some space, or choose another path."
        )
