"""Modules and names of earlier packages that are elsewhere here: importing one is an error that says where.

They are those of `phlippe/jax_trainer`, `kpoeppel/jax_trainer` and `flax_extra`. There are no aliases: the names of the
documents are exported by the packages.
"""

import sys
from typing import Any

MOVED = {
    "HigestCheckpointFileReader": "jax_trainer.HighestCheckpointFileReader",
    "callbacks.disable_gc": "jax_trainer.callbacks",
    "callbacks.profiler": "jax_trainer.callbacks",
    "checkpoint.CheckpointFileReader": "jax_trainer.CheckpointFileReader",
    "checkpoint.CheckpointFileWriter": "jax_trainer.CheckpointFileWriter",
    "checkpoint.HigestCheckpointFileReader": "jax_trainer.HighestCheckpointFileReader",
    "checkpoint.HighestCheckpointFileReader": "jax_trainer.HighestCheckpointFileReader",
    "checkpoint.HighestCheckpointFileWriter": "jax_trainer.HighestCheckpointFileWriter",
    "checkpoint.LowestCheckpointFileReader": "jax_trainer.LowestCheckpointFileReader",
    "checkpoint.LowestCheckpointFileWriter": "jax_trainer.LowestCheckpointFileWriter",
    "checkpoint.SummaryLogger": "jax_trainer.SummaryLogger",
    "checkpoint.SummaryWriter": "jax_trainer.SummaryWriter",
    "datasets.data_struct": "jax_trainer.datasets",
    "evaluation": "jax_trainer",
    "init_mesh": "jax_trainer.sharding",
    "interfaces": "jax_trainer.adapters",
    "logger.backend": "jax_trainer.logger",
    "logger.enums": "jax_trainer.logger",
    "logger.loggers": "jax_trainer.logger",
    "logger.metrics": "jax_trainer.logger",
    "model": "jax_trainer.models",
    "nnx_dummy": "jax_trainer",
    "random": "jax_trainer.core.random",
    "training": "jax_trainer",
}


class _Moved:
    """Answers for a module, or a name imported from a package, that no other finder has found."""

    @staticmethod
    def find_spec(name: str, *path_and_target: Any) -> None:
        package, _, rest = name.partition(".")
        if package == "jax_trainer" and rest in MOVED:
            # without `name`: `from jax_trainer import training` would replace an error that has it by one of Python
            raise ModuleNotFoundError(f"There is no {name!r}. Use `{MOVED[rest]}`.")


sys.meta_path.append(_Moved)
