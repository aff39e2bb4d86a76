from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from compoconf import register
from flax import linen as nn
from flax import nnx

from jax_trainer.adapters import BaseModelConfig, BaseModelLinen, BaseModelNNX, build_model, linen_program, nnx_program
from jax_trainer.adapters.interfaces import model_mode
from jax_trainer.config.settings import Settings
from jax_trainer.testing import linen_loss, nnx_loss, short_run

X = jnp.ones((2, 8))


@dataclass
class InnerSettings(Settings):
    scale: float = 1.0


@dataclass
class KeepingConfig(BaseModelConfig):
    width: int = 4
    sizes: list[int] = field(default_factory=list)
    named: dict[str, list[int]] = field(default_factory=dict)
    inner: InnerSettings = field(default_factory=InnerSettings)
    kind: Any = InnerSettings


class KeepingPart(nnx.Module):
    def __init__(self, config: KeepingConfig, inputs: int, rngs: nnx.Rngs):
        self.config = config
        self.linear = nnx.Linear(inputs, config.width, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) * self.config.inner.scale


@register
class KeepingModel(BaseModelNNX):
    config: KeepingConfig

    def __init__(self, config: KeepingConfig, *, exmp_input: Any, rngs: nnx.Rngs):
        self.config = config
        self.part = KeepingPart(config, exmp_input.shape[-1], rngs)

    def __call__(self, x):
        return self.part(x)


@dataclass
class PlainConfig(BaseModelConfig):
    pass


@register
class PlainModel(BaseModelNNX):
    config: PlainConfig

    def __init__(self, config: PlainConfig, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(8, 4, rngs=rngs)


@dataclass
class HandingOnConfig(KeepingConfig):
    pass


@register
class HandingOnModel(KeepingModel):
    config: HandingOnConfig  # type: ignore[override]

    def __init__(self, config: HandingOnConfig, **more: Any):
        super().__init__(config, **more)


@dataclass
class LinenKeepingConfig(KeepingConfig):
    pass


@register
class LinenKeepingModel(BaseModelLinen):
    config: LinenKeepingConfig

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(self.config.width)(x) * self.config.inner.scale


def keeping(**keys: Any) -> KeepingModel:
    return KeepingModel(KeepingConfig(**keys), exmp_input=X, rngs=nnx.Rngs(0))


def outline(config: BaseModelConfig, example: Any = X) -> Any:
    return nnx.eval_shape(lambda: build_model(config, example, nnx.Rngs(0)))


def test_equal_configurations_share_a_hash_and_others_are_other_keys():
    keys: dict[str, Any] = {"sizes": [1, 2], "named": {"a": [1], "b": []}}
    config = KeepingConfig(**keys)
    assert hash(config) == hash(KeepingConfig(sizes=[1, 2], named={"b": [], "a": [1]})) == hash(config)
    others = [KeepingConfig(**{**keys, "sizes": [2, 1]}), KeepingConfig(**keys, inner=InnerSettings(scale=2.0))]
    assert all(one != config for one in (*others, LinenKeepingConfig(**keys)))


def test_a_configuration_can_still_be_changed_before_a_model_has_it():
    config = KeepingConfig()
    config.width = 3
    assert hash(config) == hash(KeepingConfig(width=3))


def test_a_model_that_keeps_its_configuration_is_split_merged_and_hashed():
    graph, arrays = nnx.split(keeping(sizes=[1]))
    merged = nnx.merge(graph, arrays)
    assert merged.config == merged.part.config == KeepingConfig(sizes=[1])
    assert hash(graph) == hash(nnx.graphdef(keeping(sizes=[1])))
    assert graph != nnx.graphdef(keeping(sizes=[2]))


@pytest.mark.parametrize("jit", [nnx.jit, jax.jit])
def test_models_with_equal_configurations_share_a_compiled_function(jit: Any):
    traced = []

    @jit
    def call(model, x):
        traced.append(model.config)
        return model(x)

    for scale in (1.0, 1.0, 2.0):
        call(keeping(sizes=[1], inner=InnerSettings(scale=scale)), X)
    assert [config.inner.scale for config in traced] == [1.0, 2.0]


@pytest.mark.parametrize("start", [pytest.param("built", marks=pytest.mark.slow), "prebuilt"])
def test_a_model_that_keeps_its_configuration_is_trained(start: str):
    config = KeepingConfig(sizes=[1])
    prebuilt = keeping(sizes=[1])
    model: Any = prebuilt if start == "prebuilt" else lambda rngs, example: build_model(config, example["x"], rngs)
    _, seen = short_run(nnx_program(model, nnx_loss, optax.adam(1e-1)), 30)
    assert seen.steps[30]["loss"] < 0.8 * seen.steps[1]["loss"]


def test_a_linen_model_with_a_configuration_is_trained():
    model = build_model(LinenKeepingConfig(sizes=[1]), X, nnx.Rngs(0))
    assert isinstance(model, LinenKeepingModel)
    program = linen_program(model, linen_loss, optax.adam(1e-1), to_input=lambda batch: batch["x"])
    _, seen = short_run(program, 30)
    assert seen.steps[30]["loss"] < 0.8 * seen.steps[1]["loss"]


def test_a_linen_model_with_a_configuration_can_be_a_static_argument():
    variables = LinenKeepingModel(LinenKeepingConfig()).init(jax.random.key(0), X)
    traced = []

    def call(model, variables):
        traced.append(model)
        return model.apply(variables, X)

    call = jax.jit(call, static_argnums=0)
    for scale in (1.0, 1.0, 2.0):
        call(LinenKeepingModel(LinenKeepingConfig(sizes=[1], inner=InnerSettings(scale=scale))), variables)
    assert len(traced) == 2


def test_a_linen_model_without_its_configuration_is_refused():
    with pytest.raises(TypeError, match=r"configuration.*`LinenKeepingModel\(config\)`"):
        LinenKeepingModel()  # type: ignore[call-arg]


def test_the_mode_is_that_of_the_interface_of_the_model():
    assert model_mode(KeepingConfig()) == "nnx"
    assert model_mode(LinenKeepingConfig()) == "linen"


def test_a_constructor_that_takes_an_example_gets_it():
    for config in [KeepingConfig(), HandingOnConfig()]:
        assert outline(config, jax.ShapeDtypeStruct((2, 5), jnp.float32)).part.linear.in_features == 5, config


def test_a_constructor_that_takes_no_example_gets_none():
    assert isinstance(outline(PlainConfig()), PlainModel)


def test_of_two_models_with_one_name_the_configuration_decides():
    @dataclass
    class TwinConfig(BaseModelConfig):
        pass

    @dataclass
    class LinenTwinConfig(BaseModelConfig):
        pass

    def twin(base: type, config: type) -> type:
        return register(type("TwinOfTwo", (base,), {"__annotations__": {"config": config}}))

    nnx_twin, linen_twin = twin(BaseModelNNX, TwinConfig), twin(BaseModelLinen, LinenTwinConfig)
    assert (model_mode(TwinConfig()), model_mode(LinenTwinConfig())) == ("nnx", "linen")
    assert nnx_twin is not linen_twin


def test_a_configuration_without_a_model_is_an_error_with_a_fix():
    @dataclass
    class LonelyConfig(BaseModelConfig):
        pass

    with pytest.raises(ValueError, match=r"LonelyConfig .* `@register`, .* `config: LonelyConfig`.* HandingOnModel"):
        build_model(LonelyConfig(), X, nnx.Rngs(0))
