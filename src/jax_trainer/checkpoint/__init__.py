"""Run folders and their checkpoints: valid names, locks, and checkpoints that are complete or absent.

`jax_trainer.checkpoint.store` has the `CheckpointStore`. Import it directly: it loads orbax, which takes a second, and
the run folder should exist before anything slow starts.
"""

from jax_trainer.checkpoint.folder import RunFolder, RunInUseError
from jax_trainer.diagnostics.files import safe_join

__all__ = ["RunFolder", "RunInUseError", "safe_join"]
