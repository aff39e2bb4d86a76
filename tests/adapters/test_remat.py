"""`Remat`: matching modules are computed again in the backward pass; nothing else changes."""

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import Remat, compile_program, function_program, linen_program, nnx_program
from jax_trainer.core.setup import uses
from jax_trainer.engine.costs import CompiledCost
from jax_trainer.models import GPT, GPTConfig
from jax_trainer.testing import assert_close

WIDTH, DEPTH, ROWS = 16, 8, 1024


class LinenBlock(nn.Module):
    """Statistics, dropout, a flag, and something that is no array."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, *, name_of: str = "relu") -> jax.Array:
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))
        y = getattr(nn, name_of)(y)
        self.sow("intermediates", "act", y)
        return x + nn.Dropout(0.2, deterministic=not train)(y)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(WIDTH, name="stem")(x)
        for index in range(2):
            x = LinenBlock(name=f"block_{index}")(x, train, name_of="relu")
        return nn.Dense(1, name="head")(x)


class NnxBlock(nnx.Module):
    """The same in nnx, with the random streams as an argument."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array, name_of: str = "relu") -> jax.Array:
        y = getattr(nnx, name_of)(self.norm(self.dense(x)))
        self.sow(nnx.Intermediate, "act", y)
        return x + self.dropout(y)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem, self.head = nnx.Linear(8, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, name_of="relu")
        return self.head(x)


def batch(rows: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(rows, 8)).astype(np.float32), "y": rng.normal(size=(rows, 1)).astype(np.float32)}


def program_of(flavour: str, remat: Remat | None, model: Any = None, **options: Any) -> Any:
    def linen_loss(params: Any, state: Any, batch: Any, rng: jax.Array, train: bool) -> Any:
        out, mutable = state.apply(params, batch["x"], train=train)
        return ((out - batch["y"]) ** 2).mean(), (mutable, {})

    def nnx_loss(model: Any, batch: Any, train: bool) -> jax.Array:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    options = {"remat": remat, **options}
    if flavour == "linen":
        return linen_program(model or LinenNet(), linen_loss, optax.sgd(0.1), to_input=lambda one: one["x"], **options)
    return nnx_program(model or NnxNet, nnx_loss, optax.sgd(0.1), **options)


@cache
def two_steps(flavour: str, remat: Remat | None) -> tuple[Any, Any]:
    """The state after two compiled steps, and the metrics of the last."""
    compiled = compile_program(program_of(flavour, remat), donate=False)
    state = compiled.init(jax.random.key(0), batch())
    buffer = compiled.train_buffer(state, batch(), 2)
    for _ in range(2):
        state, buffer, _ = compiled.train_step(state, buffer, batch())
    return state, buffer.rows


USUAL = Remat(r".*block.*", "dots_saveable")
OTHERS = [pytest.param(Remat(match), marks=pytest.mark.slow) for match in (r".*block.*", r"blocks?[._]1", ".*")]


@pytest.mark.parametrize("remat", [USUAL, *OTHERS])
def test_recomputed_modules_train_the_same_with_the_same_dropout_and_statistics(flavour, remat):
    (plain, _), (rematted, _) = two_steps(flavour, None), two_steps(flavour, remat)
    assert_close(rematted, plain, rtol=1e-4, atol=1e-5)  # also the structure: parameters stay where they are


def test_sown_values_are_still_logged(flavour):
    options = {"intermediates": ("mean",)}
    program = program_of(flavour, USUAL, **options)
    metrics = jax.eval_shape(program.train_step, jax.eval_shape(program.init, jax.random.key(0), batch()), batch())[1]
    sown = [name for name in metrics.metrics.by_name if name.startswith("intermediate/")]
    plain = program_of(flavour, None, **options)
    expected = jax.eval_shape(plain.train_step, jax.eval_shape(plain.init, jax.random.key(0), batch()), batch())[1]
    assert sown == [name for name in expected.metrics.by_name if name.startswith("intermediate/")] and sown


def checkpoints(function: Any, *args: Any) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("remat2[")


def test_only_training_computes_again_and_a_module_inside_of_another_is_part_of_it(flavour):
    every, one, none = (program_of(flavour, remat) for remat in (USUAL, Remat(r"blocks?[._]1"), None))
    state, *_ = (jax.eval_shape(program.init, jax.random.key(0), batch()) for program in (every, one, none))
    assert checkpoints(one.train_step, state, batch()) > 0
    assert checkpoints(every.train_step, state, batch()) == 2 * checkpoints(one.train_step, state, batch())
    assert checkpoints(every.eval_step, state, batch()) == checkpoints(none.train_step, state, batch()) == 0


class LinenLayer(nn.Module):
    """A layer of a loop: XLA on the CPU would undo the computing again, except in a loop."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return LinenWide(name="block")(x), None


class LinenWide(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH)(nn.tanh(nn.Dense(8 * WIDTH)(x)))


class LinenDeep(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        loop = nn.scan(LinenLayer, {"params": 0}, split_rngs={"params": True}, length=DEPTH)
        return loop(name="layers")(nn.Dense(WIDTH)(x), None)[0].mean(-1, keepdims=True)


class NnxWide(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wide, self.out = nnx.Linear(WIDTH, 8 * WIDTH, rngs=rngs), nnx.Linear(8 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.out(nnx.tanh(self.wide(x)))


class NnxDeep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Linear(8, WIDTH, rngs=rngs)
        self.block = nnx.vmap(NnxWide)(rngs.split(DEPTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        deep = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return deep(self.stem(x), self.block).mean(-1, keepdims=True)


def temp_bytes(flavour: str, remat: Remat | None) -> int:
    """What the compiled step of a deep model needs besides its arguments, as the preflight reads it."""
    compiled = compile_program(program_of(flavour, remat, {"linen": LinenDeep(), "nnx": NnxDeep}[flavour]))
    example = batch(ROWS)
    state = compiled.state_shape(jax.random.key(0), example)
    lowered = compiled.lowered_train(state, compiled.train_buffer(state, example, 1), example)
    return CompiledCost.of(lowered.compile(), 0.0).temp_bytes


@pytest.mark.parametrize("flavour", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_a_deep_model_needs_less_memory(flavour):
    kept, computed = temp_bytes(flavour, None), temp_bytes(flavour, Remat(r".*block"))
    assert kept - computed > 0.9 * (DEPTH - 1) * 8 * WIDTH * ROWS * 4  # of all blocks but one, what is wide is not kept


def test_a_pattern_that_matches_nothing_names_the_modules(flavour):
    program = program_of(flavour, Remat("blok.*"))
    state = jax.eval_shape(program.init, jax.random.key(0), batch())
    with pytest.raises(ValueError, match=r"'blok\.\*'.*block"):
        jax.eval_shape(program.train_step, state, batch())


def test_a_wrong_policy_is_refused_at_once():
    with pytest.raises(ValueError, match="`policy`.*dots_saveable.*'dots'"):
        Remat(".*", "dots")
    assert callable(Remat(".*", jax.checkpoint_policies.save_only_these_names("x")).saveable)


def test_plain_functions_have_no_modules():
    with pytest.raises(TypeError, match="remat.*jax.checkpoint"):
        function_program(lambda key, batch: jnp.zeros(()), lambda *_, **__: 0.0, optax.sgd(0.1), remat=Remat(".*"))


def test_a_loop_inside_of_a_module_is_computed_again_as_a_whole():
    """A user's own `nn.remat` and `nn.scan` are not in the way."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return nn.relu(nn.Dense(8)(x)), None

    class Deep(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = nn.scan(nn.remat(Layer), {"params": 0}, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0].mean(-1, keepdims=True)

    def loss(params: Any, state: Any, batch: Any, rng: jax.Array, train: bool) -> Any:
        out, mutable = state.apply(params, batch["x"], train=train)
        return ((out - batch["y"]) ** 2).mean(), (mutable, {})

    def after(remat: Remat | None) -> Any:
        program = linen_program(Deep(), loss, optax.sgd(0.1), to_input=lambda one: one["x"], remat=remat)
        state = jax.jit(program.init)(jax.random.key(0), batch())
        assert uses(jax.make_jaxpr(program.train_step)(state, batch()), "scan")
        return jax.jit(program.train_step)(state, batch())[0].params

    assert_close(after(Remat("layers")), after(None), rtol=1e-5)


def test_a_model_with_its_own_option_can_be_matched_besides():
    model = GPT(GPTConfig(vocab_size=5, layers=2, heads=1, width=4, context=3, remat=True), rngs=nnx.Rngs(0))

    def loss(model: Any, batch: Any, train: bool) -> jax.Array:
        return model(batch).mean()

    tokens = np.zeros((2, 3), np.int32)
    both, own = (nnx_program(model, loss, optax.sgd(0.1), remat=one) for one in (Remat(r"blocks\.0"), None))
    state = jax.jit(own.init)(jax.random.key(0), tokens)
    grads = [jax.jit(lambda state, one=one: one.train_step(state, tokens)[1].grads)(state) for one in (both, own)]
    assert_close(*grads, atol=1e-6)
    assert checkpoints(both.train_step, state, tokens) > checkpoints(own.train_step, state, tokens) > 0
