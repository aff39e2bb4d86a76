"""A state that is initialised in pieces has the bits of one that is initialised by one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import compile, compile_program, initialisation, with_ema
from jax_trainer.sharding import Layout, Partitioning, make_mesh
from jax_trainer.testing import assert_same_bits, numbered_data, tiny_program

KEY = jax.random.key(3)
BATCH = {name: rows[:16] for name, rows in numbered_data(16).items()}
LAYERS = 6


def layers(share: bool = False, extra: Any = None) -> Any:
    """A program whose state has many arrays of few kinds."""

    def init(key: jax.Array, batch: Any) -> dict[str, Any]:
        common = jax.random.normal(key, (4, 4))
        for _ in range(20 if share else 0):
            common = jnp.sin(common)
        keys = jax.random.split(key, LAYERS)
        kernels = {
            str(n): jax.random.truncated_normal(keys[n], -2, 2, (8, 8)) * (common[0, 0] if share else 0.02)
            for n in range(LAYERS)
        }
        return {**kernels, **{f"bias{n}": jnp.zeros(8) for n in range(LAYERS)}, **(extra or {})}

    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))  # type: ignore[return-value]

    return with_ema(function_program(init, loss, optax.adam(0.1)), 0.9)


def in_one(monkeypatch, make: Any, mesh: bool) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(compile, "split", lambda *_: None)
        return make(mesh)


@pytest.fixture
def always(monkeypatch):
    """Every state is initialised in pieces, however few arrays are alike."""
    monkeypatch.setattr(initialisation, "MOST_KINDS", 1)
    monkeypatch.setattr(compile, "_kept", type(compile._kept)())


def initialised(program: Any, mesh: bool) -> Any:
    partitioning = Partitioning(smallest=1) if mesh else Partitioning()
    layout = Layout(mesh=make_mesh(data=2, fsdp=4), param_spec=partitioning) if mesh else None
    return compile_program(program, layout=layout).init(KEY, BATCH)


def test_arrays_of_one_kind_share_a_program(monkeypatch):
    monkeypatch.setattr(compile, "_kept", kept := type(compile._kept)())
    state = initialised(layers(), False)
    arrays = len(jax.tree.leaves(state))
    assert arrays == 8 * LAYERS + 3  # parameters, their average and two moments; key, step and the optimizer's count
    assert len(kept) == 5  # kernels, zeros of three shapes, the key
    parts = [state.params[str(n)] for n in range(LAYERS)]
    assert len({np.asarray(part).tobytes() for part in parts}) == LAYERS


@pytest.mark.parametrize(
    ("flavour", "mesh"),
    [
        ("linen", True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("linen", False), ("nnx", False), ("nnx", True))),
    ],
)
def test_states_initialised_in_pieces_have_the_same_bits_and_shardings(always, monkeypatch, flavour, mesh):
    program = with_ema(tiny_program(flavour), 0.9)
    pieces = initialised(program, mesh)
    whole = in_one(monkeypatch, lambda mesh: initialised(program, mesh), mesh)
    assert_same_bits(pieces, whole)
    for one, other in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        assert (one.sharding, one.committed, one.weak_type) == (other.sharding, other.committed, other.weak_type)


def test_a_computation_that_all_arrays_share_is_not_repeated(monkeypatch):
    assert initialisation.split(layers(share=True).init, KEY, BATCH) is None
    assert initialisation.split(layers().init, KEY, BATCH) is not None


def test_the_key_is_not_deleted_with_the_state():
    program = compile_program(layers())
    state = program.init(KEY, BATCH)
    buffer = program.train_buffer(state, BATCH, 1)
    program.train_step(state, buffer, BATCH)
    assert state.rng.is_deleted()
    assert not KEY.is_deleted()
    jax.random.normal(KEY)


def test_existing_arrays_are_constants_of_the_pieces():
    table = np.arange(6.0, dtype=np.float32)
    state = initialised(layers(extra={"table": jnp.asarray(table)}), False)
    np.testing.assert_array_equal(state.params["table"], table)
