"""Programs made from programs. What they add to a run is traced, lives in `state.extra`, and resumes exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.metric_window import MetricWindow
from jax_trainer.core.metrics import Batch, LogMode, Metrics, PyTree
from jax_trainer.core.program import Program
from jax_trainer.core.state import TrainState
from jax_trainer.core.steps import PARAMS_NORM, StepReport

_IN_A_ROW = "skipped_in_a_row"
_READABLE = {"loss": "the loss", PARAMS_NORM: "the norm of all parameters after it"}


def with_ema(program: Program, decay: float, *, warmup: bool = True, evaluate: bool = True) -> Program:
    """`program` that also keeps an exponential moving average of the parameters, in `extra["ema"]`.

    Args:
        decay: the share of the old average that stays per step, 0 ≤ decay < 1.
        warmup: let the average follow faster at first: the decay is at most (1 + step) / (10 + step).
        evaluate: judge the averaged weights, and ask them, instead of the current ones.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"`decay` must be at least 0 and below 1, got {decay}.")

    def start(state: TrainState) -> TrainState:
        return _remember(state, "ema", jax.tree.map(jnp.copy, state.params))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        average = state.extra["ema"]
        state, report = program.train_step(state, batch)
        step = state.step.astype(jnp.float32)
        keep = jnp.minimum(decay, (1 + step) / (10 + step)) if warmup else jnp.float32(decay)
        average = jax.tree.map(lambda old, new: _mix(keep, old, new), average, state.params)
        return _remember(state, "ema", average), report

    def averaged(step: Callable[[TrainState, Batch], Any]) -> Callable[[TrainState, Batch], Any]:
        return lambda state, batch: step(state.replace(params=state.extra["ema"]), batch)

    averaging = _starting_with(start, program)._replace(train_step=train_step)
    if not evaluate:
        return averaging
    predict_step = None if program.predict_step is None else averaged(program.predict_step)
    return averaging._replace(eval_step=averaged(program.eval_step), predict_step=predict_step)


def _mix(keep: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    return (keep * old + (1 - keep) * new).astype(old.dtype)


class NonFiniteError(FloatingPointError):
    """Too many steps in a row had a watched metric or a gradient that is not finite.

    `step` is the last of them, and `batch` a copy of what it was taken on, on the host, where somebody kept it; `place`
    is then its epoch, and its number there.
    """

    def __init__(
        self, message: str, *, step: int, batch: Batch | None = None, place: tuple[int, int] | None = None
    ) -> None:
        super().__init__(message)
        self.step, self.batch, self.place = step, batch, place


def with_finite_guard(program: Program, max_consecutive: int = 10, watched: Sequence[str] = ("loss",)) -> Program:
    """`program` that skips an update whose gradients or `watched` metrics are not finite.

    A skipped step leaves parameters, optimizer state, model state and whatever inner wrappers keep exactly as they
    were; only the step count goes on, and its metrics count for nothing. `guard/skipped` is the number of skips.
    After `max_consecutive` skips in a row the next one freezes the state and ends the run with `NonFiniteError`.

    Args:
        max_consecutive: how many skips in a row are allowed.
        watched: metrics of training, by the names under which they are reported, without "train/".
    """
    if max_consecutive < 0:
        raise ValueError(f"`max_consecutive` must be at least 0, got {max_consecutive}.")
    if isinstance(watched, str):
        raise TypeError(f"`watched` must be a sequence of names, got {watched!r}. Write `watched=({watched!r},)`.")
    names = tuple(watched)

    def start(state: TrainState) -> TrainState:
        return _remember(state, _IN_A_ROW, jnp.zeros((), jnp.int32))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        in_a_row = state.extra[_IN_A_ROW]
        frozen = in_a_row > max_consecutive
        new, report = program.train_step(state, batch)
        # a step that does not hand out its gradients is seen by what they did
        moved = new.params if report.grads is None else report.grads
        keep = _all_finite((_values(report.metrics, names), moved)) & ~frozen
        in_a_row = jnp.where(keep, 0, in_a_row + jnp.where(frozen, 0, 1))
        chosen = _chosen(keep, new, state).replace(step=new.step)
        metrics = _silenced(report.metrics, keep).adding(
            **{
                "guard/skipped": {"value": 1 - keep, "count": 1, "mode": "sum", "log_mode": "train"},
                "guard/in_a_row": {"value": in_a_row, "count": 1, "mode": "max", "log_mode": "train"},
            }
        )
        return _remember(chosen, _IN_A_ROW, in_a_row), report._replace(metrics=metrics)

    def check(rows: MetricWindow) -> None:
        over = np.flatnonzero(rows.values_of("guard/in_a_row") > max_consecutive)
        if len(over):
            step = rows.first + int(over[0])
            raise NonFiniteError(
                f"Step {step}: {_in_words(names)} was not finite {max_consecutive + 1} times in a row, and "
                f"`max_consecutive` is {max_consecutive}. The state is that of the last good step. "
                "Lower the learning rate, clip gradients, or look at the data of these steps.",
                step=step,
            )

    checks = (*program.checks, check)
    return _starting_with(start, program)._replace(train_step=train_step, checks=checks, keeps_batches=True)


def with_finite_check(program: Program) -> Program:
    """`program` whose run ends with `NonFiniteError` when a step's loss, or the weights after it, were not finite.

    It costs the device nothing: the numbers are looked at when they arrive on the host, some steps later and always
    before a state is saved. By then the weights may be spoilt; `with_finite_guard` keeps them. The weights are known by
    their norm, where steps report it; of a step that reports no "loss", all numbers are looked at.
    """

    def check(rows: MetricWindow) -> None:
        reported = rows.format.metrics
        names = [name for name in ("loss", PARAMS_NORM) if name in reported] if "loss" in reported else [*reported]
        found: dict[int, str] = {}
        for name in names:
            values = rows.values_of(name)
            bad = np.flatnonzero(~np.isfinite(values))
            if values.ndim == 1 and len(bad):
                found.setdefault(int(bad[0]), f"{_READABLE.get(name, repr(name))} was {values[bad[0]]}")
        if found:
            step = rows.first + min(found)
            raise NonFiniteError(
                f"Step {step}: {found[min(found)]}. What is saved is from before that was known. Lower the "
                "learning rate, clip gradients, or look at the data of this step.",
                step=step,
            )

    return program._replace(checks=(*program.checks, check))


def thawed(state: TrainState) -> TrainState:
    """`state` as if no step had been skipped so far: none is frozen."""
    if _IN_A_ROW not in state.extra:
        return state
    return _remember(state, _IN_A_ROW, jnp.zeros_like(state.extra[_IN_A_ROW]))


def _values(metrics: Metrics, names: Sequence[str]) -> list[jax.Array]:
    reported = metrics.only(LogMode.TRAIN).by_name
    unknown = [name for name in names if name not in reported]
    if unknown:
        raise ValueError(
            f"No metric {unknown[0]!r} to watch in training. There are {', '.join(sorted(reported))}: name some of "
            "them in `watched`."
        )
    return [reported[name].value for name in names]


def _chosen(keep: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    # on the CPU a select would be fused into the update, which then multiplies and adds with other roundings than
    # without a guard; elsewhere a branch would make the device ask the host
    if jax.default_backend() == "cpu":
        return jax.lax.cond(keep, lambda a, b: a, lambda a, b: b, new, old)
    # select, never multiply: 0 * nan is nan
    return jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, old)


def _in_words(names: Sequence[str]) -> str:
    return " or ".join([", ".join(f"the {name}" for name in names), "a gradient"]) if names else "a gradient"


def _all_finite(tree: PyTree) -> jax.Array:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.array(True), *(jnp.isfinite(leaf).all() for leaf in floats)]).all()


def _silenced(metrics: Metrics, keep: jax.Array) -> Metrics:
    def weight(given: object) -> jax.Array:
        return jnp.where(keep, jnp.asarray(given), 0)

    by_name = {k: m if m.weight is None else m.replace(weight=weight(m.weight)) for k, m in metrics.by_name.items()}
    return Metrics(by_name, weight(metrics.weight))


def _starting_with(add: Callable[[TrainState], TrainState], program: Program) -> Program:
    """`program` whose fresh states have what `add` adds, however they begin."""
    begin = program.init_from_params

    def begun(key: jax.Array, params: PyTree, model_state: PyTree) -> TrainState:
        assert begin is not None
        return add(begin(key, params, model_state))

    return program._replace(
        init=lambda key, batch: add(program.init(key, batch)), init_from_params=None if begin is None else begun
    )


def _remember(state: TrainState, name: str, value: PyTree) -> TrainState:
    return state.replace(extra={**state.extra, name: value})
