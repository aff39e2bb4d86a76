"""The base classes of registered models, preprocessing and augmentation, one for each library, and `build_model`.

>>> from dataclasses import dataclass
>>> from compoconf import register
>>> @dataclass
... class HalfConfig(BaseModelConfig):
...     outputs: int = 4
>>> @register
... class Half(BaseModelNNX):
...     config: HalfConfig
...
...     def __init__(self, config: HalfConfig, *, exmp_input: Any, rngs: nnx.Rngs) -> None:
...         self.layer = nnx.Linear(exmp_input.shape[-1], config.outputs, rngs=rngs)
>>> model_mode(HalfConfig())
'nnx'
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import jax
from compoconf import ConfigInterface, RegistrableConfigInterface, Registry, register, register_interface, registered
from flax import linen as nn
from flax import nnx

from jax_trainer.config.registration import same_section
from jax_trainer.config.settings import SettingsError, ValueSettings, listed

ModelMode = Literal["nnx", "linen", "function"]


@dataclass
class BaseModelConfig(ValueSettings):
    """Base class of model configurations.

    A model and its submodules may store it (`self.config = config`): it hashes by value, as static arguments of
    compiled functions must. Do not modify it after a model is built.
    """


@register_interface
class BaseModelNNX(nnx.Module, RegistrableConfigInterface):
    """A model for `flax.nnx`: decorate it with `@register`, annotate `config` and take it first.

    Its constructor is `__init__(self, config, *, rngs)`. With a parameter `exmp_input`, it gets an example input to
    infer sizes from: use shapes and dtypes only, because it may be a tracer.
    """

    config: Any  # a subclass of `BaseModelConfig`


@register_interface
class BaseModelLinen(nn.Module, RegistrableConfigInterface):
    """A model for `flax.linen`: decorate it with `@register` and annotate `config`, its only attribute without default.

    Its call is `__call__(self, x, train=False)`; `train` is optional.
    """

    config: Any  # a subclass of `BaseModelConfig`

    def __post_init__(self) -> None:
        if self.config is None:
            name = type(self).__name__
            raise TypeError(f"{name} needs its configuration. Write `{name}(config)`.")
        super().__post_init__()


@register_interface
class BaseModelFunction(RegistrableConfigInterface):
    """A model of plain functions, or of another library such as Equinox: decorate it with `@register`, and annotate
    `config`.

    `init(key, *inputs)` returns the parameters, any pytree, whose float arrays are trained. A subclass also implements
    `apply(params, *inputs)`, unless the pytree can itself be called, as an Equinox module.
    """

    config: Any  # a subclass of `BaseModelConfig`
    apply: Callable[..., Any] | None = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def init(self, key: jax.Array, *inputs: Any) -> Any:
        """The initial parameters, for inputs of which only shapes and dtypes may be used."""
        raise NotImplementedError(f"{type(self).__name__} must implement `init(key, *inputs)`.")


@dataclass
class BasePreprocessingConfig(BaseModelConfig):
    """Base class of preprocessing configurations; preprocessing applies to training and evaluation."""


@dataclass
class BaseAugmentationConfig(BaseModelConfig):
    """Base class of augmentation configurations; augmentation applies to training only."""


class _InputTransform(nnx.Module):
    """Transforms inputs on the device, without parameters. Random numbers come from `self.rngs`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.config, self.rngs = config, rngs

    def __call__(self, inputs: Any) -> Any:
        """The transformed inputs; the base classes return them unchanged."""
        return inputs


class _InputTransformLinen(nn.Module):
    """Transforms inputs on the device, without parameters. Its random stream is "augmentation"."""

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """The transformed inputs; the base classes return them unchanged."""
        return inputs


@register
@register_interface
class BasePreprocessingNNX(_InputTransform, RegistrableConfigInterface):
    """Base class of preprocessing for nnx models: implement `__call__`."""

    config: BasePreprocessingConfig


@register
@register_interface
class BaseAugmentationNNX(_InputTransform, RegistrableConfigInterface):
    """Base class of augmentation for nnx models: implement `__call__`."""

    config: BaseAugmentationConfig


@dataclass
class BasePreprocessingLinenConfig(BasePreprocessingConfig):
    """Configuration of `BasePreprocessingLinen`."""


@dataclass
class BaseAugmentationLinenConfig(BaseAugmentationConfig):
    """Configuration of `BaseAugmentationLinen`."""


@register
@register_interface
class BasePreprocessingLinen(_InputTransformLinen, RegistrableConfigInterface):
    """Base class of preprocessing for linen models: implement `__call__`."""

    config: BasePreprocessingLinenConfig


@register
@register_interface
class BaseAugmentationLinen(_InputTransformLinen, RegistrableConfigInterface):
    """Base class of augmentation for linen models: implement `__call__`."""

    config: BaseAugmentationLinenConfig


_INPUT_TRANSFORMS = (BasePreprocessingNNX, BasePreprocessingLinen, BaseAugmentationNNX, BaseAugmentationLinen)


def on_inputs(config: BaseModelConfig, key: jax.Array, inputs: Any) -> Any:
    """`inputs` after the preprocessing or augmentation of this configuration."""
    name = config.class_name
    kinds = [Registry.get_class(interface, name) for interface in _INPUT_TRANSFORMS if name in registered(interface)]  # type: ignore[arg-type]
    if not kinds:
        raise ValueError(
            f"{type(config).__name__} is not the configuration of a registered preprocessing or augmentation. "
            "Decorate its class with `@register`."
        )
    if issubclass(kinds[0], nn.Module):
        return kinds[0](config).apply({}, inputs, rngs={"augmentation": key})
    return kinds[0](config, rngs=nnx.Rngs(key))(inputs)


_INTERFACES: dict[ModelMode, type[RegistrableConfigInterface]] = {
    "nnx": BaseModelNNX,
    "linen": BaseModelLinen,
    "function": BaseModelFunction,
}
for _interfaces in (_INTERFACES.values(), _INPUT_TRANSFORMS[:2], _INPUT_TRANSFORMS[2:]):
    same_section(*_interfaces)


def model_mode(config: ConfigInterface) -> ModelMode:
    """Whether the model of this configuration is an nnx or a linen model, or one of functions."""
    return _registration(config)[0]


def build_model(config: ConfigInterface, exmp_input: Any, rngs: nnx.Rngs) -> Any:
    """Builds the model of this configuration.

    Args:
        config: configuration of a registered model.
        exmp_input: an example input, or a `jax.ShapeDtypeStruct` of it.
        rngs: random streams of an nnx model. Other models are initialised later, by `init`.
    """
    mode, model = _registration(config)
    if mode != "nnx":
        _check_constructor(model, config)
        return model(config)
    example = {"exmp_input": exmp_input} if _takes(model, "exmp_input") else {}
    _check_constructor(model, config, **example, rngs=rngs)
    return model(config, **example, rngs=rngs)


def _check_constructor(model: type[Any], config: ConfigInterface, **keywords: Any) -> None:
    try:
        inspect.signature(model.__init__).bind(None, config, **keywords)
    except TypeError as error:
        signature = "__init__(self, config, *, rngs)" if keywords else "__init__(self, config)"
        text = f"{model.__name__} cannot be built: {error}. Its constructor must be `{signature}`."
        raise SettingsError([("model", text)]) from None


def _registration(config: ConfigInterface) -> tuple[ModelMode, type[Any]]:
    name, kind = config.class_name, type(config).__name__
    found: list[tuple[ModelMode, type[Any]]] = [
        (mode, Registry.get_class(interface, name))  # type: ignore[arg-type]  # compoconf means the class
        for mode, interface in _INTERFACES.items()
        if name in registered(interface)
    ]
    if len(found) > 1:  # two classes with one name: the configuration class decides
        found = [(mode, model) for mode, model in found if get_type_hints(model).get("config") is type(config)]
    if len(found) != 1:
        known = listed(name for interface in _INTERFACES.values() for name in registered(interface))
        raise ValueError(
            f"{kind} does not identify a model: its `class_name` is {name!r}. Decorate the model with `@register`, "
            f"annotate it with `config: {kind}`, and use a unique name and configuration class. "
            f"Registered: {known or 'none'}."
        )
    return found[0]


def _takes(model: type[Any], name: str) -> bool:
    """Whether the constructor has this parameter, or passes it on with `**kwargs`."""
    for owner in model.__mro__:
        if "__init__" in owner.__dict__:
            parameters = inspect.signature(owner.__init__).parameters
            if name in parameters or all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
                return name in parameters
    return False
