"""Every other optimizer of optax by its name: `Adam`, `Lion`, `Muon`, `Adafactor`, …

There is one class per optimizer, with a configuration derived from its signature: its keywords, their types and
defaults. Arguments that a file cannot contain (functions, masks, other optimizers) are omitted. A `weight_decay` that
optax restricts by a mask is a number (for kernels and weights) or a section, as in `AdamW`; any other `weight_decay` is
a number for all parameters, as in optax.

The list is computed from the public names of `optax` and `optax.contrib` that take a learning rate. Those that need
more than gradients, parameters and the loss are excluded, with the reason in `EXCLUDED`; the tests run all others
inside a compiled step.

The default learning rate is 1e-3 if optax has none. Its meaning for optimizers that estimate their own step size is in
`SPECIAL_LEARNING_RATES`. Those that take no schedule (`Rprop`, `Sm3`) need
a number.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from functools import partial
from itertools import zip_longest
from textwrap import dedent
from types import FunctionType, MappingProxyType, NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import jax.numpy as jnp
import optax
import optax.contrib
from compoconf import register

from jax_trainer.config.settings import AtLeast, Problem, Settings, options
from jax_trainer.optimizer.optimizer import (
    DECAYS,
    MASKS,
    RATES,
    BaseOptimizerConfig,
    Factory,
    IsFloatType,
    OptaxOptimizer,
    argument_of,
    arguments_of,
)
from jax_trainer.optimizer.scheduler import ScheduleInterface
from jax_trainer.optimizer.transforms import WeightDecayConfig

EXPLICIT = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "lamb": "Lamb",
    "lbfgs": "LBFGS",
    "schedule_free_adamw": "ScheduleFreeAdamW",
    "schedule_free_sgd": "ScheduleFreeSGD",
}
_FACTOR = "a factor for the estimated step size: a number or a schedule."
SPECIAL_LEARNING_RATES = {
    "dadapt_adamw": _FACTOR,
    "dog": _FACTOR,
    "dowg": _FACTOR,
    "momo": "the maximum step size: a number or a schedule.",
    "momo_adam": "the maximum step size: a number or a schedule.",
    "polyak_sgd": f"optax's `scaling`, {_FACTOR}",
    "prodigy": _FACTOR,
    "rprop": "the initial step size: a number.",
    "sm3": "a number.",
}
EXCLUDED = {
    "optimistic_adam": "deprecated by optax in favour of `optimistic_adam_v2`",
    "cocob": "it ignores the learning rate",
    "dpsgd": "it needs per-example gradients",
    "sophia": "it needs the loss as a function of the parameters, under another name",
    "schedule_free": "it wraps another optimizer; `ScheduleFreeAdamW` and `ScheduleFreeSGD` are available",
}


NUMBER = Annotated[float, AtLeast(0)]
FLOAT_TYPE: Any = Annotated[str, IsFloatType()]
# masks follow from `weight_decay`; the others have numeric defaults but are pytrees, or are deprecated
UNWRITABLE = {*MASKS, "trust_ratio_mask", "weight_dimension_numbers", "muon_weight_dimension_numbers", "seed"}
CHOICES = {"variant": Literal["sps", "sps+"], "weight_decay": NUMBER, "adam_weight_decay": NUMBER}

Key = tuple[str, Any, Any]  # of a configuration: name, annotation and default


class Facts(NamedTuple):
    """The properties of an optax optimizer, from its signature."""

    name: str
    default_rate: float | None  # None: optax has no default
    takes_schedule: bool
    keys: tuple[Key, ...]  # arguments that a file can contain, without the learning rate


@dataclass
class NamedConfig(BaseOptimizerConfig):
    """The keys of every optimizer."""

    facts: ClassVar[Facts]

    def problems(self) -> Iterator[Problem]:
        """Reports a schedule that the optimizer does not support."""
        yield from super().problems()
        for group, config in self.groups.items():
            if isinstance(config.learning_rate, Settings) and not self.facts.takes_schedule:
                text = f"optax's `{self.facts.name}` takes no schedule, but the group {group!r} has one. Use a number."
                yield f"groups.{group}.learning_rate", text


class NamedOptimizer(OptaxOptimizer):
    """An optimizer of optax, with its arguments from the configuration."""

    facts: ClassVar[Facts]


def _facts(name: str, factory: Factory) -> Facts:
    arguments, rate = arguments_of(factory), argument_of(factory, RATES)
    default, kinds = arguments[rate].default, options(arguments[rate].annotation)
    decay = argument_of(factory, DECAYS) if argument_of(factory, MASKS) else ""
    keys = (key for one in arguments.values() if one.name not in UNWRITABLE | {rate} for key in _keys(one, decay))
    takes_schedule = any(get_origin(kind) is Callable for kind in kinds)
    return Facts(name, default if isinstance(default, float) else None, takes_schedule, tuple(keys))


def _keys(argument: inspect.Parameter, decay: str) -> Iterator[Key]:
    """The key of an argument; none if a file cannot contain its values."""
    name, default = argument.name, argument.default
    if name == decay:
        hint = NUMBER | WeightDecayConfig
        yield name, hint | None if default is None else hint, default
    elif "dtype" in name:
        text = None if default is None else str(jnp.dtype(default))
        yield name, FLOAT_TYPE if text else FLOAT_TYPE | None, text
    elif name == "key":  # a random key, made from an integer
        yield name, int, 0
    else:
        hint = CHOICES.get(name) or _hint(argument.annotation, default)
        if hint is not None:
            yield name, hint, default


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


def _described(factory: Factory) -> tuple[str, dict[str, str]]:
    """The first sentence of the docstring, and of the description of each argument."""
    head, _, rest = (inspect.getdoc(factory) or "").partition("\nArgs:\n")
    section = dedent(re.split(r"\n(?=\S)", rest)[0])
    entries = re.split(r"^(?=\w+:)", section, flags=re.MULTILINE)[1:]
    pairs = (entry.partition(":") for entry in entries)
    return _sentence(head), {name: _sentence(line) for name, _, line in pairs}


def _sentence(text: str) -> str:
    plain = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split())).replace("``", "`")
    return re.split(r"(?<=[.!?]) (?=[A-Z])", plain)[0]


def _optimizer_class(optax_name: str, factory: Factory) -> type[NamedOptimizer]:
    facts, (about, lines) = _facts(optax_name, factory), _described(factory)
    name = "".join(word.capitalize() for word in optax_name.split("_"))
    hint = NUMBER | ScheduleInterface.cfgtype if facts.takes_schedule else NUMBER
    rate = ("learning_rate", hint, 1e-3 if facts.default_rate is None else facts.default_rate)
    helps = {key: lines.get(key) or "see optax." for key, _, _ in facts.keys}
    if facts.name in SPECIAL_LEARNING_RATES:
        helps["learning_rate"] = SPECIAL_LEARNING_RATES[facts.name]
    args = "\n".join(f"    {key}: {text}" for key, text in helps.items())
    doc = f"Configuration of optax's `{facts.name}`. {about}\n\nArgs:\n{args}"
    namespace = {"facts": facts, "__doc__": doc, "__module__": __name__}
    config = make_dataclass(f"{name}Config", [rate, *facts.keys], bases=(NamedConfig,), namespace=namespace)
    namespace = {"facts": facts, "factory": staticmethod(factory), "config_class": config, "__module__": __name__}
    namespace |= {"__doc__": f"optax's `{optax_name}`: {about}", "__annotations__": {"config": config}}
    return register(type(name, (NamedOptimizer,), namespace))


def _public_optimizers() -> dict[str, Any]:
    public = {**vars(optax.contrib), **vars(optax)}
    out = {*EXPLICIT, *EXCLUDED}
    return {
        name: thing
        for name, thing in sorted(public.items())
        if not name.startswith(("_", "scale_by")) and name not in out and _is_optimizer(thing)
    }


def _is_optimizer(thing: Any) -> bool:
    """Whether `thing` is a function that can be called with only a learning rate."""
    if not isinstance(thing, FunctionType | partial):
        return False
    signature = inspect.signature(thing)
    rate = next((name for name in RATES if name in signature.parameters), None)
    try:
        return rate is not None and bool(signature.bind(**{rate: 1.0}))
    except TypeError:  # it needs other arguments
        return False


_CLASSES = [_optimizer_class(name, factory) for name, factory in _public_optimizers().items()]

NAMED: Mapping[str, type[NamedOptimizer]] = MappingProxyType({one.__name__: one for one in _CLASSES})


def __getattr__(name: str) -> Any:
    """Makes `named.Lion`, `named.LionConfig` and so on importable."""
    found = NAMED.get(name) or NAMED.get(name.removesuffix("Config"))
    if found is None:
        raise AttributeError(f"No optimizer {name!r} here. Available: {', '.join(NAMED)}.")
    return found if name in NAMED else found.config_class
