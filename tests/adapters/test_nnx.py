from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jax_trainer.adapters import linen_program, nnx_program, write_back
from jax_trainer.core import Program, compile_program, stream, with_ema
from jax_trainer.datasets import Data
from jax_trainer.engine import Plan, evaluate, run
from jax_trainer.sharding import Layout, LayoutError, Partitioning, make_mesh
from jax_trainer.testing import (
    TinyLinen,
    TinyNNX,
    assert_close,
    assert_same_bits,
    linen_loss,
    nnx_loss,
    numbered_data,
    numbered_loader,
    short_run,
)
from tests.trainer.trainer_runs import waves

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


class Small(nnx.Module):
    """The smallest classifier."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(8, 4, kernel_init=waves, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


def report_of(program: Program) -> dict[str, Any]:
    """The metrics of a step, which is traced and not compiled."""
    state = jax.eval_shape(program.init, jax.random.key(0), EXAMPLE)
    return jax.eval_shape(program.train_step, state, EXAMPLE)[1].metrics.by_name


@pytest.mark.slow
def test_same_weights_and_seed_give_the_losses_of_linen():
    linen = linen_program(TinyLinen(0.0), linen_loss, optax.sgd(0.1), to_input=lambda batch: batch["x"])
    start = compile_program(linen).init(jax.random.key(0), EXAMPLE)
    nnx_model = TinyNNX(nnx.Rngs(0), 0.0)
    for name in ("hidden", "norm", "out"):
        for leaf, value in start.params[name].items():
            getattr(getattr(nnx_model, name), leaf)[...] = np.asarray(value)
    stats = start.model_state["batch_stats"]["norm"]
    nnx_model.norm.mean[...], nnx_model.norm.var[...] = np.asarray(stats["mean"]), np.asarray(stats["var"])
    end_linen, seen_linen = short_run(linen, 40)
    end_nnx, seen_nnx = short_run(nnx_program(nnx_model, nnx_loss, optax.sgd(0.1)), 40)
    losses = [[seen.steps[step]["loss"] for step in range(1, 41)] for seen in (seen_linen, seen_nnx)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert_close(end_nnx.params["out"], dict(end_linen.params["out"]), rtol=1e-4, atol=1e-5)


def test_batch_statistics_are_updated_in_training_only(key):
    compiled = compile_program(nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1)))
    state = compiled.init(key, EXAMPLE)
    before = jax.tree.map(np.asarray, state.model_state)
    evaluate(compiled, state, {"val": [EXAMPLE]})
    assert_same_bits(jax.tree.map(np.asarray, state.model_state), before)
    state = run(compiled, state, Data([EXAMPLE]), Plan(max_epochs=1))
    assert np.abs(np.asarray(state.model_state["norm"]["mean"]) - before["norm"]["mean"]).max() > 0


def test_dropout_differs_between_steps_and_repeats_with_the_seed():
    class Mask(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def loss(model, batch, train):
        ones = jnp.ones(64)
        bits = jnp.sin(jnp.arange(64.0))  # distinguishes masks
        return model.scale[...] * 0, {"a": (model.a(ones) * bits).sum(), "b": (model.b(ones) * bits).sum()}

    _, seen = short_run(nnx_program(Mask, loss, optax.sgd(0.1)), 3)
    draws = [seen.steps[step][name] for step in (1, 2, 3) for name in ("a", "b")]
    assert len(set(draws)) == 6
    _, again = short_run(nnx_program(Mask, loss, optax.sgd(0.1)), 3)
    assert [again.steps[step][name] for step in (1, 2, 3) for name in ("a", "b")] == draws


def test_random_streams_are_not_part_of_the_state(key):
    state = compile_program(nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1))).init(key, EXAMPLE)
    assert set(state.model_state) == {"norm"}
    kinds = {type(node) for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))}
    assert not any(issubclass(kind, nnx.Variable) for kind in kinds)


def test_any_kind_of_variable_is_carried_and_new_ones_are_not():
    class Calls(nnx.Variable):
        pass

    class Counting(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, kernel_init=waves, rngs=rngs) for _ in range(2)])
            self.calls = Calls(jnp.zeros((), jnp.int32))
            self.tied = self.layers[0]

        def __call__(self, x):
            self.calls[...] += 1
            self.seen = nnx.Intermediate(x)
            for layer in (*self.layers, self.tied):
                x = layer(x)
            return x

    def loss(model, batch, train):
        return (model(batch["x"]) ** 2).mean(), {}

    state, _ = short_run(nnx_program(Counting, loss, optax.sgd(1e-6)))
    assert int(state.model_state["calls"]) == 5
    assert set(state.model_state) == {"calls"}
    assert set(state.params["layers"]) == {0, 1}
    assert len(jax.tree.leaves(state.params)) == 4  # a shared layer is there once


def test_only_what_the_filter_names_is_trained(key):
    class Frozen(nnx.Param):
        pass

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.fixed, self.free = Frozen(jnp.ones(3)), nnx.Param(jnp.ones(3))

    def loss(model, batch, train):
        return (model.fixed[...] * model.free[...]).sum(), {}

    def trainable(path, variable):
        return isinstance(variable, nnx.Param) and not isinstance(variable, Frozen)

    state, _ = short_run(nnx_program(Model, loss, optax.sgd(0.1), trainable=trainable))
    assert set(state.params) == {"free"}
    np.testing.assert_array_equal(state.model_state["fixed"], np.ones(3))


def test_an_existing_model_is_not_changed_until_write_back():
    model = TinyNNX(nnx.Rngs(7))
    before = np.array(model.out.kernel[...])
    state, _ = short_run(nnx_program(model, nnx_loss, optax.sgd(0.1)), 20)
    np.testing.assert_array_equal(model.out.kernel[...], before)
    write_back(model, state)
    np.testing.assert_array_equal(model.out.kernel[...], state.params["out"]["kernel"])
    np.testing.assert_array_equal(model.norm.mean[...], state.model_state["norm"]["mean"])
    model.eval()
    assert model(jnp.asarray(EXAMPLE["x"])).shape == (32, 4)


def test_averaged_weights_can_be_written_back():
    model = Small(nnx.Rngs(7))
    state, _ = short_run(with_ema(nnx_program(model, nnx_loss, optax.sgd(0.1)), 0.9), 5)
    write_back(model, state, params=state.extra["ema"])
    np.testing.assert_array_equal(model.out.kernel[...], state.extra["ema"]["out"]["kernel"])


def test_a_model_function_may_take_the_example_batch(key):
    def build(rngs, example):
        return nnx.Linear(example["x"].shape[-1], 4, rngs=rngs)

    def loss(model, batch, train):
        return (model(batch["x"]) ** 2).mean(), {}

    state = jax.eval_shape(nnx_program(build, loss, optax.sgd(0.1)).init, key, EXAMPLE)
    assert state.params["kernel"].shape == (8, 4)


def test_a_class_that_takes_rngs_by_keyword_is_built(key):
    class Model(nnx.Module):
        def __init__(self, *, rngs: nnx.Rngs):
            self.layer = nnx.Linear(8, 4, rngs=rngs)

    def loss(model, batch, train):
        return (model.layer(batch["x"]) ** 2).mean(), {}

    assert jax.eval_shape(nnx_program(Model, loss, optax.sgd(0.1)).init, key, EXAMPLE).params["layer"]


def test_a_step_before_init_is_an_error_that_names_init(key):
    program = nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1))
    state = compile_program(nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1))).init(key, EXAMPLE)
    with pytest.raises(RuntimeError, match="`init"):
        program.train_step(state, EXAMPLE)


@pytest.mark.parametrize("is_run", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["traced", "run"])
def test_stacked_layers_with_their_own_streams_train(is_run):
    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def layers(rngs):
                return nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

            self.linear, self.dropout = layers(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
            def apply(x, linear, dropout):
                return dropout(nnx.relu(linear(x)))

            return apply(x, self.linear, self.dropout)

    def loss(model, batch, train):
        return (model(batch["x"]) ** 2).mean(), {}

    program = nnx_program(Stack, loss, optax.sgd(0.1))
    assert "loss" in report_of(program)
    if not is_run:
        return
    _, seen = short_run(program, 20)
    assert seen.steps[20]["loss"] < seen.steps[1]["loss"]


def test_with_a_layout_no_device_holds_a_complete_sharded_parameter(key):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def rows(path, shape):
        split = path.endswith("kernel") and shape[0] % 8 == 0
        return jax.sharding.PartitionSpec("data") if split else jax.sharding.PartitionSpec()

    layout = Layout(mesh=mesh, param_spec=rows)
    compiled = compile_program(nnx_program(Small, nnx_loss, optax.sgd(0.1, momentum=0.9)), layout=layout)
    state = compiled.init(key, EXAMPLE)
    for tree in (state.params, state.opt_state[0].trace):
        assert {shard.data.shape for shard in tree["out"]["kernel"].addressable_shards} == {(1, 4)}
    state = run(compiled, state, Data([EXAMPLE] * 3), Plan(max_epochs=1))
    assert {shard.data.shape for shard in state.params["out"]["kernel"].addressable_shards} == {(1, 4)}


def test_a_loss_may_return_no_metrics():
    def loss(model, batch, train):
        return (model(batch["x"]) ** 2).mean()

    assert set(report_of(nnx_program(Small, loss, optax.sgd(0.1), log_norms=False))) == {"loss"}


@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loss_may_take_rng_and_step(micro_batches):
    def loss(model, batch, train, rng, step):
        value, _ = nnx_loss(model, batch, train)
        return value, {"drawn": jax.random.uniform(rng), "step": step}

    program = nnx_program(Small, loss, optax.sgd(0.1), micro_batches=micro_batches)
    drawn = [short_run(program, 3)[1].steps for _ in range(2)]
    assert [drawn[0][step]["step"] for step in (1, 2, 3)] == [0, 1, 2]
    assert len({drawn[0][step]["drawn"] for step in (1, 2, 3)}) == 3
    assert drawn[0] == drawn[1]


def test_a_model_may_be_built_from_a_key(key):
    class FromKey(nnx.Module):
        def __init__(self, key: jax.Array, example):
            assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            self.w = nnx.Param(jax.random.normal(key, (example["x"].shape[-1],)))

    def both(rngs, key):
        assert isinstance(rngs, nnx.Rngs)
        return nnx.Linear(8, 4, rngs=nnx.Rngs(jax.random.fold_in(key, 1)))

    loss = lambda model, batch, train: (model.w[...] ** 2).sum()
    state = compile_program(nnx_program(FromKey, loss, optax.sgd(0.1))).init(key, EXAMPLE)
    assert_same_bits(state.params["w"], jax.random.normal(stream(key, "init"), (8,)))
    state = jax.eval_shape(nnx_program(both, loss, optax.sgd(0.1)).init, key, EXAMPLE)
    assert state.params["kernel"].shape == (8, 4)


def test_an_existing_model_predicts_and_starts_from_other_weights(key):
    program = nnx_program(TinyNNX(nnx.Rngs(7)), nnx_loss, optax.sgd(0.1), to_input=lambda batch: (batch["x"],))
    compiled, other = compile_program(program), TinyNNX(nnx.Rngs(8))
    state = compiled.init(key, EXAMPLE)
    weights = jax.tree.map(lambda leaf: leaf[...], nnx.to_pure_dict(nnx.state(other, nnx.Param)))
    started = compiled.init_from_params(key, weights, state.model_state)
    other.eval()
    assert_close(compiled.predict(started, EXAMPLE), other(jnp.asarray(EXAMPLE["x"])), rtol=1e-5, atol=1e-5)
    run(compiled, started, Data([EXAMPLE] * 2), Plan(max_epochs=1))
    assert_same_bits(weights["out"]["kernel"], other.out.kernel[...])


def test_a_model_that_was_only_traced_can_start_from_weights(key):
    start = compile_program(nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1))).init(key, EXAMPLE)
    again = compile_program(nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1)))
    again.shapes(key, EXAMPLE)
    started = again.init_from_params(key, start.params, start.model_state)
    assert_same_bits(started, start)
    assert int(run(again, started, Data([EXAMPLE]), Plan(max_epochs=1)).step) == 1


class Block(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(8, 8, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        x = self.layer(x)
        self.sow(nnx.Intermediate, "act", x)
        return nnx.relu(x)


class Sowing(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.norm, self.out = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(8, 4, kernel_init=waves, rngs=rngs)

    def __call__(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        x = self.norm(x)
        self.sow(nnx.Intermediate, "largest", x.max())
        return self.out(x)


def sowing_program(micro_batches=1, modes=("mean", "max", "val"), loss=nnx_loss):
    options: Any = {"micro_batches": micro_batches, "intermediates": modes}
    return nnx_program(Sowing, loss, optax.sgd(0.1), to_input=lambda batch: batch["x"], **options)


@cache
def sown(micro_batches, modes=("mean", "max", "val")):
    program = sowing_program(micro_batches, modes)
    return program, *short_run(program, 4)


def logged(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("intermediate/")}


@pytest.mark.parametrize("micro_batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_sown_values_are_logged_in_training(micro_batches):
    program, state, seen = sown(micro_batches)
    start = compile_program(program).init(jax.random.key(0), EXAMPLE)
    layer = jax.tree.map(np.asarray, start.params["blocks"][0]["layer"])
    first = next(iter(numbered_loader().epoch(1)))["x"] @ layer["kernel"] + layer["bias"]
    found = logged(seen.steps[1])
    assert found["intermediate/blocks.0.act.0_mean"] == pytest.approx(first.mean(), rel=1e-5)
    assert found["intermediate/blocks.0.act.0_max"] == pytest.approx(first.max(), rel=1e-5)
    acts = ("blocks.0.act.0", "blocks.0.act.1", "blocks.1.act")
    assert set(found) == {
        "intermediate/largest_val",
        *(f"intermediate/{act}_{mode}" for act in acts for mode in ("mean", "max")),
    }
    assert set(state.model_state) == {"norm"}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_logging_sown_values_does_not_change_training(micro_batches):
    _, state, _ = sown(micro_batches)
    _, plain, seen = sown(micro_batches, ())
    assert not logged(seen.steps[1])
    assert_same_bits(state, plain)


def test_evaluations_and_predictions_log_no_sown_values(key):
    compiled = compile_program(sowing_program())
    _, trained, evaluated = compiled.shapes(key, EXAMPLE)
    assert logged(trained.by_name)
    assert not logged(evaluated.by_name)
    assert compiled.predict(compiled.init(key, EXAMPLE), EXAMPLE).shape == (32, 4)


def test_a_loss_may_pop_sown_values():
    def loss(model, batch, train):
        value, metrics = nnx_loss(model, batch, train)
        sown: Any = nnx.pop(model, nnx.Intermediate)
        return value + 0.1 * sown["largest"][0], metrics

    found = report_of(sowing_program(loss=loss))
    assert "acc" in found and not logged(found)


def test_a_model_that_sows_nothing_logs_nothing():
    assert not logged(report_of(nnx_program(TinyNNX, nnx_loss, optax.sgd(0.1), intermediates=("mean",))))


class PartitionedNNX(nnx.Module):
    """Two layers; the spec of the first one shards it, that of the second one replicates it."""

    def __init__(self, rngs: nnx.Rngs, axis: str = "tensor") -> None:
        init = nnx.initializers.ones
        self.hidden = nnx.Linear(8, 16, kernel_init=nnx.with_partitioning(init, (None, axis)), rngs=rngs)
        self.out = nnx.Linear(16, 4, kernel_init=nnx.with_partitioning(init, (None, None)), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


def test_parameters_are_sharded_by_the_model_specs():
    for exists in [False, True]:
        with nnx.use_eager_sharding(False):
            model = PartitionedNNX(nnx.Rngs(0)) if exists else PartitionedNNX
        layout = Layout(mesh=make_mesh(fsdp=2, tensor=4), param_spec=Partitioning(smallest=1))
        compiled = compile_program(
            nnx_program(model, nnx_loss, optax.sgd(0.1, momentum=0.9)), layout=layout, donate=False
        )
        start = compiled.init(jax.random.key(0), EXAMPLE)
        batch = compiled.place(EXAMPLE, stacked=False)
        after, _, _ = compiled.train_step(start, compiled.train_buffer(start, batch, 1), batch)
        for state in (start, after):
            for tree in (state.params, state.opt_state[0].trace):
                assert tree["hidden"]["kernel"].sharding.spec == PartitionSpec(None, "tensor"), exists
                assert tree["out"]["kernel"].sharding.is_fully_replicated, exists
                assert tree["hidden"]["bias"].sharding.spec == PartitionSpec("fsdp"), exists


def test_unknown_axes_are_an_error_that_names_the_leaf():
    program = nnx_program(lambda rngs: PartitionedNNX(rngs, "model"), nnx_loss, optax.sgd(0.1))
    with pytest.raises(LayoutError, match=r"`hidden.kernel` \[8, 16\] over 'model'"):
        compile_program(program, layout=Layout(mesh=make_mesh())).init(jax.random.key(0), EXAMPLE)
