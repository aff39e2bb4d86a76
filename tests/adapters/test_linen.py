from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec

from jax_trainer.adapters import flax_state_program, linen_program
from jax_trainer.core import Program, TrainState, compile_program, stream
from jax_trainer.sharding import Layout, LayoutError, Partitioning, make_mesh
from jax_trainer.testing import (
    TinyLinen,
    assert_close,
    assert_same_bits,
    cross_entropy,
    linen_loss,
    numbered_data,
    numbered_loader,
    short_run,
)
from tests.trainer.trainer_runs import waves

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


class Normed(nn.Module):
    """The smallest model with running statistics."""

    norm: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Dense(4, kernel_init=waves, name="out")(x)
        return nn.BatchNorm(use_running_average=not train, name="norm")(x) if self.norm else x


def report_of(program: Program) -> dict[str, Any]:
    """The metrics of a step, which is traced and not compiled."""
    state = jax.eval_shape(program.init, jax.random.key(0), EXAMPLE)
    return jax.eval_shape(program.train_step, state, EXAMPLE)[1].metrics.by_name


def test_shapes_come_from_the_example_batch(key):
    program = linen_program(TinyLinen(), linen_loss, optax.sgd(0.1), to_input=lambda batch: batch["x"])
    state = jax.eval_shape(program.init, key, EXAMPLE)
    assert state.params["hidden"]["kernel"].shape == (8, 16)
    assert set(state.model_state) == {"batch_stats"}


@pytest.mark.slow
def test_the_loss_contract_of_the_documents_trains():
    model = TinyLinen()

    def loss(params, state, batch, rng, train):
        variables = {"params": params, **state.mutable_variables}
        mutable = list(state.mutable_variables) if train else False
        out = state.apply_fn(variables, batch["x"], train=train, rngs={"dropout": rng}, mutable=mutable)
        logits, changed = out if train else (out, None)
        value = cross_entropy(logits, batch["y"]).mean()
        return value, (changed, {"acc": (logits.argmax(-1) == batch["y"]).mean()})

    program = linen_program(model, loss, optax.sgd(0.5), to_input=lambda batch: batch["x"])
    state, seen = short_run(program, 60)
    assert seen.steps[60]["loss"] < 0.6 * seen.steps[1]["loss"]
    assert_same_bits(state, short_run(program, 60)[0])


@pytest.mark.parametrize("norm", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_loss_gets_batch_stats_in_its_state_also_if_the_model_has_none(norm):
    def loss(params, state, batch, rng, train):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, batch["x"], train=train, mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"]).mean(), (changed, {})

    last, seen = short_run(linen_program(Normed(norm), loss, optax.sgd(0.1), to_input=lambda batch: batch["x"]), 20)
    assert seen.steps[20]["loss"] < seen.steps[1]["loss"]
    assert set(last.model_state) == ({"batch_stats"} if norm else set())


def test_any_mutable_collection_is_carried_and_sown_ones_are_not():
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
            if not self.is_initializing():
                calls.value = calls.value + 1
            self.sow("intermediates", "input", x)
            return nn.Dense(1, kernel_init=waves)(x)

    def loss(params, state, batch, rng, train):
        out, changed = state.apply_fn(
            {"params": params, **state.mutable_variables}, batch["x"], mutable=["counters", "intermediates"]
        )
        return (out**2).mean(), (changed, {})

    state, _ = short_run(linen_program(Counting(), loss, optax.sgd(0.1), to_input=lambda batch: batch["x"]))
    assert int(state.model_state["counters"]["calls"]) == 5
    assert set(state.model_state) == {"counters"}


def test_a_loss_that_returns_its_collections_unchanged_keeps_them(key):
    def loss(params, state, batch, rng, train):
        logits = state.apply_fn({"params": params, **state.mutable_variables}, batch["x"])
        return (logits**2).mean(), (state.mutable_variables, {})

    program = linen_program(Normed(), loss, optax.sgd(0.1), to_input=lambda batch: batch["x"])
    start = compile_program(program).init(key, EXAMPLE)
    end, _ = short_run(program)
    assert_same_bits(end.model_state, start.model_state)


def test_named_streams_are_passed_to_the_model_and_differ():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.param("scale", nn.initializers.ones, ())
            pair = [jax.random.normal(self.make_rng(name), ()) for name in ("dropout", "noise")]
            return jnp.stack(pair)

    def loss(params, state, batch, rng, train):
        (a, b), changed = state.apply(params, batch["x"], train=train, rngs=("dropout", "noise"))
        return params["scale"] * 0.0, (changed, {"a": a, "b": b})

    program = linen_program(
        Noisy(), loss, optax.sgd(0.1), to_input=lambda batch: batch["x"], init_rngs=("params", "dropout", "noise")
    )
    _, seen = short_run(program, 3)
    draws = [seen.steps[step][name] for step in (1, 2, 3) for name in ("a", "b")]
    assert len(set(draws)) == 6  # another value for every step and stream
    _, again = short_run(program, 3)
    assert [again.steps[step][name] for step in (1, 2, 3) for name in ("a", "b")] == draws


def test_several_inputs_are_a_tuple(key):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x, y):
            return nn.Dense(1)(x) + y

    program = linen_program(Two(), linen_loss, optax.sgd(0.1), to_input=lambda batch: (batch["x"], 1.0))
    assert jax.eval_shape(program.init, key, EXAMPLE).params["Dense_0"]["kernel"].shape == (8, 1)


def test_a_flax_state_continues_from_its_weights_and_is_not_deleted():
    mine = flax_state()
    before = jax.tree.map(np.array, mine.params)
    end, seen = short_run(flax_state_program(mine, linen_loss), 20)
    assert int(end.step) == 20
    assert int(mine.step) == 0
    assert seen.steps[20]["loss"] < seen.steps[1]["loss"]
    assert_same_bits(mine.params, before)


@pytest.mark.slow
def test_training_in_micro_batches_is_the_same_twice():
    program = linen_program(TinyLinen(), linen_loss, optax.sgd(0.1), to_input=lambda batch: batch["x"], micro_batches=4)
    assert_same_bits(short_run(program)[0], short_run(program)[0])


def test_a_wrong_return_value_of_a_loss_is_an_error_that_names_the_right_one():
    for returned, logged in [(1.0, "a float"), ((1.0, {}), "a tuple of float, dict")]:
        program = linen_program(
            TinyLinen(),
            lambda params, state, batch, rng, train, returned=returned: returned,
            optax.sgd(0.1),
            to_input=lambda batch: batch["x"],
        )
        with pytest.raises(TypeError, match=f"`loss, .mutable, metrics.`.*{logged}"):
            short_run(program)


def test_clipping_keeps_the_state_of_an_existing_optimizer():
    plain, clipped = (
        short_run(flax_state_program(flax_state(), linen_loss, clip_norm=norm), 2)[0] for norm in (None, 1e-3)
    )
    assert jax.tree.structure(clipped.opt_state) == jax.tree.structure(plain.opt_state)
    assert any(np.any(a != b) for a, b in zip(*map(jax.tree.leaves, (clipped.params, plain.params)), strict=True))


def test_init_variables_replaces_model_init(key):
    keys = []

    def init_variables(key, batch):
        keys.append(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))
        drawn = jax.random.uniform(key, (4,))
        return {"params": {"out": drawn}, "batch_stats": {"mean": drawn}, "intermediates": {"of": "no use"}}

    program = linen_program(TinyLinen(), linen_loss, optax.sgd(0.1), init_variables=init_variables)
    state = compile_program(program).init(key, EXAMPLE)
    assert_close(state.params["out"], jax.random.uniform(stream(key, "init"), (4,)))
    assert (set(state.model_state), set(keys)) == ({"batch_stats"}, {True})


def test_variables_without_parameters_are_an_error(key):
    for made, logged in [({"kernel": 1, "bias": 2}, "kernel, bias"), ([1], "a list"), ({}, "nothing")]:
        program = linen_program(TinyLinen(), linen_loss, optax.sgd(0.1), init_variables=lambda key, batch: made)  # noqa: B023
        with pytest.raises(ValueError, match=f'`init_variables`.*"params".*{logged}'):
            program.init(key, EXAMPLE)


def test_a_model_of_several_inputs_and_streams_predicts(key):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x, scale, train: bool = False):
            noise = jax.random.normal(self.make_rng("noise"), ())
            return nn.Dense(1, kernel_init=waves)(x) * scale, noise * (2 if train else 1), scale

    program = linen_program(
        Two(), linen_loss, optax.sgd(0.1), to_input=lambda batch: (batch["x"], 3.0), init_rngs=("params", "noise")
    )
    compiled = compile_program(program)
    state = compiled.init(key, EXAMPLE)
    out, noise, scale = compiled.predict(state, EXAMPLE)
    assert_close(out, 3 * EXAMPLE["x"] @ np.asarray(state.params["Dense_0"]["kernel"]), rtol=1e-5, atol=1e-5)
    assert float(scale) == 3
    assert float(noise) == float(compiled.predict(state, EXAMPLE)[1]) != float(compiled.predict(state, EXAMPLE, 1)[1])


def flax_state():
    model = Normed()
    variables = jax.jit(model.init)(jax.random.key(3), EXAMPLE["x"])
    tx = optax.sgd(0.1, momentum=0.9)
    return TrainState.create(
        apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=tx
    )


def test_a_flax_state_predicts(key):
    mine = flax_state()
    compiled = compile_program(flax_state_program(mine, linen_loss, to_input=lambda batch: batch["x"]))
    outputs = compiled.predict(compiled.init(key, EXAMPLE), EXAMPLE)
    variables = {"params": mine.params, "batch_stats": mine.batch_stats}
    assert_close(outputs, Normed().apply(variables, EXAMPLE["x"]), rtol=1e-5, atol=1e-5)


def test_a_flax_state_cannot_start_from_other_weights(key):
    compiled = compile_program(flax_state_program(flax_state(), linen_loss))
    with pytest.raises(ValueError, match="existing weights.*`init_from_params`"):
        compiled.init_from_params(key, flax_state().params, {})


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, kernel_init=waves, name="layer")(x)
        self.sow("intermediates", "act", x)
        return nn.relu(x)


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        block = Block(name="block")
        for _ in range(2):
            x = block(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(Block(name="last")(x))
        self.sow("intermediates", "largest", x.max())
        self.sow("intermediates", "integers", jnp.arange(3))
        return nn.Dense(4, kernel_init=waves, name="out")(x)


def sowing_program(micro_batches: int = 1, modes: tuple[str, ...] = ("mean", "max", "val"), **options: Any) -> Program:
    return linen_program(
        *(Sowing(), linen_loss, optax.sgd(0.1)),
        to_input=lambda batch: batch["x"],
        micro_batches=micro_batches,
        intermediates=modes,
        **options,
    )


@cache
def sown(micro_batches: int, modes: tuple[str, ...] = ("mean", "max", "val")) -> Any:
    program = sowing_program(micro_batches, modes)
    return program, *short_run(program, 4)


def logged(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith("intermediate/")}


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_sown_values_are_logged_in_training(micro_batches, key):
    program, _, seen = sown(micro_batches)
    start = compile_program(program).init(jax.random.key(0), EXAMPLE)
    batch = next(iter(numbered_loader().epoch(1)))
    layer = jax.tree.map(np.asarray, start.params["block"]["layer"])
    first = batch["x"] @ layer["kernel"] + layer["bias"]
    second = np.maximum(first, 0) @ layer["kernel"] + layer["bias"]
    found = logged(seen.steps[1])
    assert {name: found[f"intermediate/block.act.{name}"] for name in ("0_mean", "0_max", "1_mean", "1_max")} == (
        pytest.approx(
            {"0_mean": first.mean(), "0_max": first.max(), "1_mean": second.mean(), "1_max": second.max()}, rel=1e-5
        )
    )
    assert set(found) == {
        *(f"intermediate/block.act.{call}_{mode}" for call in (0, 1) for mode in ("mean", "max")),
        *("intermediate/last.act_mean", "intermediate/last.act_max", "intermediate/largest_val"),
    }


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_logging_sown_values_does_not_change_training(micro_batches):
    _, state, _ = sown(micro_batches)
    _, plain, seen = sown(micro_batches, ())
    assert not logged(seen.steps[1])
    assert_same_bits(state, plain)


def test_sown_values_are_logged_in_float32():
    found = logged(report_of(sowing_program(precision="bf16")))
    assert {metric.value.dtype for metric in found.values()} == {jnp.dtype(jnp.float32)}


def test_evaluations_log_no_sown_values():
    program = compile_program(sowing_program())
    _, trained, evaluated = program.shapes(jax.random.key(0), EXAMPLE)
    assert logged(trained.by_name)
    assert not logged(evaluated.by_name)


def test_a_loss_that_requests_intermediates_has_them_logged_too():
    def loss(params, state, batch, rng, train):
        variables = {"params": params, **state.mutable_variables}
        logits, changed = state.apply_fn(variables, batch["x"], train=train, mutable=["batch_stats", "intermediates"])
        return (logits**2).mean() + changed["intermediates"]["largest"][0], (changed, {})

    program = linen_program(Sowing(), loss, optax.sgd(0.01), to_input=lambda batch: batch["x"], intermediates=("val",))
    assert set(logged(report_of(program))) == {"intermediate/largest_val"}


def test_a_model_that_sows_nothing_logs_nothing():
    program = linen_program(
        TinyLinen(), linen_loss, optax.sgd(0.1), to_input=lambda batch: batch["x"], intermediates=("mean",)
    )
    assert not logged(report_of(program))


class Partitioned(nn.Module):
    """Two layers; the first one has a partition spec."""

    names: tuple[str | None, ...] = (None, "tensor")
    logical: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        x = nn.Dense(16, kernel_init=wrap(nn.initializers.ones, self.names), name="hidden")(x)
        return nn.Dense(4, kernel_init=nn.initializers.ones, name="out")(x)


def partitioned_loss(params: Any, state: Any, batch: Any, rng: jax.Array, train: bool) -> Any:
    logits, _ = state.apply(params, batch["x"], train=train)
    return cross_entropy(logits, batch["y"]).mean(), (None, {})


def partitioned(model: Partitioned, rules: Any = None) -> TrainState:
    layout = Layout(mesh=make_mesh(tensor=4), param_spec=Partitioning(rules=rules or {}))
    program = linen_program(model, partitioned_loss, optax.sgd(0.1, momentum=0.9), to_input=lambda batch: batch["x"])
    return compile_program(program, layout=layout).init(jax.random.key(0), EXAMPLE)


def test_parameters_are_sharded_by_the_model_specs_and_keep_their_paths():
    state = partitioned(Partitioned())
    assert set(state.params["hidden"]) == {"kernel", "bias"}
    for tree in (state.params, state.opt_state[0].trace):
        assert tree["hidden"]["kernel"].sharding.spec == PartitionSpec(None, "tensor")
        assert tree["out"]["kernel"].sharding.spec == PartitionSpec()


def test_rules_override_model_specs():
    state = partitioned(Partitioned(), {"hidden.kernel": ["data"]})
    assert state.params["hidden"]["kernel"].sharding.spec == PartitionSpec("data")


def test_logical_names_need_rules():
    model = Partitioned(("features", "units"), logical=True)
    assert partitioned(model).params["hidden"]["kernel"].sharding.spec == PartitionSpec()
    with nn.logical_axis_rules([("units", "tensor"), ("features", None)]):
        assert partitioned(model).params["hidden"]["kernel"].sharding.spec == PartitionSpec(None, "tensor")


def test_unknown_axes_are_an_error_that_names_the_leaf():
    with pytest.raises(LayoutError, match=r"`hidden.kernel` \[8, 16\] over 'model'"):
        partitioned(Partitioned(("model", None)))


def test_a_state_of_partitioned_parameters_is_sharded_by_their_specs():
    model = Partitioned()
    params = model.init(jax.random.key(0), EXAMPLE["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))
    program = flax_state_program(state, partitioned_loss, to_input=lambda batch: batch["x"])
    compiled = compile_program(program, layout=Layout(mesh=make_mesh(tensor=4)))
    placed = compiled.init(jax.random.key(0), EXAMPLE)
    for tree in (placed.params, placed.opt_state[0].trace):
        assert tree["hidden"]["kernel"].sharding.spec == PartitionSpec(None, "tensor")
    batch = compiled.place(EXAMPLE, stacked=False)
    compiled.train_step(placed, compiled.train_buffer(placed, batch, 1), batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the caller's arrays must not be deleted"
