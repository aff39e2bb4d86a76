"""Runs that write to a folder: its path, callbacks, resuming, the best weights, and reports of failures."""

from jax_trainer.runs.best import WEIGHTS, Best, KeptBest, Weights, best_in, select_weights, used_by_default
from jax_trainer.runs.callback_list import CallbackList, CallbacksLike, named_callbacks
from jax_trainer.runs.interrupted import interrupted, resumable_step
from jax_trainer.runs.nonfinite import FiniteEvaluations, explain_nonfinite
from jax_trainer.runs.target import (
    RunTarget,
    broadcast_from_primary,
    check_data_state,
    loop_state_of,
    record_mark,
    restore_run,
    resumable,
    run_and_step,
)

__all__ = [
    "WEIGHTS",
    "Best",
    "CallbackList",
    "CallbacksLike",
    "FiniteEvaluations",
    "KeptBest",
    "RunTarget",
    "Weights",
    "best_in",
    "broadcast_from_primary",
    "check_data_state",
    "explain_nonfinite",
    "interrupted",
    "loop_state_of",
    "named_callbacks",
    "record_mark",
    "restore_run",
    "resumable",
    "resumable_step",
    "run_and_step",
    "select_weights",
    "used_by_default",
]
