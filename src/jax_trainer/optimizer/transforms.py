"""What happens to gradients before the optimizer, or to its updates after it: weight decay and clipping."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import optax
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.core import PyTree, leaf_path
from jax_trainer.optimizer.selection import is_match, listed, require_match
from jax_trainer.settings import Above, AtLeast, IsRegex, Problem, Settings, SettingsError

KERNELS = "((.*weight$)|(.*kernel$))"


@dataclass
class GradientTransformConfig(Settings):
    """The key that every transform has.

    Args:
        before_optimizer: act on the gradients; false: on the updates that the optimizer makes of them.
    """

    before_optimizer: bool = True


@register_interface
class GradientTransformInterface(RegistrableConfigInterface):
    """Something done to gradients or updates, made from its configuration."""

    config: Any  # the class of a transform's own configuration, which derives from `GradientTransformConfig`

    def __init__(self, config: GradientTransformConfig) -> None:
        self.config = config

    def build(self) -> optax.GradientTransformation:
        """The transformation; it may take `learning_rates`, a tree with the rate of every parameter."""
        raise NotImplementedError(f"{type(self).__name__} has no `build`.")

    def check_paths(self, paths: Sequence[str]) -> None:
        """Raises `SettingsError` if trained parameters of these names give it nothing to do."""


@dataclass
class WeightDecayConfig(GradientTransformConfig):
    """Which parameters decay, and how fast.

    As a transform it is L2 regularisation (it adds `value` × parameter to the gradient) or, with
    `before_optimizer: false`, decoupled (it subtracts learning rate × `value` × parameter from the update). As the
    `weight_decay` of an optimizer it is what that optimizer makes of it, and `before_optimizer` has no effect.

    Args:
        value: the strength; 0 is none.
        mode: whitelist: what `parameter_regex_include` matches; blacklist: everything. Both without what is excluded.
        parameter_regex_include: which parameters decay, by their dotted path from its start; only for the whitelist.
        parameter_regex_exclude: which parameters do not; empty: no exception.
    """

    value: Annotated[float, AtLeast(0)] = 0.0
    mode: Literal["whitelist", "blacklist"] = "whitelist"
    parameter_regex_include: Annotated[str, IsRegex()] = KERNELS
    parameter_regex_exclude: Annotated[str, IsRegex()] = ""

    def problems(self) -> Iterator[Problem]:
        """An `include` that would be ignored, or that says nothing."""
        key, regex = "parameter_regex_include", self.parameter_regex_include
        if self.mode == "blacklist" and regex != KERNELS:
            text = f"`{key}` {regex!r} has no effect with `mode: blacklist`. "
            yield key, text + "Leave it out, or use `mode: whitelist`."
        if self.mode == "whitelist" and not regex:
            yield key, f"`{key}` is empty. Write '.*' for all parameters, or `value: 0` for no decay."


@register
class WeightDecay(GradientTransformInterface):
    """Pulls parameters towards zero: in the gradient (L2) or, after the optimizer, decoupled from it."""

    config: WeightDecayConfig

    def decays(self, path: str) -> bool:
        """Whether the parameter at `path` decays."""
        config = self.config
        included = config.mode == "blacklist" or is_match(config.parameter_regex_include, path)
        return included and not is_match(config.parameter_regex_exclude, path)

    def mask(self, params: PyTree) -> PyTree:
        """True for every parameter that decays, as optax takes it."""
        return jax.tree_util.tree_map_with_path(lambda path, _: self.decays(leaf_path(path)), params)

    def build(self) -> optax.GradientTransformation:
        """Adds to gradients or, after the optimizer, subtracts from updates."""
        if self.config.before_optimizer:
            return optax.add_decayed_weights(self.config.value, mask=self.mask)
        return optax.GradientTransformationExtraArgs(optax.init_empty_state, self._decoupled)

    def _decoupled(
        self,
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        learning_rates: PyTree = None,
        **extra: object,
    ) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError("Weight decay needs the parameters: call `update(grads, state, params)`.")

        def decayed(path: tuple, update: jax.Array, rate: jax.Array, param: jax.Array) -> jax.Array:
            if not self.decays(leaf_path(path)):
                return update
            return update - (rate * self.config.value * param).astype(update.dtype)

        return jax.tree_util.tree_map_with_path(decayed, updates, learning_rates, params), state

    def check_paths(self, paths: Sequence[str]) -> None:
        """Refuses expressions that match nothing, and a decay that touches nothing."""
        config = self.config
        if not config.value:
            return
        if config.mode == "whitelist":
            require_match("parameter_regex_include", config.parameter_regex_include, paths, among="trained parameter")
        if config.parameter_regex_exclude:
            require_match("parameter_regex_exclude", config.parameter_regex_exclude, paths, among="trained parameter")
        if not any(map(self.decays, paths)):
            text = f"Weight decay {config.value:g} leaves out every trained parameter: {listed(paths)}. "
            raise SettingsError([("value", text + "Exclude fewer, or set it to 0.")])


def as_weight_decay(value: float | WeightDecayConfig | None) -> WeightDecay:
    """What an optimizer's `weight_decay` means: a number is the strength for kernels and weights."""
    return WeightDecay(value if isinstance(value, WeightDecayConfig) else WeightDecayConfig(value=value or 0.0))


@dataclass
class GradClipNormConfig(GradientTransformConfig):
    """How large gradients may be together.

    Args:
        max_norm: the largest global norm, over all trained parameters; a larger one is scaled down to it.
    """

    max_norm: Annotated[float, Above(0)] = 1e8


@register
class GradClipNorm(GradientTransformInterface):
    """Scales everything down to a global norm of at most `max_norm`."""

    config: GradClipNormConfig

    def build(self) -> optax.GradientTransformation:
        """Clips by the norm over all trained parameters."""
        return optax.clip_by_global_norm(self.config.max_norm)


@dataclass
class GradClipValueConfig(GradientTransformConfig):
    """How large every single number may be.

    Args:
        max_delta: the largest absolute value.
    """

    max_delta: Annotated[float, Above(0)] = 1e8


@register
class GradClipValue(GradientTransformInterface):
    """Cuts every number at ± `max_delta`."""

    config: GradClipValueConfig

    def build(self) -> optax.GradientTransformation:
        """Clips number by number."""
        return optax.clip(self.config.max_delta)
