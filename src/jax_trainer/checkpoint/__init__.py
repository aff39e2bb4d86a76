"""The run folder and what is kept in it: the names that are allowed, and checkpoints that are whole or not there.

`jax_trainer.checkpoint.store` has the `CheckpointStore`. It is imported by itself, because orbax takes a second to
load, and a folder should be there before anything slow begins.
"""

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.lock import RunInUseError
from jax_trainer.checkpoint.names import safe_join

__all__ = ["RunFolder", "RunInUseError", "safe_join"]
