"""A run that writes to a folder: where that is, who watches, what it goes on from, and what is kept when it fails."""

from jax_trainer.runs.best import WEIGHTS, Best, KeptBest, Weights, kept_in, used_by_default, weights_of
from jax_trainer.runs.interrupted import interrupted, resumable_step
from jax_trainer.runs.nonfinite import WatchedEvaluations, explained
from jax_trainer.runs.place import Place, agreed, record_mark, restored, resumable, run_and_step, standing_of
from jax_trainer.runs.watching import Given, Watching, named_callbacks

__all__ = [
    "WEIGHTS",
    "Best",
    "Given",
    "KeptBest",
    "Place",
    "WatchedEvaluations",
    "Watching",
    "Weights",
    "agreed",
    "explained",
    "interrupted",
    "kept_in",
    "named_callbacks",
    "record_mark",
    "restored",
    "resumable",
    "resumable_step",
    "run_and_step",
    "standing_of",
    "used_by_default",
    "weights_of",
]
