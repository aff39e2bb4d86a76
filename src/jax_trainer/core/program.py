"""`Program`: the traced functions of a run, and how to make one from a loss function."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import optax
from jax.sharding import PartitionSpec

from jax_trainer.core.by_epoch import Count, schedule_of
from jax_trainer.core.lora import Adapting, LoRA
from jax_trainer.core.loss_scale import scaled_grad_of, with_loss_scale, with_scaled_loss
from jax_trainer.core.metric_buffer import MetricWindow
from jax_trainer.core.metrics import BatchSize
from jax_trainer.core.optimizers import Optimizers, alternating_losses, alternating_step, gradients_of, with_clipping
from jax_trainer.core.precision import Precision, cast_floats
from jax_trainer.core.random import stream
from jax_trainer.core.remat import Remat
from jax_trainer.core.state import TrainState, new_state
from jax_trainer.core.steps import (
    GRAD_NORM,
    CastLossFn,
    EvalStep,
    LossFn,
    LossWeights,
    PredictFn,
    PredictStep,
    TrainStep,
    accumulate,
    grad_of,
    in_precision,
    make_eval_step,
    make_predict_step,
    total_loss,
    update_step,
)
from jax_trainer.diagnostics.leaves import Batch, PyTree, check_modes

LOG = logging.getLogger("jax_trainer")

InitVariables = Callable[[jax.Array, Batch], tuple[PyTree, PyTree]]
InitFromParams = Callable[[jax.Array, PyTree, PyTree], TrainState]
Check = Callable[[MetricWindow], None]
AddMask = Callable[[Batch, Any], Batch | None]


class ProgramInfo(NamedTuple):
    """What a run must know of a program besides its functions."""

    tx: Any = None  # the optimizer, or several `Optimizers`, to describe it; None: the steps have their own
    checks: tuple[Check, ...] = ()  # called with metrics on the host; an error ends the run
    keeps_batches: bool = False  # whether checks need the batch of a step
    init_is_traced: bool = True  # False: `init` returns existing arrays, which tracing would turn into constants
    init_from_params: InitFromParams | None = None  # (key, params, model_state) -> new state
    initial_variables: InitVariables | None = None  # existing weights of `init`, as arguments of `init_from_params`
    partition_specs: Callable[[], Mapping[str, PartitionSpec]] = dict  # those of the model; available after `init`
    transforms: Any = None  # device transforms of batches; None: those of the data may be added
    micro_batches: Mapping[int, int] | None = None  # by the number of complete epochs; None: always as many
    is_batch_stat: Callable[[str], bool] = lambda path: False  # by the path of a leaf of `model_state`
    never_trains: Callable[[str], bool] = lambda path: False  # parameters that `Unfreeze` never unfreezes, by path
    # (batch, mask of its examples) -> batch with this mask, which the evaluation step respects; it returns None for a
    # batch without one. None: the step may count all examples. See `with_mask`
    add_mask: AddMask | None = None
    # by the name of an evaluation set: from the evaluation step, the one of this set, such as one with more metrics
    eval_steps: Mapping[str, Callable[[EvalStep], EvalStep]] = MappingProxyType({})


class Program(NamedTuple):
    """The traced functions of a run: initialise a state, train, evaluate, predict."""

    init: Callable[[jax.Array, Batch], TrainState]
    train_step: TrainStep
    eval_step: EvalStep
    predict_step: PredictStep | None = None  # the model's outputs for a batch
    info: ProgramInfo = ProgramInfo()

    def with_info(self, **changes: Any) -> "Program":
        """The program with other fields of its `info`."""
        return self._replace(info=self.info._replace(**changes))


class StepOptions(TypedDict, total=False):
    """The options of `make_program`, which every adapter accepts."""

    micro_batches: Count
    clip_norm: float | None
    clip_adaptive: float | None
    remat: Remat | None
    precision: str | Precision | None
    log_norms: bool
    init_is_traced: bool
    intermediates: Sequence[str]
    lora: LoRA | None
    losses: LossWeights | None
    batch_size_of: BatchSize | None


def make_program(
    init_variables: InitVariables,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    *,
    predict_fn: PredictFn | None = None,
    per_optimizer: bool = False,
    **options: Unpack[StepOptions],
) -> Program:
    """A program from `init_variables(key, batch) -> (params, model_state)`, a loss and an optimizer, or `Optimizers`.

    Args:
        predict_fn: computes the outputs of the model; None: the program cannot predict.
        per_optimizer: whether `loss_fn` has a parameter `optimizer`, a name, and returns the loss of that optimizer.
        micro_batches: number of micro-batches of gradient accumulation; or several, by the number of complete epochs.
        clip_norm: maximum global norm of the gradients; None: no clipping.
        clip_adaptive: maximum norm of the gradient of each unit, relative to that of its weights; None: no clipping.
        remat: modules whose activations are computed again in the backward pass; for linen and nnx models.
        precision: "f32", "bf16", "bf16_full", "f16" or a `Precision`.
        log_norms: log the global norms of gradients (before clipping) and of parameters.
        init_is_traced: False if `init_variables` returns existing arrays.
        intermediates: statistics (min, max, mean, std, val) to log in training of what a Flax model sows.
        lora: train adapters of some parameters, and freeze all parameters; None: train all.
        losses: weights of the losses that the loss function returns by name; None: all are 1.
        batch_size_of: `batch -> number of examples`, by which the metrics of a batch are weighted; None: its `size`, or
            the common length of its arrays.
    """
    _check_options(options)
    precision = Precision.named(options.get("precision", Precision()))
    tx = with_clipping(tx, options.get("clip_norm"), options.get("clip_adaptive"))
    check_modes("intermediates", options.get("intermediates", ()))
    lora = options.get("lora")
    if lora is not None and isinstance(tx, Optimizers):
        raise ValueError(f"`lora` trains adapters with one optimizer, but there are the optimizers {tx.names}.")
    adapting = None if lora is None else Adapting(lora, loss_fn, precision)

    def init_from_params(key: jax.Array, params: PyTree, model_state: PyTree) -> TrainState:
        params, frozen = cast_floats(params, precision.param), {}
        if adapting is not None:
            params, frozen = adapting.split(key, params)
        state = new_state(params, model_state, tx, key).replace(frozen=frozen)
        return with_loss_scale(state, precision.loss_scale)

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        params, model_state = init_variables(stream(key, "init"), batch)
        if adapting is not None:
            adapting.trace(params, model_state, batch, key)
        return params, model_state

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return init_from_params(key, *variables(key, batch))

    def steps(loss_fn: LossFn, predict_fn: PredictFn | None) -> tuple[TrainStep, EvalStep, PredictStep | None]:
        train_step, cast_loss = _training(loss_fn, tx, precision, options, per_optimizer=per_optimizer)
        predict_step = None if predict_fn is None else make_predict_step(predict_fn, precision)
        return train_step, make_eval_step(cast_loss), predict_step

    made = steps(loss_fn, predict_fn) if adapting is None else adapting.steps(steps, loss_fn, predict_fn)
    train_step, eval_step, predict_step = made
    is_traced = options.get("init_is_traced", True)
    updates_at_once = not isinstance(tx, Optimizers) or any(one.every == 1 for one in tx.by_name.values())
    info = ProgramInfo(
        tx=tx,
        checks=(warn_of_zero_gradients,) if updates_at_once else (),
        init_is_traced=is_traced,
        init_from_params=init_from_params,
        initial_variables=None if is_traced else variables,
        micro_batches=schedule_of(options.get("micro_batches", 1)),
    )
    return Program(init, train_step, eval_step, predict_step, info)


def _check_options(options: StepOptions) -> None:
    unknown = sorted(set(options) - set(StepOptions.__annotations__))
    if unknown:
        raise TypeError(f"Unknown option: {', '.join(unknown)}. Options: {', '.join(StepOptions.__annotations__)}.")
    if (remat := options.get("remat")) is not None:
        raise TypeError(
            f"`remat` selects modules of a linen or nnx model by their path, here {remat.match!r}, and this model has "
            "none. Wrap its parts in `jax.checkpoint`."
        )


def _training(
    loss_fn: LossFn, tx: Any, precision: Precision, options: StepOptions, *, per_optimizer: bool
) -> tuple[TrainStep, CastLossFn]:
    """The training step, and the loss of an evaluation."""
    losses, several = options.get("losses"), isinstance(tx, Optimizers)
    if several and losses is not None:
        raise ValueError(
            f"`losses` has weights for {', '.join(losses)}, but there are the optimizers {tx.names}. "
            "Set `losses` of an optimizer instead."
        )
    weights = tx.weights if several else losses
    size_of, log_norms = options.get("batch_size_of"), options.get("log_norms", True)
    micro_batches = options.get("micro_batches", 1)

    def at_once() -> tuple[TrainStep, CastLossFn]:
        cast_loss = in_precision(loss_fn, precision, lambda found, step: total_loss(found, weights, step), size_of)
        grad_fn = grad_of(cast_loss) if precision.loss_scale is None else scaled_grad_of(cast_loss)
        grad_fn = accumulate(grad_fn, micro_batches)
        return with_scaled_loss(update_step(grad_fn, tx, log_norms=log_norms), precision.loss_scale), cast_loss

    if not several or (tx.joint and not per_optimizer):
        return at_once()
    by_name, together = alternating_losses(loss_fn, tx, precision, size_of, per_optimizer=per_optimizer)

    def in_turn() -> TrainStep:
        more = {"micro_batches": micro_batches, "log_norms": log_norms, "batch_size_of": size_of}
        return alternating_step(gradients_of(by_name), tx, precision, **more)

    if per_optimizer or tx.joint is False:
        return in_turn(), together

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Any]:
        """At once if the loss function returns one loss; otherwise each optimizer has the loss of its name."""
        found: list[bool] = []

        def total(losses: Any, step: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            found.append(isinstance(losses, Mapping))
            return total_loss(losses, None, step)

        loss = partial(in_precision(loss_fn, precision, total, size_of), train=True)
        jax.eval_shape(loss, state.params, state.model_state, batch, state.key, step=state.step)
        return (in_turn() if found[-1] else at_once()[0])(state, batch)

    return train_step, together


def warn_of_zero_gradients(rows: MetricWindow) -> None:
    """Logs a warning if the gradients of step 1 are zero; no error, because a fully masked batch has none."""
    if rows.first == 1 and GRAD_NORM in rows.format.metrics and (rows.values_of(GRAD_NORM)[:1] == 0).all():
        LOG.warning(
            "The gradients of all parameters were zero in step 1. Check that the loss depends on the outputs of the "
            "model: a constant, `argmax`, a comparison, `jax.lax.stop_gradient` and a softmax over one output have "
            "no gradient."
        )
