"""Trains JAX and Flax models, linen and nnx, with one engine.

Subclass `TrainerModule` and define the loss, or use one of the other interfaces: `fit`, `train_fn`, `TrainLoop`. They
share one engine, in which a run is a pure `Program`, a `Plan` and a stream of events: an adapter creates the program
from a model and a loss, `compile_program` compiles it, and `run` executes it and notifies observers.

A name is imported when it is first used, so that importing one part does not load the others.
"""

import gc
import importlib.util
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from jax_trainer.diagnostics.optional_import import MOVED

# the one list of public names; `python scripts/write_stub.py` writes the same for type checkers
_EXPORTS = {
    "adapters": (
        "FunctionModel flax_state_program function_program linen_program nnx_program stateful_program write_back"
    ),
    "callbacks": "Callback LambdaCallback LogMetrics ProgressBar",
    "config.compilation_cache": "set_compilation_cache",
    "core": (
        "AlternatingOptimizer LoRA LogFreq LogMetricMode LogMode LossScale NonFiniteError Optimizers Precision Program "
        "RecompileError RecompileWarning Remat TrainState compile_program model_params scale_loss "
        "with_ema with_finite_guard"
    ),
    "datasets": (
        "ArrayLoader Batch CombinedLoader Data DataError DatasetConfig DatasetModule Position SupervisedBatch "
        "load_digits"
    ),
    "engine": (
        "Edit Every Plan Preflight StopTraining drive eval_events evaluate predictions preflight run train_events"
    ),
    "logger": "JsonlWriter Logger LoggerConfig MetricWriter",
    "runs.options": "Options",
    "runs.train_options": "TrainOptions",
    "sharding": "Layout Partitioning make_mesh",
    "styles": (
        "Checkpoint CheckpointFileReader CheckpointFileWriter EvalLoop EvalTask FitResult "
        "HighestCheckpointFileReader HighestCheckpointFileWriter LowestCheckpointFileReader "
        "LowestCheckpointFileWriter Summary SummaryLogger SummaryWriter TrainLoop TrainTask every_n_steps fit "
        "get_default_checkpointer get_ema_hook lr_find lr_schedule serial train_fn"
    ),
    "tools.exporting": "load_export",
    "tools.exporting.exporting": "export_run",
    "tools.pretrained": "export_adapter export_pretrained from_pretrained_config import_pretrained load_pretrained",
    "tools.tuning": "tune",
    "trainer": "EvalSet ImgClassifierTrainer TrainerConfig TrainerModule cross_validate",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_MODULES = {"nnx": "adapters.flax_nnx", "random": "core.random"}

# without `_MODULES`, which `from jax_trainer import *` would put in the place of flax's and Python's
__all__ = sorted([*_MODULE_OF, "__version__"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _MODULE_OF:
        value = getattr(_imported(f"jax_trainer.{_MODULE_OF[name]}"), name)
    elif name in _MODULES:
        value = _imported(f"jax_trainer.{_MODULES[name]}")
    elif name not in MOVED and not name.startswith("_") and importlib.util.find_spec(f"jax_trainer.{name}") is not None:
        return _imported(f"jax_trainer.{name}")
    else:
        moved = f" Use `{MOVED[name]}`." if name in MOVED else ""
        raise AttributeError(f"module 'jax_trainer' has no attribute {name!r}.{moved}")
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _imported(name: str) -> Any:
    """The module `name`; the time ledger counts the time of importing it."""
    started, collects = time.perf_counter(), gc.isenabled()
    gc.disable()  # all that is imported stays, and the collector would look through it again and again
    try:
        module = importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
    if (ledger := sys.modules.get("jax_trainer.diagnostics.ledger")) is not None:
        ledger.imported(time.perf_counter() - started)
    return module


def _version() -> str:
    try:
        return version("jax-trainer")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "0.0.0"
