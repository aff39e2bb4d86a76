from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.core import FlatState, FlaxState, TrainState, copy_state, new_state, step_of
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program

TX = optax.adam(0.1)


def apply(variables: Any, x: jax.Array) -> jax.Array:
    return variables["params"]["w"] * x


def flax_state(**collections: Any) -> FlaxState:
    return TrainState.create(apply_fn=apply, params={"w": jnp.arange(3.0)}, tx=TX, **collections)


@cache
def start(flavour: str) -> TrainState:
    return jax.jit(tiny_program(flavour, optax.sgd(0.1)).init)(jax.random.key(0), numbered_data(4))


def test_a_state_is_data_only(flavour):
    state = start(flavour)
    leaves, structure = jax.tree.flatten(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    rebuilt = structure.unflatten([np.asarray(leaf) for leaf in leaves])
    assert type(rebuilt) is TrainState
    assert_same_bits(rebuilt, state)


def test_no_field_of_a_state_is_static():
    fields = TrainState.__dataclass_fields__
    assert set(fields) == {"step", "params", "model_state", "opt_state", "rng", "extra", "frozen"}
    assert all(field.metadata.get("pytree_node", True) for field in fields.values())


def test_create_makes_a_state_as_flax_users_write_it():
    state = flax_state(batch_stats={"mean": jnp.zeros(2)}, rng=jax.random.key(5))
    assert int(state.step) == 0
    assert_same_bits(state.params, {"w": jnp.arange(3.0)})
    assert_same_bits(state.opt_state, TX.init(state.params))
    assert_same_bits(state.batch_stats, {"mean": jnp.zeros(2)})
    assert_same_bits(state.key, jax.random.key(5))
    assert state.tx is TX
    assert state.apply_fn is apply


def test_apply_gradients_is_one_optax_update():
    state, grads = flax_state(), {"w": jnp.asarray([1.0, -2.0, 0.0])}
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    after = state.apply_gradients(grads=grads)
    assert_close(after.params, optax.apply_updates(state.params, updates))
    assert_close(after.opt_state, opt_state)
    assert int(after.step) == 1


def test_apply_gradients_replaces_only_the_passed_collections():
    state = flax_state(batch_stats={"mean": jnp.zeros(2)}, cache={"k": jnp.ones(1)})
    after = state.apply_gradients(grads={"w": jnp.ones(3)}, batch_stats={"mean": jnp.ones(2)})
    assert_same_bits(after.batch_stats, {"mean": jnp.ones(2)})
    assert_same_bits(after.model_state["cache"], {"k": jnp.ones(1)})


def test_plain_has_the_data_only():
    state = flax_state(batch_stats={"mean": jnp.zeros(2)})
    plain = state.plain()
    assert type(plain) is TrainState
    for name in TrainState.__dataclass_fields__:
        assert_same_bits(getattr(plain, name), getattr(state, name))


def test_a_copy_outlives_the_donated_original(flavour):
    state = jax.tree.map(jnp.copy, start(flavour))
    copy = copy_state(state)
    jax.block_until_ready(jax.jit(lambda s: s, donate_argnums=0)(state))
    assert state.params["hidden"]["kernel"].is_deleted()
    assert_same_bits(copy, start(flavour))


def test_the_key_is_restored_from_its_data():
    for impl in ["threefry2x32", "rbg"]:
        key = jax.random.key(7, impl=impl)
        state = new_state({}, {}, TX, key)
        assert jnp.issubdtype(state.rng.dtype, jnp.unsignedinteger), impl
        assert state.key.dtype == key.dtype, impl
        assert_same_bits(state.key, key)
        assert_same_bits(jax.random.normal(state.key, (3,)), jax.random.normal(key, (3,)))


def test_a_legacy_key_is_accepted_too():
    assert_same_bits(new_state({}, {}, TX, jax.random.PRNGKey(7)).key, jax.random.key(7))


def test_the_step_is_read_as_a_python_number():
    state = flax_state().apply_gradients(grads={"w": jnp.ones(3)})
    assert step_of(state) == 1
    assert type(step_of(state)) is int


def test_a_flat_state_is_unflattened_once_on_access(key):
    state = TrainState.create(apply_fn=len, params={"w": jnp.ones(3)}, tx=optax.adam(0.1)).plain()
    flat = FlatState.of(state)
    again = FlatState(flat.leaves, flat.structure)
    assert_same_bits(again.state, state)
    assert again.state is again.state


def test_fields_of_the_state_are_fields_of_apply_gradients():
    state, grads = flax_state(batch_stats={"mean": jnp.zeros(2)}), {"w": jnp.ones(3)}
    after = state.apply_gradients(grads=grads, rng=jax.random.key(9), extra={"seen": jnp.ones(1)})
    assert_same_bits(after.key, jax.random.key(9))
    assert_same_bits(after.extra, {"seen": jnp.ones(1)})
    changed = {"batch_stats": {"mean": jnp.ones(2)}, "intermediates": {"h": jnp.ones(1)}}
    after = state.apply_gradients(grads=grads, mutable_variables=changed)
    assert_same_bits(after.mutable_variables, {"batch_stats": {"mean": jnp.ones(2)}})  # what was sown is no state


def test_a_model_without_statistics_accepts_none_and_has_none():
    for none in [None, {}]:
        assert not flax_state().batch_stats, none
        state = flax_state(batch_stats=none)
        assert not state.batch_stats, none
        assert state.model_state == {}, none  # which a model can be called with
        after = state.apply_gradients(grads={"w": jnp.ones(3)}, batch_stats=none)
        assert jax.tree.structure(after) == jax.tree.structure(state), none


def test_an_unknown_field_is_an_error_that_names_it():
    for field, value in [("batch_stat", {"mean": jnp.ones(2)}), ("batch_stats", None)]:
        state = flax_state(batch_stats={"mean": jnp.zeros(2)})
        with pytest.raises(TypeError, match=rf"`{field}\b.*"):
            state.apply_gradients(grads={"w": jnp.ones(3)}, **{field: value})
