"""Models of every library are handled alike."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer.adapters import FunctionModel, ModelHandle, function_program, handle_of
from jax_trainer.adapters.functions import FunctionHandle
from jax_trainer.adapters.handle import ModelHooks
from jax_trainer.adapters.linen import LinenHandle
from jax_trainer.adapters.nnx_handle import NnxHandle
from jax_trainer.core import TrainState, compile_program
from jax_trainer.testing import TinyLinen, TinyNNX, assert_same_bits, cross_entropy, numbered_data, short_run

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}
WIDTH, CLASSES = EXAMPLE["x"].shape[-1], 4
TX = optax.sgd(0.1)
HOOKS = ModelHooks(to_input=lambda batch: batch["x"], example=lambda: EXAMPLE)


def init(key: jax.Array, x: Any) -> Any:
    return {"w": jax.random.uniform(key, (x.shape[-1], CLASSES)), "b": jnp.zeros(CLASSES)}


def apply(params: Any, x: Any) -> jax.Array:
    return x @ params["w"] + params["b"]


class Net(eqx.Module):
    """Takes a batch; has a counter, a function and a flag besides its weights."""

    layer: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    offsets: jax.Array
    activation: Any

    def __init__(self, key: jax.Array) -> None:
        self.layer, self.dropout = eqx.nn.Linear(WIDTH, CLASSES, key=key), eqx.nn.Dropout(0.5)
        self.offsets, self.activation = jnp.arange(CLASSES), jnp.tanh

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return self.dropout(self.activation(jax.vmap(self.layer)(x)), key=key) + self.offsets


def loss(model: Any, batch: Any, train: bool) -> jax.Array:
    return cross_entropy(model(batch["x"]), batch["y"]).mean()


def keyed(model: Any, batch: Any, train: bool, rng: jax.Array) -> Any:
    logits = model(batch["x"], key=rng)
    return cross_entropy(logits, batch["y"]).mean()


KINDS: dict[str, tuple[Callable[[], Any], type[ModelHandle]]] = {
    "linen": (TinyLinen, LinenHandle),
    "nnx": (lambda: TinyNNX(nnx.Rngs(0)), NnxHandle),
    "a class of nnx modules": (lambda: TinyNNX, NnxHandle),
    "functions": (lambda: FunctionModel(init, apply), FunctionHandle),
    "Equinox": (lambda: Net(jax.random.key(0)), FunctionHandle),
    "a function with its parameters": (
        lambda: jax.tree_util.Partial(apply, init(jax.random.key(0), EXAMPLE["x"])),
        FunctionHandle,
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind in ("Equinox", "a class of nnx modules") else ())
        for kind in KINDS
    ],
)
def test_a_handle_predicts_what_the_bound_model_returns(kind):
    make, expected = KINDS[kind]
    handle = handle_of(make(), HOOKS)
    assert type(handle) is expected

    def of_model(model: Any, batch: Any, train: bool, rng: jax.Array, step: jax.Array) -> Any:
        outputs = handle.apply(model, batch["x"], train=False)
        return cross_entropy(outputs, batch["y"]).mean(), {}

    program = compile_program(handle.program(handle.calling(of_model), TX))
    state = program.init(handle.key, EXAMPLE)
    bound = handle.bind(state)
    outputs = handle.apply(bound, EXAMPLE["x"], train=False if kind != "linen" else None)
    np.testing.assert_allclose(program.predict(state, EXAMPLE), outputs, rtol=1e-5, atol=1e-6)
    network = handle.network(state)
    compiled = jax.jit(lambda network, x: network(x))(network, EXAMPLE["x"])
    np.testing.assert_allclose(compiled, outputs, rtol=1e-5, atol=1e-6)
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    table = handle.tabulate(handle.module_at(lambda: state), (EXAMPLE["x"],))
    assert f"{count:,}" in table


def test_functions_train_to_the_bits_of_function_program():
    handle = handle_of(FunctionModel(init, apply), HOOKS)
    by_hand = function_program(
        lambda key, batch: init(key, batch["x"]),
        lambda params, batch, *, rng, train: loss(lambda x: apply(params, x), batch, train),
        TX,
    )
    assert_same_bits(short_run(handle.program(loss, TX))[0], short_run(by_hand)[0])


def test_an_equinox_module_trains_its_float_arrays_and_nothing_else():
    module = Net(jax.random.key(0))
    handle = handle_of(module, HOOKS)
    state, seen = short_run(handle.program(keyed, TX), 60)
    trained = handle.bind(state)
    assert isinstance(trained, Net) and trained.activation is jnp.tanh
    assert_same_bits(trained.offsets, module.offsets)
    assert (np.asarray(trained.layer.weight) != np.asarray(module.layer.weight)).any()
    assert seen.steps[60]["loss"] < seen.steps[1]["loss"]
    assert trained.dropout.inference and not module.dropout.inference  # in evaluation mode; the user's is unchanged


def test_the_model_of_a_loss_is_in_the_mode_of_the_step():
    handle, modes = handle_of(Net(jax.random.key(0)), HOOKS), []

    def watching(model: Any, batch: Any, train: bool, rng: jax.Array) -> Any:
        modes.append((train, model.dropout.inference))
        return keyed(model, batch, train, rng)

    program = handle.program(watching, TX)
    state = program.init(jax.random.key(0), EXAMPLE)
    jax.eval_shape(program.train_step, state, EXAMPLE)
    jax.eval_shape(program.eval_step, state, EXAMPLE)
    assert set(modes) == {(True, False), (False, True)}


def test_apply_receives_the_mode_and_a_key_where_it_has_parameters_for_them():
    def noisy(params: Any, x: Any, train: bool, key: jax.Array) -> Any:
        return apply(params, x) + (jax.random.uniform(key, (CLASSES,)) if train else 0)

    handle = handle_of(FunctionModel(init, noisy), HOOKS)
    program = handle.program(loss, TX)
    state = program.init(jax.random.key(0), EXAMPLE)
    expected = jax.jit(lambda params: loss(lambda x: apply(params, x), EXAMPLE, False))(state.params)
    evaluated = jax.jit(program.eval_step)(state, EXAMPLE).by_name["loss"].value
    assert float(evaluated) == pytest.approx(float(expected), rel=1e-6)
    step = jax.jit(program.train_step)
    losses = [float(step(state.replace(step=state.step + n), EXAMPLE)[1].metrics.by_name["loss"].value) for n in (0, 1)]
    assert len({*losses, float(expected)}) == 3


def test_a_state_of_flax_keeps_its_form():
    variables: Any = TinyLinen().init(jax.random.key(1), EXAMPLE["x"])
    state = TrainState.create(apply_fn=TinyLinen().apply, **variables, tx=TX)
    handle = handle_of(state, HOOKS)
    assert handle.tx is TX and handle.name == "TinyLinen"
    assert type(handle.as_passed(state.plain())) is type(state)


def test_objects_that_are_no_model_are_refused():
    for model, words in [
        (3, "The model is a int.*linen or nnx module.*FunctionModel"),
        ({"w": np.zeros(3)}, r"The model is a dict.*TrainState\.create"),
        (TinyLinen, r"linen class TinyLinen.*TinyLinen\("),
        (TinyLinen().bind({}), "TinyLinen is bound"),
    ]:
        with pytest.raises(TypeError, match=words):
            handle_of(model)


def test_functions_without_parameters_are_refused():
    handle = handle_of(FunctionModel(lambda key, x: {"n": 3}, lambda params, x: x), HOOKS)
    with pytest.raises(ValueError, match="FunctionModel.*no parameters"):
        handle.program(loss, TX).init(jax.random.key(0), EXAMPLE)
