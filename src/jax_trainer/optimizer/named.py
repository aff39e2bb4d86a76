"""Every other optimizer of optax by its name: `Adam`, `Lion`, `Muon`, `Adafactor`, …

There is one class per optimizer, with a configuration derived from its signature: its keywords, their types and
defaults. Arguments that a file cannot contain (functions, masks, other optimizers) are omitted. A `weight_decay` that
optax restricts by a mask is a number (for kernels and weights) or a section, as in `AdamW`; any other `weight_decay` is
a number for all parameters, as in optax.

The list is computed from the public names of `optax` and `optax.contrib` that take a learning rate. Those that need
more than gradients, parameters and the loss are excluded, with the reason in `EXCLUDED`; the tests run all others
inside a compiled step.

The default learning rate is 1e-3 if optax has none. Its meaning for optimizers that estimate their own step size is in
`SPECIAL_LEARNING_RATES`; `Cocob` ignores it, so only 1.0 is accepted. Those that take no schedule (`Rprop`, `Sm3`) need
a number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import optax
import optax.contrib
from compoconf import register

from jax_trainer.optimizer.elementary import ScheduleInterface
from jax_trainer.optimizer.optimizer import BaseOptimizerConfig, OptimizerInterface, Rate
from jax_trainer.optimizer.signatures import Facts, described, facts_of, is_optimizer
from jax_trainer.optimizer.transforms import WeightDecay, as_weight_decay
from jax_trainer.settings import AtLeast, Problem, Settings

EXPLICIT = {"sgd": "SGD", "adamw": "AdamW", "lamb": "Lamb"}
IGNORES_RATE = {"cocob"}
_FACTOR = "a factor for the estimated step size: a number or a schedule."
SPECIAL_LEARNING_RATES = {
    "cocob": "only 1.0: the step size does not depend on it.",
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
    "lbfgs": "its line search determines the step size; in Python, pass `optimizer=optax.lbfgs()`",
    "optimistic_adam": "deprecated by optax in favour of `optimistic_adam_v2`",
    "dpsgd": "it needs per-example gradients",
    "schedule_free": "it wraps another optimizer",
    "schedule_free_adamw": "its evaluation weights differ from its training weights",
    "schedule_free_sgd": "its evaluation weights differ from its training weights",
    "sophia": "it evaluates the loss again to estimate the Hessian",
}


@dataclass
class NamedConfig(BaseOptimizerConfig):
    """The keys of every optimizer."""

    facts: ClassVar[Facts]

    def problems(self) -> Iterator[Problem]:
        """Reports a learning rate that the optimizer ignores, and a schedule that it does not support."""
        yield from super().problems()
        name = self.facts.name
        if name in IGNORES_RATE and (self.learning_rate != 1.0 or self.groups):
            key = "groups" if self.groups else "learning_rate"
            yield key, f"optax's `{name}` ignores the learning rate. Remove `{key}`."
        for group, config in self.groups.items():
            if isinstance(config.learning_rate, Settings) and not self.facts.takes_schedule:
                text = f"optax's `{name}` takes no schedule, but the group {group!r} has one. Use a number."
                yield f"groups.{group}.learning_rate", text


class NamedOptimizer(OptimizerInterface):
    """An optimizer of optax, with its arguments from the configuration."""

    facts: ClassVar[Facts]

    def decays(self) -> Mapping[str, WeightDecay]:
        key = self.facts.decay
        return {key: as_weight_decay(getattr(self.config, key))} if key else {}

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        arguments = {key.name: _argument(getattr(self.config, key.name)) for key in self.facts.keys}
        for key, decay in self.decays().items():
            # null is not 0: it omits the decay from the chain
            arguments[key] = None if arguments[key] is None else decay.config.value
            arguments[self.facts.mask] = decay.mask
        return self.facts.factory(**{self.facts.rate: learning_rate}, **arguments)


def _argument(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _config_class(name: str, facts: Facts) -> type[NamedConfig]:
    number = Annotated[float, AtLeast(0)]
    hint = number | ScheduleInterface.cfgtype if facts.takes_schedule else number
    rate = ("learning_rate", hint, 1e-3 if facts.default_rate is None else facts.default_rate)
    about, lines = described(facts.factory)
    helps = {key.name: lines.get(key.name) or "see optax." for key in facts.keys}
    if facts.name in SPECIAL_LEARNING_RATES:
        helps["learning_rate"] = SPECIAL_LEARNING_RATES[facts.name]
    args = "\n".join(f"    {key}: {text}" for key, text in helps.items())
    doc = f"Configuration of optax's `{facts.name}`. {about}\n\nArgs:\n{args}"
    namespace = {"facts": facts, "__doc__": doc, "__module__": __name__}
    return make_dataclass(f"{name}Config", [rate, *facts.keys], bases=(NamedConfig,), namespace=namespace)


def _optimizer_class(facts: Facts) -> type[NamedOptimizer]:
    name = "".join(word.capitalize() for word in facts.name.split("_"))
    config = _config_class(name, facts)
    doc = f"optax's `{facts.name}`: {described(facts.factory)[0]}"
    namespace = {"facts": facts, "config_class": config, "__doc__": doc, "__module__": __name__}
    return register(type(name, (NamedOptimizer,), {**namespace, "__annotations__": {"config": config}}))


def _public_optimizers() -> dict[str, Any]:
    public = {**vars(optax.contrib), **vars(optax)}
    out = {*EXPLICIT, *EXCLUDED}
    return {
        name: thing
        for name, thing in sorted(public.items())
        if not name.startswith(("_", "scale_by")) and name not in out and is_optimizer(thing)
    }


_CLASSES = [_optimizer_class(facts_of(name, factory)) for name, factory in _public_optimizers().items()]

NAMED: Mapping[str, type[NamedOptimizer]] = MappingProxyType({one.__name__: one for one in _CLASSES})


def __getattr__(name: str) -> Any:
    """Makes `named.Lion`, `named.LionConfig` and so on importable."""
    found = NAMED.get(name) or NAMED.get(name.removesuffix("Config"))
    if found is None:
        raise AttributeError(f"No optimizer {name!r} here. Available: {', '.join(NAMED)}.")
    return found if name in NAMED else found.config_class
