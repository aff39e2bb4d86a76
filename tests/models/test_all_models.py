"""What every ready model promises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compoconf import registered
from flax import nnx

from jax_trainer import models
from jax_trainer.adapters import BaseModelConfig, BaseModelLinen, BaseModelNNX, build_model, linen_program, nnx_program
from jax_trainer.adapters.interfaces import model_mode
from jax_trainer.config import keys_of
from jax_trainer.core import Program, compile, compile_program, initialisation, with_ema
from jax_trainer.core.precision import cast_floats
from jax_trainer.datasets import Data
from jax_trainer.engine import Plan, run
from jax_trainer.sharding import Layout, Partitioning, make_mesh
from jax_trainer.testing import EventRecorder, assert_same_bits, linen_loss, nnx_loss
from tests.rows import each

RNG = np.random.default_rng(0)
IMAGES = {"x": RNG.normal(size=(16, 8, 8, 1)).astype(np.float32), "y": RNG.integers(0, 4, 16).astype(np.int32)}
TEXT = {"x": RNG.integers(0, 7, (8, 5)).astype(np.int32), "y": RNG.integers(0, 7, (8, 5)).astype(np.int32)}
NOISE = {
    "x": RNG.normal(size=(8, 4, 4, 2)).astype(np.float32),
    "t": RNG.uniform(size=8).astype(np.float32),
    "condition": RNG.integers(-1, 3, 8).astype(np.int32),
}
NOISE["y"] = NOISE["t"][:, None, None, None] - NOISE["x"]
INPUTS = ("x", "t", "condition")  # what of a batch a model is called with


def name_of(case: Any) -> str:
    return getattr(case, "class_name", "")


CASES: list[tuple[BaseModelConfig, dict[str, np.ndarray]]] = [
    (models.MLPConfig(hidden=(16,), num_classes=4, dropout=0.1, batch_norm=True), IMAGES),
    (models.SimpleClassifierConfig(num_classes=4), IMAGES),
    (models.SimpleClassifierLinenConfig(num_classes=4), IMAGES),
    (models.CNNConfig(channels=(4,), hidden=16, num_classes=4, dropout=0.1), IMAGES),
    (models.GPTConfig(vocab_size=7, layers=1, heads=2, width=16, dropout=0.1), TEXT),
    (models.DecoderConfig(vocab_size=7, layers=1, heads=4, kv_heads=2, width=16, dropout=0.1, qk_norm=True), TEXT),
    (models.BERTConfig(vocab_size=7, context=5, layers=1, heads=2, width=16), TEXT),
    (models.ViTConfig(layers=1, heads=2, width=16, patch=4, num_classes=4, dropout=0.1), IMAGES),
    (models.RNNLMConfig(vocab_size=7, d_model=16, n_layers=1), TEXT),
    (models.ResNetConfig(width=2, num_classes=4), IMAGES),
    (models.ConditionalMLPConfig(hidden=(16, 16), num_classes=3), NOISE),
    (models.DiTConfig(layers=1, heads=2, width=16, num_classes=3, dropout=0.1), NOISE),
]
# the steps of the others take longer to compile
LEARNS_SOON = "SimpleClassifierLinen"
LEARNING = [pytest.param(*case, marks=() if name_of(case[0]) == LEARNS_SOON else pytest.mark.slow) for case in CASES]
NNX_CASES = [case for case in CASES if model_mode(case[0]) == "nnx"]


def inputs_of(batch: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(batch[name] for name in INPUTS if name in batch)


def distance(model: Any, batch: Any, train: bool) -> Any:
    return jnp.mean((model(*inputs_of(batch)) - batch["y"]) ** 2), {}


def program_of(config: BaseModelConfig, batch: dict[str, Any]) -> Program:
    tx = optax.adam(1e-2)
    if model_mode(config) == "nnx":
        build: Any = lambda rngs, example: build_model(config, example["x"], rngs)
        return nnx_program(build, nnx_loss if batch["y"].dtype == np.int32 else distance, tx)
    model: Any = build_model(config, None, nnx.Rngs(0))
    return linen_program(model, linen_loss, tx, to_input=lambda batch: batch["x"])


def test_each_model_is_registered_under_its_own_name_and_tried_here():
    names = {config.class_name for config, _ in CASES}
    classes = {name for name in models.__all__ if isinstance(getattr(models, name), type)}
    # tests/trainer/test_gan.py trains the two networks of a GAN
    assert names | {"DCGAN"} == {name for name in classes if not name.endswith("Config")}
    of_linen = {"RNNLM", "SimpleClassifierLinen"}
    assert names - of_linen <= set(registered(BaseModelNNX))
    assert of_linen <= set(registered(BaseModelLinen))


@pytest.mark.parametrize(("config", "batch"), LEARNING, ids=name_of)
def test_the_loss_of_a_model_falls_on_a_repeated_batch(config: BaseModelConfig, batch: dict[str, Any]):
    compiled, seen = compile_program(program_of(config, batch)), EventRecorder()
    state = compiled.init(jax.random.key(0), batch)  # compiled: to the model the example is a tracer
    run(compiled, state, Data([batch]), Plan(max_steps=30), [seen])
    assert seen.steps[30]["loss"] < 0.7 * seen.steps[1]["loss"]


@each("config, batch", NNX_CASES)
def test_a_model_finds_its_sizes_in_an_example_without_values(config: BaseModelConfig, batch: dict[str, Any], outline):
    outlined = outline(config, batch["x"].shape, batch["x"].dtype)
    traced: Any = nnx.eval_shape(lambda x: build_model(config, x, nnx.Rngs(0)), batch["x"])
    assert outlined.config == traced.config == config
    assert hash(nnx.graphdef(outlined)) == hash(nnx.graphdef(traced))
    shapes = [[leaf.shape for leaf in jax.tree.leaves(nnx.state(model))] for model in (outlined, traced)]
    assert shapes[0] == shapes[1]


def products(jaxpr: Any) -> list[Any]:
    """The types of what is multiplied in a traced function."""
    names = ("dot_general", "conv_general_dilated")
    own = [{var.aval.dtype for var in eqn.invars} for eqn in jaxpr.eqns if eqn.primitive.name in names]
    inner = [getattr(value, "jaxpr", value) for eqn in jaxpr.eqns for value in eqn.params.values()]
    return own + [types for part in inner if hasattr(part, "eqns") for types in products(part)]


@each("config, batch", NNX_CASES)
def test_a_model_with_bfloat16_weights_multiplies_everything_in_bfloat16(config: BaseModelConfig, batch: Any, outline):
    graph, params, rest = nnx.split(outline(config, batch["x"].shape, batch["x"].dtype), nnx.Param, ...)

    def call(params, rest, inputs):
        return nnx.merge(graph, params, rest, copy=True)(*inputs)

    params, inputs = jax.eval_shape(lambda tree: cast_floats(tree, jnp.bfloat16), (params, inputs_of(batch)))
    found = products(jax.make_jaxpr(call)(params, rest, inputs).jaxpr)
    assert len(found) >= 2
    assert all(types == {jnp.dtype(jnp.bfloat16)} for types in found)


def test_each_key_of_each_model_is_explained():
    configs = [type(config) for config, _ in CASES]
    assert [(config, key.name) for config in configs for key in keys_of(config) if not key.help] == []


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [False, True])
@pytest.mark.parametrize(("config", "batch"), CASES, ids=name_of)
def test_a_model_initialised_in_pieces_has_the_bits_of_one_program(config, batch, mesh, monkeypatch):
    monkeypatch.setattr(initialisation, "MOST_KINDS", 1)
    layout = Layout(mesh=make_mesh(data=2, fsdp=4), param_spec=Partitioning(smallest=1)) if mesh else None
    program = with_ema(program_of(config, batch), 0.9)
    assert initialisation.split(program.init, jax.random.key(1), batch) is not None
    pieces = compile_program(program, layout=layout).init(jax.random.key(1), batch)
    monkeypatch.setattr(compile, "split", lambda *_: None)
    whole = compile_program(program, layout=layout).init(jax.random.key(1), batch)
    assert_same_bits(pieces, whole)
    assert [x.sharding for x in jax.tree.leaves(pieces)] == [x.sharding for x in jax.tree.leaves(whole)]
