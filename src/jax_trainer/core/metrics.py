"""The metrics of one step.

A loss function returns plain values or dicts with options; `as_metrics` converts both to `Metrics`, a pytree that
crosses `jax.jit`. `metric_accumulator.py` aggregates the values of several steps.
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.diagnostics.leaves import Batch

Compute = Callable[[Any], Any]  # aggregated statistics -> a number, an array, or a dict of numbers
BatchSize = Callable[[Batch], Any]  # counts the examples of a batch; traced


class LogMetricMode(enum.Enum):
    """How the values of several steps are aggregated."""

    MEAN = "mean"
    SUM = "sum"
    SINGLE = "single"
    MAX = "max"
    MIN = "min"
    STD = "std"
    CONCAT = "concat"


class LogFreq(enum.Enum):
    """Whether a training metric is reported per window of steps, per epoch, or both."""

    ANY = "any"
    STEP = "step"
    EPOCH = "epoch"


class LogMode(enum.Enum):
    """The phases in which a metric is reported."""

    ANY = "any"
    TRAIN = "train"
    VAL = "val"
    TEST = "test"
    EVAL = "eval"

    def covers(self, phase: "LogMode") -> bool:
        """Whether a metric marked with this mode is reported in `phase` (TRAIN, VAL or TEST)."""
        return self in (LogMode.ANY, phase) or (self is LogMode.EVAL and phase is not LogMode.TRAIN)


class Metric(flax.struct.PyTreeNode):
    """The value of one step, in the modes MEAN and STD its mean; `weight` None: the number of examples of the batch.

    With `compute`, the value is a statistic: `compute` makes what is reported of the aggregated one, on the host.
    """

    value: Any
    weight: Any = None
    mode: LogMetricMode = flax.struct.field(pytree_node=False, default=LogMetricMode.MEAN)
    log_freq: LogFreq = flax.struct.field(pytree_node=False, default=LogFreq.ANY)
    log_mode: LogMode = flax.struct.field(pytree_node=False, default=LogMode.ANY)
    compute: Compute | None = flax.struct.field(pytree_node=False, default=None)


class Metrics(flax.struct.PyTreeNode):
    """The metrics of one step by name, with the number of examples of its batch."""

    by_name: dict[str, Metric]
    weight: Any

    def weight_of(self, name: str) -> Any:
        """The weight of the metric `name` in a mean."""
        own = self.by_name[name].weight
        return self.weight if own is None else own

    @property
    def names(self) -> list[str]:
        """The names that are reported: a `compute` with `results` reports one for each of them."""
        names = {name: getattr(metric.compute, "results", ()) for name, metric in self.by_name.items()}
        return [full for name, results in names.items() for full in ([f"{name}_{one}" for one in results] or [name])]

    @property
    def computes(self) -> dict[str, Compute]:
        """The `compute` of every metric that has one."""
        return {name: metric.compute for name, metric in self.by_name.items() if metric.compute is not None}

    def only(self, *phases: LogMode) -> "Metrics":
        """The metrics reported in any of `phases`; the others are never computed."""
        kept = {k: m for k, m in self.by_name.items() if any(m.log_mode.covers(p) for p in phases)}
        return self.replace(by_name=kept)

    def masked(self, keep: jax.Array) -> "Metrics":
        """These metrics, of weight 0 unless `keep`."""
        weight = lambda value: jnp.where(keep, jnp.asarray(value), 0)
        own = {k: m if m.weight is None else m.replace(weight=weight(m.weight)) for k, m in self.by_name.items()}
        return Metrics(own, weight(self.weight))

    def adding(self, **entries: Any) -> "Metrics":
        """These metrics and `entries`, in the format of `as_metrics`."""
        return self.replace(by_name={**self.by_name, **_read(entries, self.weight)})


_OF_THE_LOSS = re.compile(r"(train|val|test)(_[^/]*)?/loss")  # full names that the loss has
_OPTIONS = {"mode": LogMetricMode, "log_freq": LogFreq, "log_mode": LogMode}


def as_metrics(reported: Mapping[str, Any], weight: Any) -> Metrics:
    """Converts the metrics of a loss function: plain values, or dicts with options.

    A plain value is a scalar, the mean over the batch; an array needs a dict with its `mode`. A `value` with a `count`
    is a sum over that many items (tokens, pixels, unmasked examples): the mean of an epoch is the sum of its values
    divided by the sum of its counts. The modes other than MEAN and STD use the value unchanged. A count of 0 excludes
    the step.

    With a `compute`, the value is a statistic, such as counts with the mode "sum": after aggregation, in float64 and on
    the host, `compute(statistic)` returns what is reported: a number, an array, or a dict of numbers, which are
    reported as `<metric>_<key>`. It must be hashable and equal in every step: a metric object, or a function that is
    defined outside of the loss.

    >>> as_metrics({"loss": 0.5, "worst": {"value": 2.0, "mode": "max"}}, weight=32).by_name["worst"].mode
    <LogMetricMode.MAX: 'max'>
    >>> float(as_metrics({"token_loss": {"value": 10.0, "count": 4}}, weight=32).by_name["token_loss"].value)
    2.5
    """
    return Metrics(_read(reported, weight), weight)


def _read(reported: Mapping[str, Any], weight: Any) -> dict[str, Metric]:
    return {
        _name(name): _metric(name, entry) if isinstance(entry, Mapping) else Metric(_plain(name, entry, weight))
        for name, entry in reported.items()
    }


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"The name of a metric must be a string, got {name!r}, a {type(name).__name__}.")
    if _OF_THE_LOSS.fullmatch(name):
        raise ValueError(f"The metric `{name}` would replace the loss, which is logged as that. Choose another name.")
    return name


def _plain(name: str, entry: Any, weight: Any) -> jax.Array:
    value = _numeric(name, entry)
    if isinstance(weight, int) and weight > 1 and value.ndim:
        raise ValueError(
            f"Metric {name!r} has shape {value.shape} in a batch of {weight} examples; a plain value must be a scalar. "
            "Take its mean, or log an array elementwise: `{'value': …, 'mode': 'mean'}`."
        )
    return value


def _metric(name: str, entry: Mapping[str, Any]) -> Metric:
    known = {"value", "count", "compute", *_OPTIONS}
    if "value" not in entry or not set(entry) <= known:
        raise ValueError(
            f"Metric {name!r} is a dict with the keys {sorted(map(str, entry))}; "
            f"it needs `value` and may have {', '.join(sorted(known - {'value'}))}."
        )
    count = _numeric(name, entry.get("count", 0))
    if count.ndim:
        raise ValueError(
            f"Metric {name!r} has a `count` of shape {count.shape}; it must be one number: how many items "
            "the value is a sum over."
        )
    options: dict[str, Any] = {
        key: _option(name, key, kind, entry[key]) for key, kind in _OPTIONS.items() if key in entry
    }
    if entry.get("compute") is not None:
        options["compute"] = entry["compute"]
    value = _numeric(name, entry["value"])
    if "count" in entry and options.get("mode", LogMetricMode.MEAN) in (LogMetricMode.MEAN, LogMetricMode.STD):
        value = value / jnp.where(count > 0, count, 1)
    return Metric(value, entry.get("count"), **options)


def _option(name: str, key: str, kind: type[enum.Enum], value: Any) -> enum.Enum:
    choices = {member.value: member for member in kind}
    chosen = value if isinstance(value, kind) else choices.get(str(value).lower())
    if chosen is None:
        raise ValueError(f"Metric {name!r} has {key}={value!r}; use one of {', '.join(choices)}.")
    return chosen


def _numeric(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Metric {name!r} is a {type(value).__name__}, not a number or an array. "
            "Return numbers, arrays, or dicts with a `value`."
        ) from error


def declared_size(batch: Batch, attributes: Sequence[str] = ("size",)) -> Any:
    """The number of examples that `batch` has as the first of these attributes, or a dict as `size`; None: neither."""
    if isinstance(batch, jax.Array) or hasattr(batch, "__array__"):
        return None
    found = [batch.get("size")] if isinstance(batch, Mapping) else [getattr(batch, name, None) for name in attributes]
    return next((one for one in found if isinstance(one, int | float) or getattr(one, "ndim", None) == 0), None)


def batch_weight(batch: Batch, batch_size_of: BatchSize | None = None) -> Any:
    """The number of examples of `batch`: by this function, or else its own size, or the common length of its arrays.

    >>> batch_weight((jnp.zeros((32, 8)), jnp.zeros(32)))
    32
    >>> batch_weight({"nodes": jnp.zeros((90, 8)), "edges": jnp.zeros((300, 2)), "size": 4})
    4
    """
    if batch_size_of is not None:
        size = batch_size_of(batch)
        if jnp.ndim(size):
            raise ValueError(f"`batch_size_of` returned an array of shape {jnp.shape(size)}. Return one number.")
        return size
    if (own := declared_size(batch, ("count", "size"))) is not None:
        return own
    lengths = {leaf.shape[0] for leaf in map(jnp.asarray, jax.tree.leaves(batch)) if leaf.ndim}
    if len(lengths) != 1:
        raise ValueError(
            f"The number of examples of a batch is ambiguous: its arrays have the leading sizes {sorted(lengths)}. "
            "Give all arrays the same first axis, or the batch its number of examples: an entry `size` in a dict, a "
            "field `size` in a dataclass; or count them by `batch_size_of=lambda batch: …` of `fit` or a program, or "
            "by `size_of=` of a `CombinedLoader`."
        )
    return lengths.pop()


def masked_mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The mean of `values`, weighted by `mask`; 0 if it is zero everywhere.

    The mask has one entry per example, [batch], or one per value: whether it counts, or its weight. Values of weight 0
    may be NaN. None: all values count alike.

    >>> float(masked_mean(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([1, 1, 0])))
    2.0
    """
    if mask is None:
        return values.mean()
    total, weight = masked_sum(values, mask)
    return total / jnp.where(weight > 0, weight, 1)


def masked_sum(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of `values`, weighted by `mask` as in `masked_mean`, and the sum of the weights."""
    values = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    weights = mask_of_values(mask, values.shape).astype(values.dtype)
    # select, never multiply by 0: masked values may be nan
    return jnp.where(weights > 0, values * weights, 0).sum(), weights.sum()


def mask_of_values(mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """`mask`, of one entry per example or per value, with one entry for each value of an array of this shape.

    >>> mask_of_values(jnp.array([1, 0]), (2, 3)).tolist()
    [[1, 1, 1], [0, 0, 0]]
    """
    mask = jnp.asarray(mask)
    if mask.shape != shape[: mask.ndim]:
        raise ValueError(
            f"The `mask` of the batch has shape {mask.shape}, but the masked values have {shape}. Give it one entry "
            "per example, or one per value."
        )
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)


def with_mask(batch: Batch, mask: Any) -> Batch | None:
    """`batch` with `mask` ([batch], which examples count), and with its own mask among these; on the host.

    None if it is not a dataclass with a field `mask`. As `ProgramInfo.add_mask`, it declares that an evaluation step
    respects that field.
    """
    if "mask" not in getattr(batch, "__dataclass_fields__", {}):
        return None
    mask = np.asarray(mask)
    if batch.mask is not None:
        own = np.asarray(batch.mask)
        mask = np.where(mask.reshape(len(mask), *(1,) * (own.ndim - 1)), own, np.zeros((), own.dtype))
    return dataclasses.replace(batch, mask=mask)


def merge_micro(stacked: Metrics, rest: Metrics | None = None) -> Metrics:
    """The metrics of a batch from those of its micro-batches, stacked on the first axis, and of a smaller `rest`."""
    merged = {
        name: metric.replace(
            value=_merge(metric.mode, metric.value, jnp.asarray(stacked.weight_of(name))), weight=_total(metric.weight)
        )
        for name, metric in stacked.by_name.items()
    }
    stacked_metrics = Metrics(merged, _total(stacked.weight))
    return stacked_metrics if rest is None else _join(stacked_metrics, rest)


def _join(first: Metrics, second: Metrics) -> Metrics:
    def pair(a: Any, b: Any) -> jax.Array:
        return jnp.stack([jnp.asarray(a), jnp.asarray(b)])

    joined = {}
    for name, metric in first.by_name.items():
        a, b = metric.value, second.by_name[name].value
        if metric.mode is LogMetricMode.CONCAT:
            value = jnp.concatenate([jnp.atleast_1d(a), jnp.atleast_1d(b)])
        else:
            value = _merge(metric.mode, pair(a, b), pair(first.weight_of(name), second.weight_of(name)))
        weight = None if metric.weight is None else metric.weight + second.by_name[name].weight
        joined[name] = metric.replace(value=value, weight=weight)
    return Metrics(joined, first.weight + second.weight)


def _total(weight: Any) -> Any:
    return None if weight is None else jnp.sum(weight, axis=0)


def _merge(mode: LogMetricMode, values: jax.Array, weights: jax.Array) -> jax.Array:
    match mode:
        case LogMetricMode.SUM:
            return values.sum(0)
        case LogMetricMode.MAX:
            return values.max(0)
        case LogMetricMode.MIN:
            return values.min(0)
        case LogMetricMode.SINGLE:
            return values[-1]
        case LogMetricMode.CONCAT:
            return values.reshape(-1, *values.shape[2:])
        case _:  # MEAN, and STD, which is over steps: the value of a step is its mean
            weights = weights.reshape(weights.shape + (1,) * (values.ndim - 1)).astype(jnp.float32)
            total = weights.sum(0)
            return jnp.where(weights > 0, values * weights, 0).sum(0) / jnp.where(total > 0, total, 1)
