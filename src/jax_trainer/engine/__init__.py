"""The training and evaluation loops: the plan, the events that the loops yield, predictions, and running observers.

The loops write no files and print nothing; side effects belong into observers of their events.
"""

from jax_trainer.engine.batches import sweep_batches
from jax_trainer.engine.drive import Driver, Observer, drive, driving, run
from jax_trainer.engine.evaluation import checked_evals, eval_events, evaluate, predicted_batches, predictions
from jax_trainer.engine.events import (
    Edit,
    Edited,
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalRoundEnd,
    EvalStart,
    EvalStep,
    Event,
    FitEnd,
    FitStart,
    Interruption,
    Notice,
    SavePoint,
    Status,
    StepEnd,
    StepMetrics,
    StopTraining,
    Waiting,
    is_by_ctrl_c,
)
from jax_trainer.engine.loop import train_events
from jax_trainer.engine.loop_state import LoopState
from jax_trainer.engine.plan import Every, Plan
from jax_trainer.engine.preflight import Preflight, precompile, preflight

__all__ = [
    "Driver",
    "Edit",
    "Edited",
    "EpochEnd",
    "EpochStart",
    "EvalEnd",
    "EvalRoundEnd",
    "EvalStart",
    "EvalStep",
    "Event",
    "Every",
    "FitEnd",
    "FitStart",
    "Interruption",
    "LoopState",
    "Notice",
    "Observer",
    "Plan",
    "Preflight",
    "SavePoint",
    "Status",
    "StepEnd",
    "StepMetrics",
    "StopTraining",
    "Waiting",
    "checked_evals",
    "drive",
    "driving",
    "eval_events",
    "evaluate",
    "is_by_ctrl_c",
    "precompile",
    "predicted_batches",
    "predictions",
    "preflight",
    "run",
    "sweep_batches",
    "train_events",
]
