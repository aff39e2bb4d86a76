"""`ProgramOptions`: what a program computes besides the loss and the update; the same for every style."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from jax_trainer.core.by_epoch import Count, schedule_of
from jax_trainer.core.extra_args import freezes_of
from jax_trainer.core.lora import LoRA
from jax_trainer.core.precision import Precision
from jax_trainer.core.program import Program, StepOptions
from jax_trainer.core.remat import Remat
from jax_trainer.core.wrappers import with_ema, with_finite_check, with_finite_guard, with_frozen_stats, with_statistics
from jax_trainer.diagnostics.leaves import parameter_paths
from jax_trainer.sharding.layout import MeshLike

Guard = Literal["raise", "stop", "skip", "rollback"]
UNCHANGED = Precision()
# part of the computation of the gradients
OF_THE_STEP = ("precision", "accumulate", "clip_norm", "clip_adaptive", "remat", "losses", "lora")


@dataclass(frozen=True, kw_only=True)
class ProgramOptions:
    """Options of a training program: `options=` of `fit`, `train_fn` and `TrainLoop`; keys of the `trainer:` section.

    Args:
        precision: "f32", "bf16" (compute in bf16, weights in f32), "bf16_full", "f16" (compute in f16 with a dynamic
            loss scale, weights in f32), or a `Precision`; default: unchanged.
        accumulate: number of micro-batches per batch for gradient accumulation; or several, by the number of complete
            epochs after which each is used: `{0: 1, 5: 4}`.
        clip_norm: maximum global norm of the gradients; None: no clipping.
        clip_adaptive: maximum norm of the gradient of each unit (column of a kernel, vector), relative to that of its
            weights: adaptive gradient clipping; None: no clipping.
        remat: modules whose activations are computed again in the backward pass, to save memory; None: none.
        ema: EMA decay of the weights; evaluation uses the averaged weights.
        log_norms: log the norms of gradients and parameters.
        param_stats: statistics to log of every parameter: min, max, mean, std, val.
        grad_stats: statistics to log of every gradient.
        log_learning_rate: log the learning rate of every step, if the optimizer state has it.
        on_nonfinite: what a non-finite loss or gradient does: "raise" (keep the weights before it, end with an error),
            "stop" (the same without the error), "skip" (skip the update), "rollback" (restore the latest checkpoint
            and skip the batch), "ignore", or None: a non-finite loss ends the run as soon as it is read, at no cost.
        watched: training metrics that must be finite, besides the gradients.
        max_skipped: end with an error after this many consecutive skipped updates.
        max_rollbacks: maximum number of rollbacks.
        mesh: a device mesh, its axis sizes, or a `Layout`; None: one device.
        losses: weights of the losses that the loss function returns by name: numbers, functions of the step, or
            configurations of schedules; None: all are 1.
        lora: train low-rank adapters of some parameters, and freeze all parameters; None: train all.
    """

    precision: str | Precision = UNCHANGED
    accumulate: Count = 1
    clip_norm: float | None = None
    clip_adaptive: float | None = None
    remat: Remat | None = None
    ema: float | None = None
    log_norms: bool = True
    param_stats: Sequence[str] = ()
    grad_stats: Sequence[str] = ()
    log_learning_rate: bool = True
    on_nonfinite: Guard | Literal["ignore"] | None = None
    watched: Sequence[str] = ("loss",)
    max_skipped: int = 10
    max_rollbacks: int = 3
    mesh: MeshLike | None = None
    losses: Mapping[str, Any] | None = None
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        allowed = (None, "raise", "stop", "skip", "rollback", "ignore")
        if self.on_nonfinite not in allowed:
            names = ", ".join(repr(name) for name in allowed)
            raise ValueError(f"`on_nonfinite` must be one of {names}, got {self.on_nonfinite!r}.")
        schedule_of(self.accumulate)  # raises if it is not one
        if self.remat is not None and not isinstance(self.remat, Remat):
            raise TypeError(f"`remat` must be a `Remat`, such as `Remat('.*block.*')`, got {self.remat!r}.")
        if self.lora is not None and not isinstance(self.lora, LoRA):
            raise TypeError(f"`lora` must be a `LoRA`, such as `LoRA('.*kernel', rank=8)`, got {self.lora!r}.")

    @property
    def guard(self) -> Guard | None:
        """What the guard inside the step does; None: there is none."""
        return None if self.on_nonfinite == "ignore" else self.on_nonfinite

    def step_options(self) -> StepOptions:
        """The options of an adapter: what belongs to the computation of the gradients."""
        return {
            "micro_batches": self.accumulate,
            "clip_norm": self.clip_norm,
            "clip_adaptive": self.clip_adaptive,
            "remat": self.remat,
            "precision": self.precision,
            "log_norms": self.log_norms,
            "losses": self.losses,
            "lora": self.lora,
        }

    def wrap(self, program: Program) -> Program:
        """`program` with what is added around its step: EMA, statistics, a guard or a check of finite values.

        A user's program may have its own guard, which stays.
        """
        freezes = None if program.info.tx is None else freezes_of(program.info.tx)
        if self.lora is not None and not self.lora.train_bn:
            program = with_frozen_stats(program, self.lora.trains)
        elif freezes is not None:
            trains = lambda state: {path: not freezes.statistics(path) for path in parameter_paths(state.params)}
            program = with_frozen_stats(program, trains)
        if self.ema is not None:
            program = with_ema(program, self.ema)
        program = with_statistics(program, params=self.param_stats, grads=self.grad_stats)
        if program.info.keeps_batches or self.on_nonfinite == "ignore":
            return program
        if self.guard is None:
            return with_finite_check(program)
        limit = self.max_skipped if self.guard == "skip" else 0
        return with_finite_guard(program, max_consecutive=limit, watched=self.watched)

    def changed(self, names: Collection[str] = ()) -> dict[str, Any]:
        """The options that differ from their defaults, by name; only those of `names`, if any."""
        default = ProgramOptions()
        chosen = [one.name for one in fields(self) if not names or one.name in names]
        return {name: getattr(self, name) for name in chosen if getattr(self, name) != getattr(default, name)}

    def described(self) -> dict[str, Any]:
        """The options that differ from their defaults, as plain data, without the mesh."""
        found = {name: value for name, value in self.changed().items() if name != "mesh"}
        return {name: _plain(value) for name, value in found.items()}

    @classmethod
    def of(
        cls, options: "ProgramOptions | None", *, detect_nans: bool, mesh: MeshLike | None, policies: Collection[str]
    ) -> "ProgramOptions":
        """`options` with the arguments `detect_nans` and `mesh` of a style, of which only one may be set.

        Args:
            options: as the user passed them.
            detect_nans: short for `on_nonfinite="raise"`.
            mesh: the device mesh.
            policies: the values of `on_nonfinite` that the style supports, besides "ignore".
        """
        found = ProgramOptions() if options is None else options
        if not isinstance(found, ProgramOptions):
            raise TypeError(f"`options` must be a ProgramOptions, got a {type(found).__name__}.")
        if detect_nans and found.on_nonfinite not in (None, "raise"):
            raise ValueError(
                f"`detect_nans=True` means `on_nonfinite='raise'`, but `options` has {found.on_nonfinite!r}. Leave out "
                "one of them."
            )
        if mesh is not None and found.mesh is not None:
            raise ValueError("`mesh` is set as an argument and in `options`. Leave out one of them.")
        if found.guard not in (None, *policies):
            names = ", ".join(repr(name) for name in policies)
            raise ValueError(
                f"`on_nonfinite={found.on_nonfinite!r}` needs a run folder with checkpoints. Here it may be {names}, "
                "'ignore' or None; `fit` and `TrainerModule` support all values."
            )
        guard = {"on_nonfinite": "raise"} if detect_nans else {}
        return replace(found, mesh=found.mesh if mesh is None else mesh, **guard)


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    if isinstance(value, LoRA | Remat):
        value = {name: one for name, one in vars(value).items() if one is not None}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if callable(value):  # a schedule: its `repr` has an address
        return getattr(value, "__qualname__", type(value).__name__)
    return value if isinstance(value, str | int | float) else repr(value)
