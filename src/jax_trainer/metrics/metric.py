"""`MetricInterface`: the base class of metrics, which are called in a step and computed from aggregated statistics."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.config.settings import ValueSettings
from jax_trainer.core import compiled_function, mask_of_values
from jax_trainer.diagnostics.suggestions import check_keywords, keywords_of


@dataclass
class MetricConfig(ValueSettings):
    """The keys of every metric.

    Args:
        log_mode: the phases in which it is reported: any, train, val, test, or eval (validation and test).
        log_freq: in training, reported per window of steps (step), per epoch (epoch), or both (any).
    """

    log_mode: Literal["any", "train", "val", "test", "eval"] = "any"
    log_freq: Literal["any", "step", "epoch"] = "any"


@register_interface
class MetricInterface(RegistrableConfigInterface):
    """A metric: `statistics` of a batch, which are traced and can be summed, and the result that they `compute`.

    Call it in a loss, and return the entry under any name. The statistics of all batches are aggregated, also over
    micro-batches, devices and processes, before the result is computed: it is that of all examples together. Metrics
    with equal configurations are equal. A metric without keys of its own needs no `config`.

    Args:
        config: its configuration; its keys may be passed as keywords instead, as in `num_classes=10`.

    >>> class Bias(MetricInterface):
    ...     def statistics(self, outputs, targets, weights=None):
    ...         weights = weights_of(weights, outputs.shape)
    ...         return jnp.stack([weighted_sum(outputs - targets, weights), weights.sum()])
    ...
    ...     def compute(self, statistics):
    ...         return float(statistics[0] / statistics[1])
    >>> Bias().value(np.array([1.0, 2.0]), np.array([0.0, 4.0]))
    -0.5

    Attributes:
        mode: how statistics are aggregated: "sum", or "concat" along their first axis.
        results: the keys of the result, if `compute` returns a dict.
    """

    config: Any
    config_class = MetricConfig
    mode: ClassVar[Literal["sum", "concat"]] = "sum"
    results: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """A metric without keys of its own has those of its base class, in a configuration of its own name."""
        super().__init_subclass__(**options)
        annotation = inspect.get_annotations(cls, eval_str=True).get("config", Any)
        if annotation is not Any:
            cls.config_class = annotation
        elif "config_class" not in vars(cls):
            namespace = {"__doc__": f"Configuration of `{cls.__name__}`.", "__module__": cls.__module__}
            cls.config_class = make_dataclass(
                f"{cls.__name__}Config", (), bases=(cls.config_class,), namespace=namespace
            )

    def __init__(self, config: Any = None, **settings: Any) -> None:
        if config is not None and settings:
            raise TypeError(
                f"`{type(self).__name__}` takes either `config` or keywords: move {', '.join(settings)} into it."
            )
        if config is None:
            check_keywords(type(self).__name__, settings, keywords_of(self.config_class) or settings)
        self.config = self.config_class(**settings) if config is None else config

    def __call__(self, outputs: Any, targets: Any, weights: Any = None) -> dict[str, Any]:
        """The entry of this metric in the metrics of a loss.

        Args:
            outputs: of the model.
            targets: what they should be.
            weights: the mask or the weights of a batch: one entry per example, or per value; None: all count alike.
        """
        outputs, targets = jax.tree.map(jnp.asarray, (outputs, targets))
        statistics = self.statistics(jax.lax.stop_gradient(outputs), targets, weights)
        options = {"log_mode": self.config.log_mode, "log_freq": self.config.log_freq}
        return {"value": statistics, "mode": self.mode, "compute": Computation(self), **options}

    def value(self, outputs: Any, targets: Any, weights: Any = None) -> Any:
        """The result for these arrays alone, outside of a training."""
        return self.compute(compiled_statistics(self, outputs, targets, weights))

    def statistics(self, outputs: jax.Array, targets: jax.Array, weights: Any = None) -> jax.Array:
        """The statistics of a batch; traced. Integers stay exact."""
        raise NotImplementedError(f"{type(self).__name__} has no `statistics`.")

    def compute(self, statistics: np.ndarray) -> float | np.ndarray | Mapping[str, float]:
        """The result of aggregated statistics, on the host."""
        raise NotImplementedError(f"{type(self).__name__} has no `compute`.")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.config == getattr(other, "config", None)

    def __hash__(self) -> int:
        return hash((type(self), self.config))

    def __repr__(self) -> str:
        keys = ", ".join(f"{name}={value!r}" for name, value in self.config.stored().items())
        return f"{type(self).__name__}({keys})"


def _of_arrays(outputs: Any, targets: Any, weights: Any, *, metric: MetricInterface) -> jax.Array:
    return metric.statistics(outputs, targets, weights)


_compiled = compiled_function(_of_arrays, static=("metric",))


def compiled_statistics(metric: MetricInterface, outputs: Any, targets: Any, weights: Any) -> np.ndarray:
    """The statistics of arrays, as `compute` takes them."""
    return np.asarray(_compiled(outputs, targets, weights, metric=metric), np.float64)


@dataclass(frozen=True)
class Computation:
    """The `compute` of a metric as a function that is equal to that of an equal metric."""

    metric: MetricInterface

    def __call__(self, statistics: np.ndarray) -> Any:
        """The result of the metric."""
        return self.metric.compute(statistics)

    @property
    def results(self) -> tuple[str, ...]:
        """The keys of the result, if it is a dict."""
        return self.metric.results


def weights_of(weights: Any, shape: tuple[int, ...]) -> jax.Array:
    """One weight for each value of an array of this shape: int32 for a mask and without weights, float32 for others.

    >>> weights_of(np.array([True, False]), (2, 2)).tolist()
    [[1, 1], [0, 0]]
    """
    if weights is None:
        return jnp.ones(shape, jnp.int32)
    weights = mask_of_values(weights, shape)
    return weights.astype(jnp.float32 if jnp.issubdtype(weights.dtype, jnp.floating) else jnp.int32)


def weighted_sum(values: jax.Array, weights: jax.Array, axis: int | None = None) -> jax.Array:
    """The sum of `values` with these weights; values of weight 0 may be NaN."""
    # select, never multiply by 0: 0 * nan is nan
    return jnp.where(weights > 0, values * weights.astype(values.dtype), 0).sum(axis)


def ratio(numerator: Any, denominator: Any, empty: float = np.nan) -> np.ndarray:
    """The quotient; `empty` where the denominator is 0.

    >>> ratio(np.array([1.0, 2.0]), np.array([4.0, 0.0]), empty=0.0).tolist()
    [0.25, 0.0]
    """
    numerator, denominator = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(denominator == 0, empty, numerator / denominator)
