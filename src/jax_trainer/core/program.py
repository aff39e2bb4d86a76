"""`Program`: everything of a run that gets traced, and how a loss function becomes one."""

from collections.abc import Callable
from typing import NamedTuple, TypedDict, Unpack

import jax
import optax

from jax_trainer.core.accumulate import accumulate
from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.precision import Precision, cast_floats
from jax_trainer.core.rng import stream
from jax_trainer.core.rows import StepRows
from jax_trainer.core.state import TrainState, new_state
from jax_trainer.core.steps import EvalStep, LossFn, TrainStep, grad_of, in_precision, make_eval_step, make_train_step

InitVariables = Callable[[jax.Array, Batch], tuple[PyTree, PyTree]]
Check = Callable[[StepRows], None]


class Program(NamedTuple):
    """Everything that gets traced: make a state, advance it, judge it."""

    init: Callable[[jax.Array, Batch], TrainState]
    train_step: TrainStep
    eval_step: EvalStep
    checks: tuple[Check, ...] = ()  # look at what steps reported, on the host; one that raises ends the run
    init_is_traced: bool = True  # False when `init` hands out existing arrays: tracing would bake them into code


class StepOptions(TypedDict, total=False):
    """What every adapter passes on to `make_program`."""

    micro_batches: int
    clip_norm: float | None
    precision: str | Precision
    log_norms: bool
    init_is_traced: bool


def make_program(
    init_variables: InitVariables,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    **options: Unpack[StepOptions],
) -> Program:
    """A program out of `init_variables(key, batch) -> (params, model_state)`, a loss and an optimizer.

    Args:
        micro_batches: compute gradients in this many parts of the batch, one after the other.
        clip_norm: scale gradients down to this global norm; None leaves them.
        precision: "f32", "bf16", "bf16_full" or a `Precision`.
        log_norms: report the global norms of gradients (before clipping) and of parameters.
    """
    unknown = sorted(set(options) - set(StepOptions.__annotations__))
    if unknown:
        raise TypeError(f"No such option: {', '.join(unknown)}. There are {', '.join(StepOptions.__annotations__)}.")
    precision = Precision.named(options.get("precision", Precision()))
    clip_norm = options.get("clip_norm")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"`clip_norm` must be above 0, got {clip_norm}. Use None to leave gradients as they are.")
    if clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(clip_norm), tx)
    tx = optax.with_extra_args_support(tx)

    def init(key: jax.Array, batch: Batch) -> TrainState:
        params, model_state = init_variables(stream(key, "init"), batch)
        return new_state(cast_floats(params, precision.param), model_state, tx, key)

    cast_loss = in_precision(loss_fn, precision)
    grad_fn = accumulate(grad_of(cast_loss), options.get("micro_batches", 1))
    train_step = make_train_step(grad_fn, tx, log_norms=options.get("log_norms", True))
    return Program(init, train_step, make_eval_step(cast_loss), init_is_traced=options.get("init_is_traced", True))
