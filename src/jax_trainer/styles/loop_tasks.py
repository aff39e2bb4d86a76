"""`TrainTask` and `EvalTask`: the model, loss, metrics and data of loops, and the programs that they become."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.core.scope import CollectionFilter, in_filter

from jax_trainer.adapters import LinenView
from jax_trainer.adapters.calls import mode_flags
from jax_trainer.adapters.handles import module_kind
from jax_trainer.adapters.linen import is_batch_stat
from jax_trainer.adapters.remat import linen_remat
from jax_trainer.core import (
    Batch,
    Metrics,
    Program,
    PyTree,
    TrainState,
    as_metrics,
    batch_weight,
    make_program,
    masked_mean,
    stream,
    streams,
)
from jax_trainer.datasets import DataError
from jax_trainer.diagnostics.returned import check_call, check_loss, check_pairing, checked_losses, class_of, kinds_of
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.metrics import MetricInterface
from jax_trainer.optimizer import build_optimizers, checked_optimizer, loss_weights
from jax_trainer.runs.options import Options

SOWN = "intermediates"  # the Flax collection of sown values
Arguments = tuple[Any, ...]


@checks_keywords
@dataclass(frozen=True, eq=False)
class TrainTask:
    """The model, optimizer, loss and data of a training.

    Args:
        apply: the `apply` of a linen module, or a function `(variables, *inputs)`.
        optimizer: an optax optimizer; or several by name, each also an `AlternatingOptimizer`.
        loss: a function `(*outputs, *targets)` that returns a scalar, or several by name; with several optimizers, the
            loss of each by name.
        data: yields pairs of inputs and targets, `(x, y)`, each an array or a tuple of arrays: `((x1, x2), ())`. An
            iterator, a list, a loader, or a function that returns an iterator; all but the first start over at the end.
    """

    apply: Callable[..., Any] = field(repr=False)
    optimizer: optax.GradientTransformation | Mapping[str, Any] = field(repr=False)
    loss: Callable[..., Any]
    data: Any = field(repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.optimizer, Mapping):
            checked_optimizer(self.optimizer)
        check_function("TrainTask.apply", self.apply, "apply")
        check_function("TrainTask.loss", self.loss)


@checks_keywords
@dataclass(frozen=True, eq=False)
class EvalTask:
    """The metrics to compute, and the data.

    Args:
        apply: the `apply` of a linen module, or a function `(variables, *inputs)`.
        metrics: functions `(*outputs, *targets)` by label; their values are averaged over all examples, and those of a
            `{"value": sum, "count": n}` over all counted items. Or metrics such as `F1()`. The `mask` of a batch is
            passed to these, and values per example are averaged over it.
        data: yields pairs of inputs and targets, see `TrainTask`.
    """

    apply: Callable[..., Any] = field(repr=False)
    metrics: Mapping[str, Callable[..., Any]]
    data: Any = field(repr=False)


class Collections(NamedTuple):
    """The names of the random streams of a model."""

    init: tuple[str, ...] = ("params", "dropout")
    apply: tuple[str, ...] = ("dropout",)

    @classmethod
    def of(cls, collections: Mapping[str, Sequence[str]] | None) -> "Collections":
        """From the argument `collections`, such as `{"init": ["params"], "apply": ["dropout"]}`."""
        unknown = sorted(set(collections or {}) - set(cls._fields))
        if unknown:
            raise ValueError(
                f"`collections` has the unknown key {unknown[0]!r}. Its keys are 'init' and 'apply', its values "
                "names of random streams."
            )
        return cls(**{name: tuple(labels) for name, labels in (collections or {}).items()})


def train_program(
    init: Callable[[jax.Array, Batch], tuple[PyTree, PyTree]],
    task: TrainTask,
    names: tuple[str, ...],
    mutable: CollectionFilter,
    options: Options,
    total_steps: int | None = None,
) -> Program:
    """The program that trains; it cannot evaluate.

    Args:
        init: returns the parameters and the other variables.
        task: what to train.
        names: the random streams of a call.
        mutable: the collections that training updates.
        options: those of its step are used.
        total_steps: the length of schedules of loss weights; None: unknown.
    """
    call = _calling(linen_remat(task.apply, options.remat_modules), names)

    def loss_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool) -> Any:
        inputs, targets = split(batch)
        outputs, changed = call(params, model_state, inputs, rng, train=True)
        check_call(task.loss, "TrainTask.loss", *("outputs" for _ in outputs), *("targets" for _ in targets))
        loss = task.loss(*outputs, *targets)
        if isinstance(loss, tuple):
            raise TypeError(
                f"`TrainTask.loss` must return a scalar, or several by name, got {kinds_of(loss)}. Compute other "
                "metrics in an `EvalTask`."
            )
        loss = checked_losses(loss, "TrainTask.loss")
        _check_masked("`TrainTask.loss`", loss, getattr(batch, "mask", None))
        check_loss(loss, {"predictions": outputs, "targets": targets})
        check_pairing(lambda a, b: task.loss(*a, *b), outputs, targets)
        kept = {name: changed[name] if in_filter(mutable, name) else old for name, old in model_state.items()}
        return loss, (kept, {})

    of_step = {**options.step_options(), "losses": loss_weights(options.losses or None, total_steps), "remat": None}
    tx = task.optimizer
    tx = build_optimizers(tx, total_steps) if isinstance(tx, Mapping) else tx
    program = make_program(init, loss_fn, tx, **of_step)
    return program._replace(eval_step=lambda state, batch: Metrics({}, 0)).with_info(is_batch_stat=is_batch_stat)


def first_variables(init: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., tuple[PyTree, PyTree]]:
    """A function `(key, batch)` that returns the parameters and the other variables of a new model."""

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        flags = mode_flags(init, train=False, only_required=True)
        made = dict(init(streams(key, *names), *split(batch)[0], **flags))
        made.pop(SOWN, None)  # sown during initialisation, not needed later
        return made.pop("params", {}), made

    return variables


def eval_program(task: EvalTask, names: tuple[str, ...]) -> Program:
    """The program that computes metrics; it cannot train."""
    call = _calling(task.apply, names)

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        (inputs, targets), mask = split(batch), getattr(batch, "mask", None)
        outputs, _ = call(state.params, state.model_state, inputs, stream(state.key, "eval"), train=False)
        measured: dict[str, Any] = {}
        for label, metric in task.metrics.items():
            check_call(metric, f"metrics[{label!r}]", *("outputs" for _ in outputs), *("targets" for _ in targets))
            check_pairing(lambda a, b, of=metric: of(*a, *b), outputs, targets, what=f"The metric {label!r}")
            options = {"weights": mask} if isinstance(metric, MetricInterface) else {}
            value = metric(*outputs, *targets, **options)
            if mask is not None and not options:
                _check_masked(f"The metric {label!r}", value, mask)
            # `value` and `count`: reduced
            measured[label] = value if isinstance(value, Mapping) else masked_mean(jnp.asarray(value), mask)
        return as_metrics(measured, batch_weight(batch))

    def never(*_: Any) -> Any:
        raise NotImplementedError("This program can only evaluate.")

    return Program(init=never, train_step=never, eval_step=eval_step)


def _check_masked(what: str, value: Any, mask: Any) -> None:
    """Raises if `value` was reduced over all examples of a batch with a mask."""
    if mask is not None and (isinstance(value, Mapping) or not jnp.ndim(value)):
        raise ValueError(
            f"The batch has a `mask` of shape {jnp.shape(mask)}, but {what} returned a reduced value, which includes "
            "the masked-out examples. Pass the mask among the targets, `(x, (y, mask))`, and use it there."
        )


def _calling(apply: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., tuple[Arguments, PyTree]]:
    """A function that calls the model; it returns the outputs and the new model state."""
    linen_apply = _as_linen(apply)

    def call(
        params: PyTree, model_state: PyTree, inputs: Arguments, rng: jax.Array, *, train: bool
    ) -> tuple[Arguments, PyTree]:
        view = LinenView(linen_apply, params, model_state, stream(rng, "model"))
        outputs, changed = view.apply(params, *inputs, train=train, rngs=names)
        return _as_tuple(outputs), changed

    return call


def _as_linen(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a plain function so that it accepts the arguments of a linen module's `apply`."""
    parameters = inspect.signature(apply).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if takes_any or {"rngs", "mutable"} <= parameters.keys():
        return apply

    def call(variables: Any, *inputs: Any, train: bool, rngs: Any, mutable: Sequence[str] | None = None) -> Any:
        options = mode_flags(apply, train=train) | ({"rngs": rngs} if "rngs" in parameters else {})
        outputs = apply(variables, *inputs, **options)
        return outputs if mutable is None else (outputs, {name: variables[name] for name in mutable})

    return call


def split(batch: Batch) -> tuple[Arguments, Arguments]:
    """Splits a batch into inputs and targets, each a tuple of arrays.

    >>> split((1, (2, 3)))
    ((1,), (2, 3))
    """
    if hasattr(batch, "input") and hasattr(batch, "target"):
        batch = (batch.input, batch.target)
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise DataError(
            "A batch must be a pair of inputs and targets: `(x, y)`, `((x, …), (y, …))` or `((x, …), ())`; got "
            f"{_describe(batch)}."
        )
    return _as_tuple(batch[0]), _as_tuple(batch[1])


def check_function(name: str, function: Any, of_module: str = "") -> None:
    """Refuses what is not a function; a linen module has one as its method `of_module`."""
    kind = module_kind(function)
    if of_module and kind == "linen" and not isinstance(function, type):
        raise TypeError(f"`{name}` is the module {type(function).__name__}. Pass its method: `model.{of_module}`.")
    if kind == "nnx":
        raise TypeError(
            f"`{name}` is an nnx module, but `TrainLoop` trains linen modules and functions. Train an nnx module with "
            "`train_fn` or `fit`."
        )
    if not callable(function):
        raise TypeError(
            f"`{name}` must be a function, such as `model.{of_module or 'apply'}`, got a {class_of(function)}."
        )


def _describe(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a dict with the keys {', '.join(map(str, batch))}"
    if isinstance(batch, tuple | list):
        return f"a {type(batch).__name__} of {len(batch)}"
    return "a single array" if hasattr(batch, "shape") else f"a {type(batch).__name__}"


def _as_tuple(value: Any) -> Arguments:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
