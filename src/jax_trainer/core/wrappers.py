"""Wrappers of programs. What they add is traced and kept in `state.extra`, so that it resumes exactly."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.extra_args import UPDATED, Around
from jax_trainer.core.loss_scale import LOWEST, all_finite, has_overflowed, select
from jax_trainer.core.loss_scale import METRIC as LOSS_SCALE_METRIC
from jax_trainer.core.metric_buffer import MetricWindow
from jax_trainer.core.metrics import LogMetricMode, LogMode, Metrics
from jax_trainer.core.program import Program
from jax_trainer.core.state import AVERAGE, TrainState, hyperparameters_in, strong
from jax_trainer.core.steps import PARAMS_NORM, StepReport, global_norm, reporting
from jax_trainer.core.tracing import current, tracing
from jax_trainer.diagnostics.leaves import Batch, PyTree, check_modes, float_leaves, leaf_path, leaf_statistics

Trains = Callable[[TrainState], Mapping[str, Any]]  # by the path of a parameter of the model; values may be traced
_IN_A_ROW = "skipped_in_a_row"
_READABLE = {"loss": "the loss", PARAMS_NORM: "the norm of all parameters after it"}


def with_ema(program: Program, decay: float, *, warmup: bool = True, evaluate: bool = True) -> Program:
    """`program` that also keeps an exponential moving average of the parameters, in `extra["ema"]`.

    Args:
        decay: EMA decay per step, 0 ≤ decay < 1.
        warmup: limit the decay to (1 + step) / (10 + step), so that the average follows faster at first.
        evaluate: use the averaged weights for evaluation and prediction.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")

    def add_average(state: TrainState) -> TrainState:
        if AVERAGE in state.extra:
            raise ValueError(
                "The optimizer is schedule-free: evaluation already uses an average of the weights, so an EMA "
                "would have no effect. Leave out `ema`."
            )
        return _with_extra(state, "ema", jax.tree.map(jnp.copy, state.params))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        average, before = state.extra["ema"], state
        state, report = program.train_step(state, batch)
        step = state.step.astype(jnp.float32)
        keep = jnp.minimum(decay, (1 + step) / (10 + step)) if warmup else jnp.float32(decay)
        if (skipped := has_overflowed(before, state)) is not None:
            keep = jnp.where(skipped, 1.0, keep)

        def mixed(old: jax.Array, new: jax.Array) -> jax.Array:
            is_float = jnp.issubdtype(new.dtype, jnp.inexact)
            return (keep * old + (1 - keep) * new).astype(old.dtype) if is_float else new

        return _with_extra(state, "ema", jax.tree.map(mixed, average, state.params)), report

    def averaged(step: Callable[[TrainState, Batch], Any]) -> Callable[[TrainState, Batch], Any]:
        return lambda state, batch: step(state.replace(params=state.extra["ema"]), batch)

    averaging = with_initial(add_average, program)._replace(train_step=train_step)
    if not evaluate:
        return averaging
    predict_step = None if program.predict_step is None else averaged(program.predict_step)
    return averaging._replace(eval_step=averaged(program.eval_step), predict_step=predict_step)


SWA = "swa"  # in `extra` of a state: the average of weights, of how many, and the learning rate before it


def with_weight_average(program: Program) -> Program:
    """`program` whose state has room for an average of weights, in `extra["swa"]`, which edits make grow.

    Evaluation uses the parameters.
    """

    def add_average(state: TrainState) -> TrainState:
        average = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), state.params)
        counts = {"count": jnp.zeros((), jnp.int32), "rate": jnp.zeros((), jnp.float32)}
        return _with_extra(state, SWA, {"average": average, **counts})

    return with_initial(add_average, program)


def with_statistics(program: Program, *, params: Sequence[str] = (), grads: Sequence[str] = ()) -> Program:
    """`program` that also logs `param/path_mode` and `grad/path_mode` in training.

    Modes are min, max, mean, std, and val, the value of a leaf with one element. Parameters are those after the step,
    gradients those before clipping. Over several steps, min and max are aggregated as min and max, the others as means.

    Args:
        params: modes to log of parameters.
        grads: modes to log of gradients.
    """
    check_modes("params", params)
    check_modes("grads", grads)
    if not params and not grads:
        return program

    def statistics(before: TrainState, after: TrainState, report: StepReport) -> dict[str, Any]:
        return {**leaf_statistics("param", after.params, params), **leaf_statistics("grad", report.grads, grads)}

    return program._replace(train_step=reporting(program.train_step, statistics))


def with_layer_norms(program: Program, *, params: bool = True, grads: bool = True, updates: bool = True) -> Program:
    """`program` that also logs the L2 norm of every layer in training: the norm of all arrays of one module.

    They are `param_norm/<layer>`, `grad_norm/<layer>` and `update_norm/<layer>`; over several steps, they are averaged.
    Parameters are those after the step, gradients those before clipping, and the update is what the step has added to
    the parameters: to compute it, the step needs memory for one more copy of them.
    """
    if not (params or grads or updates):
        return program

    def norms(before: TrainState, after: TrainState, report: StepReport) -> dict[str, Any]:
        new = jax.lax.optimization_barrier(after.params)  # norms must not change the rounding of the update
        metrics = {}
        if params:
            metrics |= _layer_norms("param_norm", new)
        if grads:
            metrics |= _layer_norms("grad_norm", gradients_in(report, "the norms of layers"))
        if updates:
            wide = lambda tree: jax.tree.map(lambda one: one.astype(jnp.promote_types(one.dtype, jnp.float32)), tree)
            metrics |= _layer_norms("update_norm", jax.tree.map(jnp.subtract, wide(new), wide(before.params)))
        return metrics

    return program._replace(train_step=reporting(program.train_step, norms))


def with_gradients(program: Program, purpose: str) -> Program:
    """`program`, whose steps must report gradients; `purpose` is what for, in the error for one that does not."""

    def none(before: TrainState, after: TrainState, report: StepReport) -> dict[str, Any]:
        gradients_in(report, purpose)
        return {}

    return program._replace(train_step=reporting(program.train_step, none))


def gradients_in(report: StepReport, purpose: str) -> PyTree:
    """The gradients that a step reports; a `TypeError` if it reports none, as a custom step may."""
    if report.grads is None:
        raise TypeError(
            f"The training step reports no gradients, which {purpose} need. A custom step can return them as "
            "`state, StepReport(metrics, grads)`. Or leave them out: `grads: false`."
        )
    return report.grads


def _layer_norms(prefix: str, tree: PyTree) -> dict[str, dict[str, Any]]:
    layers: dict[str, list[jax.Array]] = {}
    for path, leaf in float_leaves(tree):
        layers.setdefault(path.rpartition(".")[0] or path, []).append(leaf)
    return {f"{prefix}/{name}": {"value": global_norm(leaves), "log_mode": "train"} for name, leaves in layers.items()}


def with_frozen_stats(program: Program, trains: Trains) -> Program:
    """`program` whose steps keep the running statistics of every module none of whose parameters train.

    A BatchNorm without parameters belongs to the module that contains it. What is normalised in training still has the
    statistics of its batch.

    Args:
        program: the program.
        trains: which parameters of the model train in a state.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        new, report = program.train_step(state, batch)
        trained = trains(state)

        def kept(path: tuple[Any, ...], before: Any, after: Any) -> Any:
            name = leaf_path(path)
            is_trained = _of_module(name, trained) if program.info.is_batch_stat(name) else True
            if isinstance(is_trained, bool):
                return after if is_trained else before
            return jnp.where(is_trained, after, before)

        model_state = jax.tree_util.tree_map_with_path(kept, state.model_state, new.model_state)
        return new.replace(model_state=model_state), report

    return program._replace(train_step=train_step)


def _of_module(statistic: str, trained: Mapping[str, Any]) -> Any:
    """Whether any parameter trains of the module that has this statistic, or of the closest one with parameters.

    >>> _of_module("batch_stats.block.norm.mean", {"block.norm.scale": False, "block.conv.kernel": True})
    False
    >>> _of_module("block.norm.mean", {"block.conv.kernel": True, "head.kernel": False})
    True
    """
    module = statistic.split(".")[:-1]
    places = [
        module[start:end] for end in range(len(module), 0, -1) for start in (0, 1)
    ]  # linen has a collection first
    for place in (*filter(None, places), []):
        own = [one for path, one in trained.items() if path.split(".")[: len(place)] == place]
        if own:
            return True if any(one is True for one in own) else reduce(lambda a, b: a | b, own)
    return True


class NonFiniteError(FloatingPointError):
    """Too many consecutive steps had a non-finite watched metric or gradient.

    `step` is the last of them. If batches are kept, `batch` is a host copy of its batch, and `position` its epoch and
    number in the epoch.
    """

    def __init__(
        self, message: str, *, step: int, batch: Batch | None = None, position: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.step, self.batch, self.position = step, batch, position


def with_finite_guard(program: Program, max_consecutive: int = 10, watched: Sequence[str] = ("loss",)) -> Program:
    """`program` that skips updates with non-finite gradients or `watched` metrics.

    A skipped step changes the step count only, neither parameters, optimizer state, model state nor the state of inner
    wrappers, and its metrics have weight 0. `guard/skipped` is the number of skips. After `max_consecutive` skips in a
    row the next one freezes the state and ends the run with `NonFiniteError`.

    Args:
        max_consecutive: maximum number of consecutive skips.
        watched: names of training metrics, without "train/".
    """
    if isinstance(watched, str):
        raise TypeError(f"`watched` must be a sequence of names, got {watched!r}. Write `watched=({watched!r},)`.")
    names = tuple(watched)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        in_a_row = state.extra[_IN_A_ROW]
        frozen = in_a_row > max_consecutive
        new, report = program.train_step(state, batch)
        # without gradients, the new parameters show whether they were finite
        checked = new.params if report.grads is None else report.grads
        keep = all_finite((_values(report.metrics, names), checked)) & ~frozen
        in_a_row = jnp.where(keep, 0, in_a_row + jnp.where(frozen, 0, 1))
        selected = select(keep, *(one.replace(frozen={}) for one in (new, state)))
        selected = selected.replace(step=new.step, frozen=state.frozen)
        metrics = report.metrics.masked(keep).adding(
            **{
                "guard/skipped": {"value": 1 - keep, "count": 1, "mode": "sum", "log_mode": "train"},
                "guard/in_a_row": {"value": in_a_row, "count": 1, "mode": "max", "log_mode": "train"},
            }
        )
        return _with_extra(selected, _IN_A_ROW, in_a_row), report._replace(metrics=metrics)

    def check(rows: MetricWindow) -> None:
        _check_loss_scale(rows)
        over = np.flatnonzero(rows.values_of("guard/in_a_row") > max_consecutive)
        if len(over):
            step, values = rows.first + int(over[0]), ", ".join(f"the {name}" for name in names)
            values = f"{values} or a gradient" if values else "a gradient"
            raise NonFiniteError(
                f"Step {step}: {values} was not finite {max_consecutive + 1} times in a row; "
                f"`max_consecutive` is {max_consecutive}. The state is that of the last finite step. "
                "Lower the learning rate, clip gradients, or check the data of these steps.",
                step=step,
            )

    add_counter = lambda state: _with_extra(state, _IN_A_ROW, jnp.zeros((), jnp.int32))
    guarded = with_initial(add_counter, program)._replace(train_step=train_step)
    return guarded.with_info(checks=(*program.info.checks, check), keeps_batches=True)


def with_finite_check(program: Program) -> Program:
    """`program` whose run ends with `NonFiniteError` if the loss of a step, or the weights after it, are not finite.

    It costs no device time: metrics are checked when they arrive on the host, some steps later and always before a
    state is saved. By then the weights may be non-finite; `with_finite_guard` prevents that. Weights are checked by
    their logged norm; for a step without a metric "loss", all metrics are checked.
    """

    def check(rows: MetricWindow) -> None:
        _check_loss_scale(rows)
        reported = rows.format.metrics
        names = [name for name in ("loss", PARAMS_NORM) if name in reported] if "loss" in reported else [*reported]
        names = [name for name in names if reported[name].mode is not LogMetricMode.CONCAT]
        found: dict[int, str] = {}
        for name in names:
            values = rows.values_of(name)
            bad = np.flatnonzero(~np.isfinite(values))
            if values.ndim == 1 and len(bad):
                found.setdefault(int(bad[0]), f"{_READABLE.get(name, repr(name))} was {values[bad[0]]}")
        if found:
            step = rows.first + min(found)
            raise NonFiniteError(
                f"Step {step}: {found[min(found)]}. Saved checkpoints are from earlier steps. Lower the "
                "learning rate, clip gradients, or check the data of this step.",
                step=step,
            )

    return program.with_info(checks=(*program.info.checks, check))


def thawed(state: TrainState) -> TrainState:
    """`state` with the counter of skipped steps reset, so that it is not frozen."""
    if _IN_A_ROW not in state.extra:
        return state
    return _with_extra(state, _IN_A_ROW, jnp.zeros_like(state.extra[_IN_A_ROW]))


def _values(metrics: Metrics, names: Sequence[str]) -> list[jax.Array]:
    reported = metrics.only(LogMode.TRAIN).by_name
    unknown = [name for name in names if name not in reported]
    if unknown:
        raise ValueError(
            f"No training metric {unknown[0]!r} to watch. Set `watched` to some of {', '.join(sorted(reported))}."
        )
    return [reported[name].value for name in names]


def _check_loss_scale(rows: MetricWindow) -> None:
    if LOSS_SCALE_METRIC not in rows.format.metrics:
        return
    low = np.flatnonzero(rows.values_of(LOSS_SCALE_METRIC) < LOWEST)
    if len(low):
        step = rows.first + int(low[0])
        raise NonFiniteError(
            f"Step {step}: the gradients overflowed in float16 so often that the loss scale is below {LOWEST:.0e}. The "
            "weights are those before the first overflow. Lower the learning rate, check the loss for divisions and "
            "roots of 0, or use `precision: bf16`, which has the range of float32.",
            step=step,
        )


def with_initial(add: Callable[[TrainState], TrainState], program: Program) -> Program:
    """`program` whose new states are passed through `add`."""
    init_from_params = program.info.init_from_params

    def from_params(key: jax.Array, params: PyTree, model_state: PyTree) -> TrainState:
        assert init_from_params is not None
        return add(init_from_params(key, params, model_state))

    wrapped = program._replace(init=lambda key, batch: add(program.init(key, batch)))
    return wrapped.with_info(init_from_params=None if init_from_params is None else from_params)


def with_optimizer(
    program: Program, around: Around, *, instead: str = "", needs: Callable[[TrainState], bool] = lambda state: True
) -> Program:
    """`program` with a transformation around its optimizer, whose state is in `extra`.

    Args:
        program: the program.
        around: the transformation.
        instead: what else helps, in the error for a training step that updates the parameters itself.
        needs: whether the optimizer with such a state needs it.
    """
    used: set[str] = set()  # stays filled: a function that the user has compiled is not traced again
    refusal = (
        f"`{around.name}` cannot change the updates: the training step updates the parameters itself. Use "
        f"`state.apply_gradients(grads=grads)` in it{instead}."
    )
    add_state = lambda state: added_state(around, state) if needs(state) else state

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        if around.hyperparameter and around.hyperparameter not in hyperparameters_in(state):
            return program.train_step(state, batch)
        others = (one for one in current().wraps if one is not around)
        with tracing(wraps=(around, *others)) as notes:
            stepped = program.train_step(state, batch)
        used.update(notes & {UPDATED})
        if not used:
            raise TypeError(refusal)
        return stepped

    return with_initial(add_state, program)._replace(train_step=train_step)


def added_state(around: Around, state: TrainState) -> TrainState:
    """`state` with that of a transformation around its optimizer; itself if it has one with this hyperparameter."""
    if around.hyperparameter in hyperparameters_in(state):
        return state
    return state.replace(extra=strong(around.added_to(state.extra, state.opt_state, state.params)))


def _with_extra(state: TrainState, name: str, value: PyTree) -> TrainState:
    return state.replace(extra={**state.extra, name: value})
