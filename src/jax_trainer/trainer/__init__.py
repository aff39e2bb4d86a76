"""`TrainerModule`, the Lightning-like API: a subclass defines the loss, configurations the rest."""

from jax_trainer.core import TrainState
from jax_trainer.trainer.base import BaseTrainer
from jax_trainer.trainer.config import TrainerConfig
from jax_trainer.trainer.cross_validation import CrossValidation, FoldResult, cross_validate
from jax_trainer.trainer.dry_run import DryRun
from jax_trainer.trainer.eval_sets import EvalSet, EvalSetConfig
from jax_trainer.trainer.experiment import Experiment, StoredRun, build, load_experiment, stored_run
from jax_trainer.trainer.generative_model import (
    GANTrainer,
    GANTrainerConfig,
    GenerativeTrainer,
    GenerativeTrainerConfig,
)
from jax_trainer.trainer.img_classifier import (
    AugmentedImgClassifierTrainer,
    AugmentedImgClassifierTrainerConfig,
    CropAndFlip,
    CropAndFlipConfig,
    ImgClassifierTrainer,
    ImgClassifierTrainerConfig,
)
from jax_trainer.trainer.language_model import LanguageModelTrainer, LanguageModelTrainerConfig
from jax_trainer.trainer.trainer import TrainerModule
from jax_trainer.trainer.training import TrainResults, Validation

__all__ = [
    "AugmentedImgClassifierTrainer",
    "AugmentedImgClassifierTrainerConfig",
    "BaseTrainer",
    "CropAndFlip",
    "CropAndFlipConfig",
    "CrossValidation",
    "DryRun",
    "EvalSet",
    "EvalSetConfig",
    "Experiment",
    "FoldResult",
    "GANTrainer",
    "GANTrainerConfig",
    "GenerativeTrainer",
    "GenerativeTrainerConfig",
    "ImgClassifierTrainer",
    "ImgClassifierTrainerConfig",
    "LanguageModelTrainer",
    "LanguageModelTrainerConfig",
    "StoredRun",
    "TrainResults",
    "TrainState",
    "TrainerConfig",
    "TrainerModule",
    "Validation",
    "build",
    "cross_validate",
    "load_experiment",
    "stored_run",
]
