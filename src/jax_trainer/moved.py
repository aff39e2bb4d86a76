"""Modules and names of earlier packages that are elsewhere here: importing one is an error that says where.

They are those of `phlippe/jax_trainer`, `kpoeppel/jax_trainer` and `flax_extra`. There are no aliases: the names of the
documents are exported by the packages.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OWN_SHARDING = "Set `trainer.mesh`, or pass `mesh=`: batches, parameters and metrics are sharded by the library"
_OF_LOOPS = [f"{of}CheckpointFile{end}" for of in ("", "Highest", "Lowest") for end in ("Reader", "Writer")]
_OF_LOOPS += ["SummaryLogger", "SummaryWriter"]
MOVED = {
    "HigestCheckpointFileReader": "Import `HighestCheckpointFileReader` from `jax_trainer`",
    "callbacks.disable_gc": "Import `DisableGC` from `jax_trainer.callbacks`",
    "callbacks.profiler": "Import `JAXProfiler` from `jax_trainer.callbacks`",
    **{f"checkpoint.{name}": f"Import `{name}` from `jax_trainer`" for name in _OF_LOOPS},
    "datasets.collate": "Loaders of `jax_trainer.datasets` yield batches of numpy arrays; a torch loader needs none",
    "datasets.data_struct": "Import `Batch`, `DatasetModule` and `SupervisedBatch` from `jax_trainer.datasets`",
    "datasets.dataset_constructor": "Name the dataset in the section `dataset` of a file, or call its class",
    "datasets.multihost_dataloading": _OWN_SHARDING,
    "datasets.utils": "Use `ArrayLoader` and `DatasetModule` of `jax_trainer.datasets`",
    "evaluation": "Import `EvalLoop` and `EvalTask` from `jax_trainer`",
    "logger.array_storing": "Shapes of the example batch are stored with the run",
    "logger.backend": "Import `TensorboardToolLogger` or `WandBToolLogger` from `jax_trainer.logger`",
    "logger.enums": "Import `LogFreq`, `LogMetricMode` and `LogMode` from `jax_trainer.logger`",
    "logger.loggers": "Import `Logger` and `LoggerConfig` from `jax_trainer.logger`",
    "logger.metrics": "Return metrics from the loss; import `LogMetricMode` and others from `jax_trainer.logger`",
    "logger.utils": "Import `Logger` and `LoggerConfig` from `jax_trainer.logger`",
    "model": "Import `RNNLM` and other networks from `jax_trainer.models`",
    "nnx_dummy": "Import `nnx` from `flax`, or from `jax_trainer`",
    "optimizer.optimizer_constructor": "Import `AdamW`, `SGD` and others from `jax_trainer.optimizer`",
    "parallelism": _OWN_SHARDING,
    "sharding": _OWN_SHARDING,
    "training": "Import `TrainLoop` and `TrainTask` from `jax_trainer`",
    "utils": "A class is found by its `class_name` in a file, after `@register`; trees are those of `jax.tree`",
}


class _Moved:
    """Answers for a module, or a name imported from a package, that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package == "jax_trainer" and rest in MOVED:
            # without `name`: `from jax_trainer import utils` would replace an error that has it by one of Python
            raise ModuleNotFoundError(f"There is no {name!r}. {MOVED[rest]}.")
        return None


def explain_moved_modules() -> None:
    """Makes imports of the modules in `MOVED` say what to import instead."""
    if _Moved not in sys.meta_path:
        sys.meta_path.append(_Moved)
