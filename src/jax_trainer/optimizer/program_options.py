"""`ProgramOptions`: what a program computes besides the loss and the update; the same for every style."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jax_trainer.core import (
    MeshLike,
    Precision,
    Program,
    with_ema,
    with_finite_check,
    with_finite_guard,
    with_statistics,
)
from jax_trainer.core.program import StepOptions
from jax_trainer.optimizer.reported import with_learning_rate

Guard = Literal["raise", "stop", "skip", "rollback"]
UNCHANGED = Precision()
_OF_THE_STEP = ("precision", "accumulate", "clip_norm", "intermediates")


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Options of a training program: `options=` of `fit`, `train_fn` and `TrainLoop`; keys of the `trainer:` section.

    Args:
        precision: "f32", "bf16" (compute in bf16, weights in f32), "bf16_full", or a `Precision`; default: unchanged.
        accumulate: number of micro-batches per batch for gradient accumulation.
        clip_norm: maximum global norm of the gradients; None: no clipping.
        ema: EMA decay of the weights; evaluation uses the averaged weights.
        log_norms: log the norms of gradients and parameters.
        param_stats: statistics to log of every parameter: min, max, mean, std, val.
        grad_stats: statistics to log of every gradient.
        intermediates: statistics to log of the values that a Flax model sows.
        log_learning_rate: log the learning rate of every step, if the optimizer state has it.
        on_nonfinite: what a non-finite loss or gradient does: "raise" (keep the weights before it, end with an error),
            "stop" (the same without the error), "skip" (skip the update), "rollback" (restore the latest checkpoint
            and skip the batch), "ignore", or None: a non-finite loss ends the run as soon as it is read, at no cost.
        watched: training metrics that must be finite, besides the gradients.
        max_skipped: end with an error after this many consecutive skipped updates.
        max_rollbacks: maximum number of rollbacks.
        mesh: a device mesh, its axis sizes, or a `Layout`; None: one device.
    """

    precision: str | Precision = UNCHANGED
    accumulate: int = 1
    clip_norm: float | None = None
    ema: float | None = None
    log_norms: bool = True
    param_stats: Sequence[str] = ()
    grad_stats: Sequence[str] = ()
    intermediates: Sequence[str] = ()
    log_learning_rate: bool = True
    on_nonfinite: Guard | Literal["ignore"] | None = None
    watched: Sequence[str] = ("loss",)
    max_skipped: int = 10
    max_rollbacks: int = 3
    mesh: MeshLike | None = None

    def __post_init__(self) -> None:
        allowed = (None, "raise", "stop", "skip", "rollback", "ignore")
        if self.on_nonfinite not in allowed:
            names = ", ".join(repr(name) for name in allowed)
            raise ValueError(f"`on_nonfinite` must be one of {names}, got {self.on_nonfinite!r}.")

    @property
    def guard(self) -> Guard | None:
        """What the guard inside the step does; None: there is none."""
        return None if self.on_nonfinite == "ignore" else self.on_nonfinite

    def step_options(self) -> StepOptions:
        """The options of an adapter: what belongs to the computation of the gradients."""
        return {
            "micro_batches": self.accumulate,
            "clip_norm": self.clip_norm,
            "precision": self.precision,
            "log_norms": self.log_norms,
            "intermediates": self.intermediates,
        }

    def wrap(self, program: Program, *, rate_freq: str = "any") -> Program:
        """`program` with everything that is added around its step: learning rate, EMA, statistics, guard or check."""
        if self.log_learning_rate:
            program = with_learning_rate(program, log_freq=rate_freq)
        if self.ema is not None:
            program = with_ema(program, self.ema)
        program = with_statistics(program, params=self.param_stats, grads=self.grad_stats)
        if self.guard is not None and not program.info.keeps_batches:  # a user's program may have its own guard
            limit = self.max_skipped if self.guard == "skip" else 0
            return with_finite_guard(program, max_consecutive=limit, watched=self.watched)
        return program if self.on_nonfinite == "ignore" or program.info.keeps_batches else with_finite_check(program)

    def check_for_program(self) -> None:
        """Refuses options that a complete `Program` has already decided."""
        default = ProgramOptions()
        for name in _OF_THE_STEP:
            if getattr(self, name) != getattr(default, name):
                raise TypeError(
                    f"`options.{name}` is {getattr(self, name)!r}, but a `Program` computes its own gradients. Pass it "
                    "to the function that makes the program (`linen_program`, `nnx_program`, …)."
                )
