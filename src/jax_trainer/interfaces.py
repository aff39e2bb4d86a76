"""What users implement and a file's `model:` section can name: the interfaces of models, and how one is built.

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
from dataclasses import dataclass
from typing import Any, Literal, get_type_hints

import jax
from compoconf import ConfigInterface, RegistrableConfigInterface, Registry, register, register_interface, registered
from flax import linen as nn
from flax import nnx

from jax_trainer.registration import same_section
from jax_trainer.settings import SettingsError, ValueSettings, listed

ModelMode = Literal["nnx", "linen"]


@dataclass
class BaseModelConfig(ValueSettings):
    """The base of every model's configuration.

    A model may keep it (`self.config = config`), and so may the modules inside: it hashes by its values, as what is
    static in a compiled function must. As with any key of a dict, do not change it once a model holds it.
    """


@register_interface
class BaseModelNNX(nnx.Module, RegistrableConfigInterface):
    """A model for `flax.nnx`: decorate it with `@register`, annotate `config` and take it first.

    Its constructor is `__init__(self, config, *, rngs)`. One that also takes `exmp_input` gets an example of what the
    model is called with, and finds its sizes there: look at shapes and types only, for it may be a tracer.
    """

    config: Any  # the class of a model's own configuration, which derives from `BaseModelConfig`


@register_interface
class BaseModelLinen(nn.Module, RegistrableConfigInterface):
    """A model for `flax.linen`: decorate it with `@register` and annotate `config`, its only attribute without default.

    Its call is `__call__(self, x, train=False)`; a model that behaves alike in training need not take `train`.
    """

    config: Any  # the class of a model's own configuration, which derives from `BaseModelConfig`

    def __post_init__(self) -> None:
        if self.config is None:
            name = type(self).__name__
            raise TypeError(f"{name} was made without its configuration. Write `{name}(config)`.")
        super().__post_init__()


@dataclass
class BasePreprocessingConfig(BaseModelConfig):
    """The base of the configuration of what is done to every input, in training and in evaluation."""


@dataclass
class BaseAugmentationConfig(BaseModelConfig):
    """The base of the configuration of what is done to inputs in training only."""


class _OnInputs(nnx.Module):
    """Changes inputs on the device, before the model; without parameters. What is random comes from `self.rngs`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.config, self.rngs = config, rngs

    def __call__(self, inputs: Any) -> Any:
        """The inputs, changed; those of the base classes stay as they are."""
        return inputs


class _OnInputsLinen(nn.Module):
    """Changes inputs on the device, before the model; without parameters. Its random stream is "augmentation"."""

    @nn.compact
    def __call__(self, inputs: Any) -> Any:
        """The inputs, changed; those of the base classes stay as they are."""
        return inputs


@register
@register_interface
class BasePreprocessingNNX(_OnInputs, RegistrableConfigInterface):
    """Changes every input before an nnx model sees it: derive from it, and write `__call__`."""

    config: BasePreprocessingConfig


@register
@register_interface
class BaseAugmentationNNX(_OnInputs, RegistrableConfigInterface):
    """Changes inputs in training, before an nnx model sees them: derive from it, and write `__call__`."""

    config: BaseAugmentationConfig


@dataclass
class BasePreprocessingLinenConfig(BasePreprocessingConfig):
    """The configuration of a `BasePreprocessingLinen`."""


@dataclass
class BaseAugmentationLinenConfig(BaseAugmentationConfig):
    """The configuration of a `BaseAugmentationLinen`."""


@register
@register_interface
class BasePreprocessingLinen(_OnInputsLinen, RegistrableConfigInterface):
    """Changes every input before a linen model sees it: derive from it, and write `__call__`."""

    config: BasePreprocessingLinenConfig


@register
@register_interface
class BaseAugmentationLinen(_OnInputsLinen, RegistrableConfigInterface):
    """Changes inputs in training, before a linen model sees them: derive from it, and write `__call__`."""

    config: BaseAugmentationLinenConfig


_ON_INPUTS = (BasePreprocessingNNX, BasePreprocessingLinen, BaseAugmentationNNX, BaseAugmentationLinen)


def on_inputs(config: BaseModelConfig, key: jax.Array, inputs: Any) -> Any:
    """`inputs` changed as the preprocessing or augmentation of this configuration does."""
    name = config.class_name
    kinds = [Registry.get_class(interface, name) for interface in _ON_INPUTS if name in registered(interface)]  # type: ignore[arg-type]
    if not kinds:
        raise ValueError(f"{type(config).__name__} belongs to no registered preprocessing or augmentation.")
    if issubclass(kinds[0], nn.Module):
        return kinds[0](config).apply({}, inputs, rngs={"augmentation": key})
    return kinds[0](config, rngs=nnx.Rngs(key))(inputs)


_INTERFACES: dict[ModelMode, type[RegistrableConfigInterface]] = {"nnx": BaseModelNNX, "linen": BaseModelLinen}
for _interfaces in (_INTERFACES.values(), _ON_INPUTS[:2], _ON_INPUTS[2:]):
    same_section(*_interfaces)


def model_mode(config: ConfigInterface) -> ModelMode:
    """Whether the model of this configuration is one of nnx or of linen, by where it is registered."""
    return _registration(config)[0]


def build_model(config: ConfigInterface, exmp_input: Any, rngs: nnx.Rngs) -> nnx.Module | nn.Module:
    """The model of this configuration.

    Args:
        config: of a registered model; its class decides which one.
        exmp_input: an example of what the model is called with, or a `jax.ShapeDtypeStruct` of it.
        rngs: where an nnx model draws its weights from. A linen model draws them later, in `init`.
    """
    mode, model = _registration(config)
    if mode == "linen":
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
    if len(found) > 1:  # two classes of one name: each has a configuration of its own
        found = [(mode, model) for mode, model in found if get_type_hints(model).get("config") is type(config)]
    if len(found) != 1:
        known = listed(name for interface in _INTERFACES.values() for name in registered(interface))
        raise ValueError(
            f"{kind} does not lead to one model: its `class_name` is {name!r}. Decorate the model with `@register`, "
            f"annotate it with `config: {kind}`, and give it a name and a configuration class that no other model has. "
            f"Registered are {known or 'none'}."
        )
    return found[0]


def _takes(model: type[Any], name: str) -> bool:
    """Whether the constructor has this parameter, or hands on to one that has."""
    for owner in model.__mro__:
        if "__init__" in owner.__dict__:
            parameters = inspect.signature(owner.__init__).parameters
            if name in parameters:
                return True
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                return False
    return False
