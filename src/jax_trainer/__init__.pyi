"""What type checkers read of `__init__.py`; written by `scripts/write_stub.py`."""

from jax_trainer.adapters import flax_nnx
from jax_trainer.core import random as core_random
from jax_trainer.core import AlternatingOptimizer
from jax_trainer.datasets import ArrayLoader
from jax_trainer.datasets import Batch
from jax_trainer.callbacks import Callback
from jax_trainer.styles import Checkpoint
from jax_trainer.styles import CheckpointFileReader
from jax_trainer.styles import CheckpointFileWriter
from jax_trainer.datasets import CombinedLoader
from jax_trainer.datasets import Data
from jax_trainer.datasets import DataError
from jax_trainer.datasets import DatasetConfig
from jax_trainer.datasets import DatasetModule
from jax_trainer.engine import Edit
from jax_trainer.styles import EvalLoop
from jax_trainer.trainer import EvalSet
from jax_trainer.styles import EvalTask
from jax_trainer.engine import Every
from jax_trainer.styles import FitResult
from jax_trainer.adapters import FunctionModel
from jax_trainer.styles import HighestCheckpointFileReader
from jax_trainer.styles import HighestCheckpointFileWriter
from jax_trainer.trainer import ImgClassifierTrainer
from jax_trainer.logger import JsonlWriter
from jax_trainer.callbacks import LambdaCallback
from jax_trainer.sharding import Layout
from jax_trainer.core import LoRA
from jax_trainer.core import LogFreq
from jax_trainer.core import LogMetricMode
from jax_trainer.callbacks import LogMetrics
from jax_trainer.core import LogMode
from jax_trainer.logger import Logger
from jax_trainer.logger import LoggerConfig
from jax_trainer.core import LossScale
from jax_trainer.styles import LowestCheckpointFileReader
from jax_trainer.styles import LowestCheckpointFileWriter
from jax_trainer.logger import MetricWriter
from jax_trainer.core import NonFiniteError
from jax_trainer.core import Optimizers
from jax_trainer.sharding import Partitioning
from jax_trainer.engine import Plan
from jax_trainer.datasets import Position
from jax_trainer.core import Precision
from jax_trainer.engine import Preflight
from jax_trainer.core import Program
from jax_trainer.core import ProgramOptions
from jax_trainer.callbacks import ProgressBar
from jax_trainer.core import RecompileError
from jax_trainer.core import RecompileWarning
from jax_trainer.core import Remat
from jax_trainer.engine import StopTraining
from jax_trainer.styles import Summary
from jax_trainer.styles import SummaryLogger
from jax_trainer.styles import SummaryWriter
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.styles import TrainLoop
from jax_trainer.core import TrainState
from jax_trainer.styles import TrainTask
from jax_trainer.trainer import TrainerConfig
from jax_trainer.trainer import TrainerModule
from jax_trainer.core import compile_program
from jax_trainer.trainer import cross_validate
from jax_trainer.engine import drive
from jax_trainer.engine import eval_events
from jax_trainer.engine import evaluate
from jax_trainer.styles import every_n_steps
from jax_trainer.tools.pretrained import export_adapter
from jax_trainer.tools.pretrained import export_pretrained
from jax_trainer.tools.exporting.exporting import export_run
from jax_trainer.styles import fit
from jax_trainer.adapters import flax_state_program
from jax_trainer.tools.pretrained import from_pretrained_config
from jax_trainer.adapters import function_program
from jax_trainer.styles import get_default_checkpointer
from jax_trainer.styles import get_ema_hook
from jax_trainer.tools.pretrained import import_pretrained
from jax_trainer.adapters import linen_program
from jax_trainer.datasets import load_digits
from jax_trainer.tools.exporting import load_export
from jax_trainer.tools.pretrained import load_pretrained
from jax_trainer.styles import lr_find
from jax_trainer.styles import lr_schedule
from jax_trainer.sharding import make_mesh
from jax_trainer.core import model_params
from jax_trainer.adapters import nnx_program
from jax_trainer.engine import predictions
from jax_trainer.engine import preflight
from jax_trainer.engine import run
from jax_trainer.core import scale_loss
from jax_trainer.styles import serial
from jax_trainer.config.compilation_cache import set_compilation_cache
from jax_trainer.adapters import stateful_program
from jax_trainer.engine import train_events
from jax_trainer.styles import train_fn
from jax_trainer.tools.tuning import tune
from jax_trainer.core import with_ema
from jax_trainer.core import with_finite_guard
from jax_trainer.adapters import write_back

__version__: str

nnx = flax_nnx
random = core_random

__all__ = ['AlternatingOptimizer', 'ArrayLoader', 'Batch', 'Callback', 'Checkpoint', 'CheckpointFileReader', 'CheckpointFileWriter', 'CombinedLoader', 'Data', 'DataError', 'DatasetConfig', 'DatasetModule', 'Edit', 'EvalLoop', 'EvalSet', 'EvalTask', 'Every', 'FitResult', 'FunctionModel', 'HighestCheckpointFileReader', 'HighestCheckpointFileWriter', 'ImgClassifierTrainer', 'JsonlWriter', 'LambdaCallback', 'Layout', 'LoRA', 'LogFreq', 'LogMetricMode', 'LogMetrics', 'LogMode', 'Logger', 'LoggerConfig', 'LossScale', 'LowestCheckpointFileReader', 'LowestCheckpointFileWriter', 'MetricWriter', 'NonFiniteError', 'Optimizers', 'Partitioning', 'Plan', 'Position', 'Precision', 'Preflight', 'Program', 'ProgramOptions', 'ProgressBar', 'RecompileError', 'RecompileWarning', 'Remat', 'StopTraining', 'Summary', 'SummaryLogger', 'SummaryWriter', 'SupervisedBatch', 'TrainLoop', 'TrainState', 'TrainTask', 'TrainerConfig', 'TrainerModule', '__version__', 'compile_program', 'cross_validate', 'drive', 'eval_events', 'evaluate', 'every_n_steps', 'export_adapter', 'export_pretrained', 'export_run', 'fit', 'flax_state_program', 'from_pretrained_config', 'function_program', 'get_default_checkpointer', 'get_ema_hook', 'import_pretrained', 'linen_program', 'load_digits', 'load_export', 'load_pretrained', 'lr_find', 'lr_schedule', 'make_mesh', 'model_params', 'nnx_program', 'predictions', 'preflight', 'run', 'scale_loss', 'serial', 'set_compilation_cache', 'stateful_program', 'train_events', 'train_fn', 'tune', 'with_ema', 'with_finite_guard', 'write_back']
