import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jax_trainer.adapters import flax_state_program, linen_program
from jax_trainer.core import TrainState, compile_program
from jax_trainer.testing import (
    TinyLinen,
    assert_same_bits,
    linen_loss,
    numbered_data,
    short_run,
)

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}


def test_shapes_come_from_the_example_batch(key):
    program = linen_program(TinyLinen(), linen_loss, optax.sgd(0.1), to_input=lambda batch: batch["x"])
    state = compile_program(program).init(key, EXAMPLE)
    assert state.params["hidden"]["kernel"].shape == (8, 16)
    assert set(state.model_state) == {"batch_stats"}


def test_the_loss_contract_of_the_documents_trains():
    model = TinyLinen()

    def loss(params, state, batch, rng, train):
        variables = {"params": params, **state.mutable_variables}
        mutable = list(state.mutable_variables) if train else False
        out = state.apply_fn(variables, batch["x"], train=train, rngs={"dropout": rng}, mutable=mutable)
        logits, changed = out if train else (out, None)
        value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        return value, (changed, {"acc": (logits.argmax(-1) == batch["y"]).mean()})

    _, seen = short_run(linen_program(model, loss, optax.adam(1e-2), to_input=lambda batch: batch["x"]), 60)
    assert seen.steps[60]["loss"] < 0.6 * seen.steps[1]["loss"]


def test_any_mutable_collection_is_carried_and_sown_ones_are_not():
    class Counting(nn.Module):
        @nn.compact
        def __call__(self, x):
            calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
            if not self.is_initializing():
                calls.value = calls.value + 1
            self.sow("intermediates", "input", x)
            return nn.Dense(1)(x)

    def loss(params, state, batch, rng, train):
        out, changed = state.apply_fn(
            {"params": params, **state.mutable_variables}, batch["x"], mutable=["counters", "intermediates"]
        )
        return (out**2).mean(), (changed, {})

    state, _ = short_run(linen_program(Counting(), loss, optax.sgd(0.1), to_input=lambda batch: batch["x"]))
    assert int(state.model_state["counters"]["calls"]) == 5
    assert set(state.model_state) == {"counters"}


def test_a_loss_that_returns_no_collections_leaves_them_as_they_were(key):
    def loss(params, state, batch, rng, train):
        logits = state.apply_fn({"params": params, **state.mutable_variables}, batch["x"])
        return (logits**2).mean(), (None, {})

    program = linen_program(TinyLinen(), loss, optax.sgd(0.1), to_input=lambda batch: batch["x"])
    start = compile_program(program).init(key, EXAMPLE)
    end, _ = short_run(program)
    assert_same_bits(end.model_state, start.model_state)


def test_named_streams_reach_the_model_and_differ():
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
    assert compile_program(program).init(key, EXAMPLE).params["Dense_0"]["kernel"].shape == (8, 1)


def test_a_flax_style_state_goes_on_from_where_it_is_and_stays_alive():
    model = TinyLinen()
    variables = model.init(jax.random.key(3), EXAMPLE["x"])
    mine = TrainState.create(
        apply_fn=model.apply, params=variables["params"], batch_stats=variables["batch_stats"], tx=optax.adam(1e-2)
    )
    end, seen = short_run(flax_state_program(mine, linen_loss), 40)
    assert int(end.step) == 40
    assert int(mine.step) == 0
    assert seen.steps[40]["loss"] < seen.steps[1]["loss"]
    np.testing.assert_array_equal(mine.params["out"]["kernel"], variables["params"]["out"]["kernel"])


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_training_is_the_same_twice(micro_batches):
    program = linen_program(
        TinyLinen(), linen_loss, optax.adam(1e-2), to_input=lambda batch: batch["x"], micro_batches=micro_batches
    )
    assert_same_bits(short_run(program)[0], short_run(program)[0])


@pytest.mark.parametrize(("returned", "told"), [(1.0, "a float"), ((1.0, {}), "a tuple of float, dict")])
def test_a_loss_that_returns_something_else_is_told_what_to_return(returned, told):
    program = linen_program(
        TinyLinen(),
        lambda params, state, batch, rng, train: returned,
        optax.sgd(0.1),
        to_input=lambda batch: batch["x"],
    )
    with pytest.raises(TypeError, match=f"returns `loss, .mutable, metrics.`.* this one returned {told}"):
        short_run(program)


def test_clipping_a_state_that_brings_its_optimizer_is_refused_with_the_cure():
    mine = TrainState.create(apply_fn=TinyLinen().apply, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1))
    with pytest.raises(ValueError, match="Clip in its `tx`"):
        flax_state_program(mine, linen_loss, clip_norm=1.0)
