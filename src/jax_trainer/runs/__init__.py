"""Runs: their one lifecycle, folder, callbacks, history, best weights, and reports of failures."""

# ruff: noqa: F401 - these are the names for other packages
import jax_trainer.sharding  # offers runs and stores what they need in a job of several processes
from jax_trainer.runs.assembling import assemble
from jax_trainer.runs.best import WEIGHTS, Best, KeptBest, Ranking, Weights, select_weights, used_by_default
from jax_trainer.runs.callback_list import CallbacksLike, attached, named_callbacks
from jax_trainer.runs.finding import OtherRunError, Recorded, Resume, find_target, recorded_facts, resuming
from jax_trainer.runs.fingerprint import Fingerprint
from jax_trainer.runs.history import (
    EVALUATIONS,
    Evaluation,
    EvaluationRecord,
    History,
    MetricDict,
    ResultDict,
    Validation,
    evaluation_record,
)
from jax_trainer.runs.run import Run, before_first_step
from jax_trainer.runs.spec import Recording, RunSpec
from jax_trainer.runs.target import RunTarget, loop_state_of, resumable_step, run_and_step
from jax_trainer.runs.time_report import TIMES, StartTime, TimeReport
