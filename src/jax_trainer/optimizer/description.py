"""What is known of an optax optimizer: its name, its constants, and its learning rate.

An optax optimizer is two functions; what it was made from is in their closures, by the names of optax's arguments.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compoconf import ConfigInterface

from jax_trainer.core.compile import compiled_function
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.optimizer.reported import DEFAULT

RATE = "learning_rate"
_SCALES, _INJECTED = ("scale", "scale_by_schedule"), "inject_hyperparams"
# what only joins transformations
_TRANSPARENT = ("chain", "named_chain", "with_extra_args_support", "by_signature", "clipped")
# the functions of optax that are chains of these transformations, without the scale by the learning rate
_NAMES = {
    ("scale_by_adam",): "adam",
    ("scale_by_adam", "add_decayed_weights"): "adamw",
    (): "sgd",
    ("trace",): "sgd",
    ("scale_by_lion", "add_decayed_weights"): "lion",
    ("scale_by_rms",): "rmsprop",
    ("scale_by_rss",): "adagrad",
    ("scale_by_adam", "add_decayed_weights", "scale_by_trust_ratio"): "lamb",
}


class _Part(NamedTuple):
    name: str
    constants: dict[str, Any]
    wraps: bool = False  # whether those after it are inside of it


def described_optimizer(optimizer: Any, total_steps: int | None = None) -> dict[str, Any]:
    """Name, learning rate and other constants of an optimizer, as plain data; a schedule as its value at three steps.

    >>> found = described_optimizer(optax.adam(1e-3))
    >>> found["name"], found["learning_rate"], found["b1"]
    ('adam', 0.001, 0.9)
    """
    optimizer = optimizer.by_name if isinstance(optimizer, Optimizers) else getattr(optimizer, "tx", optimizer)
    if isinstance(optimizer, Mapping):
        return {name: described_optimizer(one, total_steps) for name, one in optimizer.items()}
    if not isinstance(optimizer, optax.GradientTransformation):  # a configuration
        values = dataclasses.asdict(optimizer) if isinstance(optimizer, ConfigInterface) else {}
        given = {name: one for name, one in values.items() if one not in (None, {})}
        return {"name": type(optimizer).__name__, **given}
    parts, rates = [*_parts(optimizer)], learning_rates_in(optimizer)
    names = tuple(one.name for one in parts if not one.wraps and one.name not in (*_SCALES, "identity"))
    named = (_NAMES.get(names),) if len(rates) < 2 and names in _NAMES else names
    found: dict[str, Any] = {"name": ", ".join([*(one.name for one in parts if one.wraps), *map(str, named)])}
    found |= {name: _values(rate, total_steps) if callable(rate) else rate for name, rate in rates.items()}
    constants = {name: value for part in reversed(parts) for name, value in part.constants.items() if name not in found}
    plain = {name: value for name, value in constants.items() if isinstance(value, bool | int | float | str)}
    return {**found, **{name: value for name, value in plain.items() if name != "step_size"}}


def learning_rates_in(optimizer: Any) -> dict[str, Any]:
    """The learning rates of an optimizer, numbers or functions of its update count, by name; empty if unknown."""
    if isinstance(optimizer, Optimizers):
        named = {name: learning_rates_in(one.tx) for name, one in optimizer.by_name.items()}
        return {f"{name}.{rate}": value for name, rates in named.items() for rate, value in rates.items()}
    found: dict[str, Any] = {}
    for part in _parts(optimizer):
        values = part.constants
        if isinstance(values.get("schedules"), Mapping):  # of this library
            return {RATE if name == DEFAULT else f"{RATE}_{name}": one for name, one in values["schedules"].items()}
        rate = values.get("step_size_fn", values.get("step_size", values.get(RATE)))
        if rate is not None and part.name in (*_SCALES, _INJECTED):
            found[f"{RATE}_{len(found) + 1}" if found else RATE] = _positive(getattr(rate, "schedule_fn", rate))
    return found


def _positive(rate: Any) -> Any:
    """A learning rate as the user has passed it: optax subtracts."""
    schedule: Any = rate
    return (lambda count: jnp.abs(schedule(count))) if callable(rate) else abs(float(rate))


def rates_at(rate: Any, updates: Sequence[int]) -> np.ndarray:
    """A learning rate, a number or a function of the update count, at these counts."""
    if not callable(rate):
        return np.full(len(updates), rate)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        # compiled: one by one, its operations would be ten programs
        return np.asarray(compiled_function(jax.vmap(rate))(jnp.asarray(updates, jnp.int32)))


def _values(schedule: Callable[[Any], Any], total_steps: int | None) -> dict[str, float]:
    last = total_steps or 1000
    places = (0, last // 2, last)
    return {f"step {at}": float(f"{rate:.6g}") for at, rate in zip(places, rates_at(schedule, places), strict=True)}


def _parts(optimizer: Any) -> Iterator[_Part]:
    """The transformations that an optimizer is made of, in order, with their constants by name."""
    constants = {**_closure(optimizer.init), **_closure(optimizer.update)}
    inner = [one for value in constants.values() for one in _transformations(value)]
    name = getattr(optimizer.update, "__qualname__", type(optimizer).__name__).partition(".")[0]
    if "numeric_hps" in constants:  # its inner transformation is made anew in each update
        made = getattr(constants.get("inner_factory"), "__name__", "")
        yield _Part(_INJECTED, {**constants["numeric_hps"], **constants.get("sched_hps", {}), "of": made})
        return
    if name not in _TRANSPARENT or not inner:
        yield _Part(name, constants, wraps=bool(inner))
    for one in inner:
        yield from _parts(one)


def _transformations(value: Any) -> list[Any]:
    if isinstance(value, optax.GradientTransformation):
        return [value]
    if isinstance(value, Mapping | list | tuple):
        values = value.values() if isinstance(value, Mapping) else value
        return [one for inner in values for one in _transformations(inner)]
    if inspect.isfunction(value) and value.__name__ in ("update", "update_fn"):  # of a chain
        return [optax.GradientTransformation(lambda params: None, value)]  # type: ignore[arg-type] - only read
    return []


def _closure(function: Any) -> dict[str, Any]:
    """What a function was made from: its free variables, or the attributes of the object that it is a method of."""
    if inspect.ismethod(function):
        return {name: value for name, value in vars(function.__self__).items() if not inspect.isfunction(value)}
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return dict(inspect.getclosurevars(function).nonlocals) if code is not None and cells else {}
