"""Whether there will be a place to save to, found out before the first step."""

import logging
import os
import stat
from pathlib import Path

from jax_trainer.checkpoint.disk import free_bytes
from jax_trainer.checkpoint.durable import write_atomically
from jax_trainer.checkpoint.failures import readable
from jax_trainer.checkpoint.partial import partial_folder, sweep
from jax_trainer.checkpoint.record import CheckpointError

_BESIDES = 1 << 16  # bytes that a checkpoint has besides its arrays
_log = logging.getLogger("jax_trainer")


def make_ready(folder: Path, array_bytes: int) -> None:
    """Makes `folder`, and fails unless a checkpoint with `array_bytes` of arrays can be written to it."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, and no folder for checkpoints. Choose another place.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sweep(folder)
        with partial_folder(folder) as partial:
            write_atomically(partial / "probe", "x")
    except OSError as error:
        raise CheckpointError(
            f"No checkpoint can be written to {folder}: {error.strerror}. Choose a place that can be written to."
        ) from error
    _check_space(folder, array_bytes + _BESIDES)
    if os.stat(folder).st_mode & stat.S_IWOTH:
        _log.warning("Everybody may write to %s: whoever changes a checkpoint there changes what is restored.", folder)


def _check_space(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if free < needed:
        raise CheckpointError(
            f"There is no room for a checkpoint in {folder}: one needs about {readable(needed)}, and {readable(free)} "
            "are free. Make room, or choose another place."
        )
