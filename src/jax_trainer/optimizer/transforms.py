"""Gradient transforms, before or after the optimizer: weight decay and clipping.

In this package, parameters are selected by regular expressions, matched from the start of their dotted path
(`re.match`), such as `encoder.layers.0.kernel`: `encoder` matches all of the encoder, `.*kernel$` every kernel. An
empty expression matches none.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import optax
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.config.settings import Above, AtLeast, IsRegex, Problem, Settings, SettingsError
from jax_trainer.core import PyTree
from jax_trainer.diagnostics.leaves import leaf_path, listed

KERNELS = "((.*weight$)|(.*kernel$))"


def is_match(regex: str, path: str) -> bool:
    """Whether `regex` matches the parameter at `path`.

    >>> is_match("encoder", "encoder.kernel"), is_match("kernel", "encoder.kernel"), is_match("", "encoder.kernel")
    (True, False, False)
    """
    return bool(regex) and re.match(regex, path) is not None


def require_match(key: str, regex: str, paths: Sequence[str], *, among: str = "parameter") -> None:
    """Raises if the expression of the key `key` matches none of `paths`."""
    if any(is_match(regex, path) for path in paths):
        return
    hint = (
        "" if regex.startswith(".*") else " It is matched from the start of the path: prepend '.*' to match anywhere."
    )
    raise SettingsError([(key, f"`{key}` {regex!r} matches no {among} of: {listed(paths)}.{hint}")])


@dataclass
class GradientTransformConfig(Settings):
    """The keys of every gradient transform.

    Args:
        before_optimizer: transform the gradients; false: transform the updates of the optimizer.
    """

    before_optimizer: bool = True


@register_interface
class GradientTransformInterface(RegistrableConfigInterface):
    """A transform of gradients or updates, built from its configuration."""

    config: Any  # a subclass of `GradientTransformConfig`

    def __init__(self, config: GradientTransformConfig) -> None:
        self.config = config

    def build(self) -> optax.GradientTransformation:
        """The optax transformation; its `update` may take `learning_rates`, a pytree of one per parameter."""
        raise NotImplementedError(f"{type(self).__name__} has no `build`.")

    def check_paths(self, paths: Sequence[str]) -> None:
        """Raises a `SettingsError` if it has no effect on trained parameters with these paths."""


@dataclass
class WeightDecayConfig(GradientTransformConfig):
    """Configuration of `WeightDecay`: the strength, and the parameters that decay.

    As a transform it is L2 regularisation (it adds `value` × parameter to the gradient) or, with
    `before_optimizer: false`, decoupled (it subtracts learning rate × `value` × parameter from the update). As the
    `weight_decay` of an optimizer it is passed to that optimizer, and `before_optimizer` has no effect.

    Args:
        value: strength of the weight decay; 0 is none.
        mode: whitelist: parameters that `parameter_regex_include` matches; blacklist: all. Both without excluded ones.
        parameter_regex_include: parameters that decay, matched from the start of the dotted path; whitelist only.
        parameter_regex_exclude: parameters that do not decay; empty: none is excluded.
    """

    value: Annotated[float, AtLeast(0)] = 0.0
    mode: Literal["whitelist", "blacklist"] = "whitelist"
    parameter_regex_include: Annotated[str, IsRegex()] = KERNELS
    parameter_regex_exclude: Annotated[str, IsRegex()] = ""

    def problems(self) -> Iterator[Problem]:
        """Reports a `parameter_regex_include` that is ignored or empty."""
        key, regex = "parameter_regex_include", self.parameter_regex_include
        if self.mode == "blacklist" and regex != KERNELS:
            text = f"`{key}` {regex!r} has no effect with `mode: blacklist`. "
            yield key, text + "Remove it, or use `mode: whitelist`."
        if self.mode == "whitelist" and not regex:
            yield key, f"`{key}` is empty. Write '.*' for all parameters, or `value: 0` for no decay."


@register
class WeightDecay(GradientTransformInterface):
    """Weight decay: L2 regularisation of the gradient or, after the optimizer, decoupled."""

    config: WeightDecayConfig

    def decays(self, path: str) -> bool:
        """Whether the parameter at `path` decays."""
        config = self.config
        included = config.mode == "blacklist" or is_match(config.parameter_regex_include, path)
        return included and not is_match(config.parameter_regex_exclude, path)

    def mask(self, params: PyTree) -> PyTree:
        """The optax mask: True for every parameter that decays."""
        return jax.tree_util.tree_map_with_path(lambda path, _: self.decays(leaf_path(path)), params)

    def build(self) -> optax.GradientTransformation:
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
        config = self.config
        if not config.value:
            return
        if config.mode == "whitelist":
            require_match("parameter_regex_include", config.parameter_regex_include, paths, among="trained parameter")
        if config.parameter_regex_exclude:
            require_match("parameter_regex_exclude", config.parameter_regex_exclude, paths, among="trained parameter")
        if not any(map(self.decays, paths)):
            text = f"Weight decay {config.value:g} applies to no trained parameter of: {listed(paths)}. "
            raise SettingsError([("value", text + "Exclude fewer, or set it to 0.")])


def as_weight_decay(value: float | WeightDecayConfig | None) -> WeightDecay:
    """The `WeightDecay` of an optimizer's `weight_decay`: a number is the strength for kernels and weights."""
    return WeightDecay(value if isinstance(value, WeightDecayConfig) else WeightDecayConfig(value=value or 0.0))


@dataclass
class GradClipNormConfig(GradientTransformConfig):
    """Configuration of `GradClipNorm`.

    Args:
        max_norm: maximum global norm over all trained parameters.
    """

    max_norm: Annotated[float, Above(0)] = 1e8


@register
class GradClipNorm(GradientTransformInterface):
    """Clips gradients by their global norm."""

    config: GradClipNormConfig

    def build(self) -> optax.GradientTransformation:
        return optax.clip_by_global_norm(self.config.max_norm)


@dataclass
class GradClipValueConfig(GradientTransformConfig):
    """Configuration of `GradClipValue`.

    Args:
        max_delta: maximum absolute value of each element.
    """

    max_delta: Annotated[float, Above(0)] = 1e8


@register
class GradClipValue(GradientTransformInterface):
    """Clips gradients elementwise to ± `max_delta`."""

    config: GradClipValueConfig

    def build(self) -> optax.GradientTransformation:
        return optax.clip(self.config.max_delta)
