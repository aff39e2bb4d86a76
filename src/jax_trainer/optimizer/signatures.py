"""Derives the keys of a configuration from the signature and the docstring of an optax optimizer."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from textwrap import dedent
from types import FunctionType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import jax.numpy as jnp
import optax

from jax_trainer.optimizer.optimizer import IsFloatType
from jax_trainer.optimizer.transforms import WeightDecayConfig
from jax_trainer.settings import AtLeast, options

Factory = Callable[..., optax.GradientTransformation]
Parameters = Mapping[str, inspect.Parameter]

NUMBER = Annotated[float, AtLeast(0)]
# Polyak SGD estimates its step size, and `scaling` is a factor for it
RATES = ("learning_rate", "scaling")
DECAYS = ("weight_decay", "weight_decay_rate")
MASKS = ("mask", "weight_decay_mask")
# masks follow from `weight_decay`; the others have numeric defaults but are pytrees, or are deprecated
UNWRITABLE = {*MASKS, "trust_ratio_mask", "weight_dimension_numbers", "muon_weight_dimension_numbers", "seed"}
CHOICES = {"variant": Literal["sps", "sps+"], "weight_decay": NUMBER, "adam_weight_decay": NUMBER}
FLOAT_TYPE = Annotated[str, IsFloatType()]


class Key(NamedTuple):
    """A key of a configuration: name, annotation and default."""

    name: str
    hint: Any
    default: Any


class Facts(NamedTuple):
    """The properties of an optax optimizer."""

    name: str
    factory: Factory
    rate: str  # name of its learning rate argument
    default_rate: float | None  # None: optax has no default
    takes_schedule: bool
    decay: str  # name of its weight decay argument that a mask restricts; else empty
    mask: str  # name of its mask argument; else empty
    keys: tuple[Key, ...]  # arguments that a file can contain, without the learning rate


def facts_of(name: str, factory: Factory) -> Facts:
    """The properties of the optimizer `factory`, from its signature."""
    arguments = inspect.signature(factory, eval_str=True).parameters
    rate, decay, mask = (_first(names, arguments) for names in (RATES, DECAYS, MASKS))
    default = arguments[rate].default
    return Facts(
        name,
        factory,
        rate,
        default_rate=default if isinstance(default, float) else None,
        takes_schedule=any(get_origin(option) is Callable for option in options(arguments[rate].annotation)),
        decay=decay if mask else "",
        mask=mask if decay else "",
        keys=tuple(_keys(arguments, rate, decay if mask else "")),
    )


def is_optimizer(thing: Any) -> bool:
    """Whether `thing` is a function whose only required argument is a learning rate."""
    if not isinstance(thing, FunctionType | partial):
        return False
    arguments = inspect.signature(thing).parameters
    rate = _first(RATES, arguments)
    return bool(rate) and all(a.default is not a.empty for name, a in arguments.items() if name != rate)


def _first(names: tuple[str, ...], arguments: Parameters) -> str:
    return next((name for name in names if name in arguments), "")


def _keys(arguments: Parameters, rate: str, decay: str) -> Iterator[Key]:
    for name, argument in arguments.items():
        if name == decay:
            hint = NUMBER | WeightDecayConfig
            yield Key(name, hint | None if argument.default is None else hint, argument.default)
        elif name not in UNWRITABLE | {rate}:
            yield from _key(name, argument)


def _key(name: str, argument: inspect.Parameter) -> Iterator[Key]:
    default = argument.default
    if "dtype" in name:
        text = None if default is None else str(jnp.dtype(default))
        yield Key(name, FLOAT_TYPE if text else FLOAT_TYPE | None, text)
    elif name == "key":  # a random key, made from an integer
        yield Key(name, int, 0)
    else:
        hint = CHOICES.get(name) or _hint(argument.annotation, default)
        if hint is not None:
            yield Key(name, hint, default)


def _hint(annotation: Any, default: Any) -> Any:
    """The annotation of a key; None if a file cannot contain its values, such as functions."""
    alternatives = options(annotation)
    if default is None:
        number = next((number for number in (float, int) if number in alternatives), None)
        return number and number | None
    if type(default) is tuple:
        inside = next((get_args(option) for option in alternatives if get_origin(option) is tuple), ())
        hints = [_hint(part, item) for part, item in zip_longest(inside, default)]
        return None if None in hints else tuple[*hints]  # type: ignore
    if get_origin(annotation) is Literal:
        return annotation
    if type(default) not in (bool, int, float, str):
        return None
    return type(default) | None if NoneType in alternatives else type(default)


def described(factory: Factory) -> tuple[str, dict[str, str]]:
    """The first sentence of the docstring, and of the description of each argument."""
    head, _, rest = (inspect.getdoc(factory) or "").partition("\nArgs:\n")
    section = dedent(re.split(r"\n(?=\S)", rest)[0])
    entries = re.split(r"^(?=\w+:)", section, flags=re.MULTILINE)[1:]
    pairs = (entry.partition(":") for entry in entries)
    return _sentence(head), {name: _sentence(line) for name, _, line in pairs}


def _sentence(text: str) -> str:
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    return re.split(r"(?<=[.!?]) (?=[A-Z])", plain)[0]
