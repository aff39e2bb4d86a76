"""A sharded run has the losses of one device, up to a bound; its chunks are bit-identical."""

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import testing
from jax_trainer.adapters import linen_program, nnx_program
from jax_trainer.core import Program, TrainState, compile_program, with_ema
from jax_trainer.models import GPT, GPTConfig
from jax_trainer.sharding import Layout, Partitioning, make_mesh
from jax_trainer.testing import assert_same_bits, numbered_data, tiny_program

STEPS = 20
# the largest relative difference of a loss in float32: sums over devices have another order, and training amplifies
# the difference. The largest observed is 8e-7, of the transformer
BOUND = 1e-5
MESHES = {
    "data": {},
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor": {"data": 1, "tensor": 8},
    "all": {"data": 2, "fsdp": 2, "tensor": 2},
}
MLP_RULES = {r"hidden\.kernel": [None, "tensor"], r"out\.kernel": ["tensor", None]}
GPT_RULES = {
    r".*(into_heads|hidden)\.kernel": ["fsdp", "tensor"],
    r".*out\.kernel": ["tensor", "fsdp"],
    "tokens": ["tensor", "fsdp"],
}


def layout_of(mesh: str, rules: Any) -> Layout:
    rules = rules if mesh in ("tensor", "all") else {}
    return Layout(mesh=make_mesh(**MESHES[mesh]), param_spec=Partitioning(rules=rules, smallest=1))


def run(
    program: Program, batches: list[Any], layout: Layout | None = None, chunk: int = 1
) -> tuple[np.ndarray, TrainState]:
    """The losses of a run on these batches, in chunks, and its last state."""
    compiled = compile_program(program, layout=layout)
    state = compiled.init(jax.random.key(0), batches[0])
    buffer = compiled.train_buffer(state, compiled.place(batches[0], stacked=False), len(batches))
    fmt = buffer.format
    for start in range(0, len(batches), chunk):
        if chunk == 1:
            state, buffer, _ = compiled.train_step(state, buffer, compiled.place(batches[start], stacked=False))
        else:
            stacked = jax.tree.map(lambda *each: np.stack(each), *batches[start : start + chunk])
            state, buffer, _ = compiled.train_chunk(state, buffer, compiled.place(stacked, stacked=True), chunk)
        jax.block_until_ready(buffer)
    assert compiled.flat_train_step.compilations <= 1  # type: ignore[attr-defined]
    return fmt.read(np.asarray(buffer.rows), [])["loss"].values, state


def difference(losses: np.ndarray, expected: np.ndarray) -> float:
    assert len(losses) == len(expected)
    assert np.isfinite(expected).all()
    assert expected[-5:].mean() < 0.9 * expected[:5].mean(), (
        "the loss did not decrease, so the comparison proves nothing"
    )
    return float(np.abs(losses / expected - 1).max())


def numbered_batches(steps: int = STEPS) -> list[Any]:
    data = numbered_data(16 * steps)
    return [{name: array[n : n + 16] for name, array in data.items()} for n in range(0, 16 * steps, 16)]


class PlainLinen(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, name="out")(nn.tanh(nn.Dense(32, name="hidden")(x)))


class PlainNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return testing.cross_entropy(logits, labels).mean()


@cache
def mlp(flavour: str) -> Program:
    if flavour == "linen":
        loss = lambda params, state, batch, rng, train: (
            cross_entropy(state.apply(params, batch["x"], train=train)[0], batch["y"]),
            (None, {}),
        )
        return linen_program(PlainLinen(), loss, optax.sgd(0.5), to_input=lambda batch: batch["x"])
    return nnx_program(
        PlainNNX, lambda model, batch, train: cross_entropy(model(batch["x"]), batch["y"]), optax.sgd(0.5)
    )


@cache
def mlp_on_one_device(flavour: str) -> np.ndarray:
    return run(mlp(flavour), numbered_batches())[0]


@pytest.mark.parametrize(
    ("flavour", "mesh"),
    [
        ("nnx", "all"),
        pytest.param("linen", "all", marks=pytest.mark.slow),
        *(pytest.param("nnx", mesh, marks=pytest.mark.slow) for mesh in MESHES if mesh != "all"),
    ],
)
def test_a_perceptron_has_the_same_losses_with_any_sharding(flavour, mesh):
    losses, state = run(mlp(flavour), numbered_batches(), layout_of(mesh, MLP_RULES))
    assert difference(losses, mlp_on_one_device(flavour)) < BOUND
    parts = {"data": (8, 32), "fsdp": (8, 4), "tensor": (8, 4), "all": (8, 16)}
    assert state.params["hidden"]["kernel"].sharding.shard_shape((8, 32)) == parts[mesh]


def texts() -> list[Any]:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 32, size=(STEPS, 16, 1))
    return list(((starts + np.arange(17)) % 32).astype(np.int32))  # each token is one more than the one before


@cache
def gpt() -> Program:
    config = GPTConfig(vocab_size=32, context=16, layers=1, heads=2, width=32)
    loss = lambda model, batch, train: cross_entropy(model(batch[:, :-1]), batch[:, 1:])
    return nnx_program(lambda rngs: GPT(config, rngs=rngs), loss, optax.adamw(1e-2))


@cache
def gpt_on_one_device() -> np.ndarray:
    return run(gpt(), texts())[0]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_transformer_has_the_same_losses_with_any_sharding(mesh):
    losses, state = run(gpt(), texts(), layout_of(mesh, GPT_RULES))
    assert difference(losses, gpt_on_one_device()) < BOUND
    if mesh == "all":
        kernel = state.params["blocks"][0]["perceptron"]["hidden"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (16, 64)


@pytest.mark.slow  # test_layout.py has the same of two steps of a smaller program
@pytest.mark.parametrize(("flavour", "mesh"), [("nnx", "all"), ("nnx", "fsdp"), ("linen", "all"), ("linen", "data")])
def test_ema_micro_batches_batch_statistics_and_dropout_match_one_device(flavour, mesh):
    program = with_ema(tiny_program(flavour, optax.sgd(0.3), dropout=0.1, micro_batches=2), 0.9)
    expected, alone = run(program, numbered_batches())
    losses, state = run(program, numbered_batches(), layout_of(mesh, MLP_RULES))
    assert difference(losses, expected) < BOUND
    for one, other in zip(
        jax.tree.leaves((state.extra, state.model_state)),
        jax.tree.leaves((alone.extra, alone.model_state)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_chunks_of_a_sharded_run_are_bit_identical_to_its_steps(chunk):
    layout = layout_of("all", MLP_RULES)
    losses, state = run(mlp("nnx"), numbered_batches(), layout)
    chunked, after = run(mlp("nnx"), numbered_batches(), layout, chunk)
    assert_same_bits(chunked, losses)
    assert_same_bits(after, state)
