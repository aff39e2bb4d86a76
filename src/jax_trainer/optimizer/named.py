"""Every other optimizer of optax by its name: `Adam`, `Lion`, `Muon`, `Adafactor`, …

There is one class per optimizer, with a configuration made from its signature: its keywords, their types and
defaults. What cannot be written in a file (functions, masks, other optimizers) is left out. A `weight_decay` that
optax restricts by a mask takes a number (for kernels and weights) or a section, as that of `AdamW`; any other
`weight_decay` is a number for all parameters, as in optax.

The list is computed from the public names of `optax` and `optax.contrib` that take a learning rate; nothing else
can be named. Left out are those that need more than gradients, parameters and the loss, with the reason in
`LEFT_OUT`; each of the others makes its updates inside the compiled step in the tests.

The learning rate is 1e-3 where optax gives no number. What it means for optimizers that find their own step is in
`RATES_OF_THEIR_OWN`; `Cocob` finds it whatever the rate, so there no other value than 1.0 is accepted. Those that
take no schedule (`Rprop`, `Sm3`) want a number.
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

BY_HAND = {"sgd": "SGD", "adamw": "AdamW", "lamb": "Lamb"}
IGNORES_RATE = {"cocob"}
_FACTOR = "a factor for the step that it finds: a number or a schedule."
RATES_OF_THEIR_OWN = {
    "cocob": "only 1.0: its step does not depend on it.",
    "dadapt_adamw": _FACTOR,
    "dog": _FACTOR,
    "dowg": _FACTOR,
    "momo": "the largest step: a number or a schedule.",
    "momo_adam": "the largest step: a number or a schedule.",
    "polyak_sgd": f"optax's `scaling`, {_FACTOR}",
    "prodigy": _FACTOR,
    "rprop": "the size of the first step: a number.",
    "sm3": "a number.",
}
LEFT_OUT = {
    "lbfgs": "its line search finds the step size itself; in Python, pass `optimizer=optax.lbfgs()`",
    "optimistic_adam": "optax has replaced it by `optimistic_adam_v2`",
    "dpsgd": "it needs the gradient of every single example",
    "schedule_free": "it wraps another optimizer",
    "schedule_free_adamw": "the weights to evaluate are others than those it trains",
    "schedule_free_sgd": "the weights to evaluate are others than those it trains",
    "sophia": "it evaluates the loss again, to estimate curvature",
}


@dataclass
class NamedConfig(BaseOptimizerConfig):
    """The keys that every optimizer has."""

    facts: ClassVar[Facts]

    def problems(self) -> Iterator[Problem]:
        """A learning rate that the optimizer would ignore, or cannot follow."""
        yield from super().problems()
        name = self.facts.name
        if name in IGNORES_RATE and (self.learning_rate != 1.0 or self.groups):
            key = "groups" if self.groups else "learning_rate"
            yield key, f"optax's `{name}` finds its own step, whatever the learning rate. Leave `{key}` out."
        for group, config in self.groups.items():
            if isinstance(config.learning_rate, Settings) and not self.facts.takes_schedule:
                text = f"optax's `{name}` takes no schedule, but the group {group!r} has one. Use a number."
                yield f"groups.{group}.learning_rate", text


class NamedOptimizer(OptimizerInterface):
    """An optimizer of optax, called with the keys of its configuration."""

    facts: ClassVar[Facts]

    def decays(self) -> Mapping[str, WeightDecay]:
        """Its weight decay, where optax restricts it by a mask."""
        key = self.facts.decay
        return {key: as_weight_decay(getattr(self.config, key))} if key else {}

    def transform(self, learning_rate: Rate) -> optax.GradientTransformation:
        """What optax makes of the keys."""
        arguments = {key.name: _argument(getattr(self.config, key.name)) for key in self.facts.keys}
        for key, decay in self.decays().items():
            # null is not 0: it leaves the decay out of the chain
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
    if facts.name in RATES_OF_THEIR_OWN:
        helps["learning_rate"] = RATES_OF_THEIR_OWN[facts.name]
    args = "\n".join(f"    {key}: {text}" for key, text in helps.items())
    doc = f"How optax's `{facts.name}` steps. {about}\n\nArgs:\n{args}"
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
    out = {*BY_HAND, *LEFT_OUT}
    return {
        name: thing
        for name, thing in sorted(public.items())
        if not name.startswith(("_", "scale_by")) and name not in out and is_optimizer(thing)
    }


_CLASSES = [_optimizer_class(facts_of(name, factory)) for name, factory in _public_optimizers().items()]

NAMED: Mapping[str, type[NamedOptimizer]] = MappingProxyType({made.__name__: made for made in _CLASSES})


def __getattr__(name: str) -> Any:
    """`named.Lion`, `named.LionConfig`, and so on, so that they can be imported."""
    made = NAMED.get(name) or NAMED.get(name.removesuffix("Config"))
    if made is None:
        raise AttributeError(f"optax has no optimizer for the name {name!r} here. There are {', '.join(NAMED)}.")
    return made if name in NAMED else made.config_class
