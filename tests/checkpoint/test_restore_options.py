"""Restoring into a different state: cast, partial and rename."""

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.checkpoint.arrays import Spec
from jax_trainer.checkpoint.restore import RestoreOptions
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits
from tests.rows import noted_row

F32, BF16, I32 = (Spec(dtype, (3,)) for dtype in ("float32", "bfloat16", "int32"))
ENCODER = {"encoder": {"kernel": jnp.arange(6.0) / 7, "bias": jnp.ones(2)}, "head": {"kernel": jnp.arange(3.0) / 3}}


def state(params: Any, **others: Any) -> TrainState:
    base = TrainState(jnp.int32(3), params, {}, {"m": jnp.ones(2)}, jnp.zeros(2, jnp.uint32), {})
    return base.replace(**others)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> CheckpointStore:
    store = CheckpointStore(tmp_path_factory.mktemp("one"))
    store.save(state(ENCODER), Position(), {})
    return store


def zeros(tree: Any, dtype: Any = None) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), tree)


def test_cast_rounds_floats_as_the_device_does(store):
    like = state(zeros(ENCODER, jnp.bfloat16))
    with pytest.raises(CheckpointError, match=r"params.encoder.bias: expected bfloat16\[2\], found float32\[2\]"):
        store.restore("latest", like)
    restored, _ = store.restore("latest", like, cast=True)
    assert_same_bits(restored.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), ENCODER))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))
    assert_same_bits(restored.opt_state, {"m": jnp.ones(2)})


def test_cast_arrays_have_the_sharding_of_the_state(store):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    like = state(zeros(ENCODER, jnp.bfloat16))
    like.params["encoder"]["kernel"] = jax.device_put(like.params["encoder"]["kernel"], split)
    restored, _ = store.restore("latest", like, cast=True)
    assert restored.params["encoder"]["kernel"].sharding == split
    assert not restored.params["head"]["kernel"].committed


def test_only_floats_are_cast():
    for found, expected in [(I32, F32), (F32, I32), (Spec("key<a>", (3,)), F32)]:
        with noted_row(found, expected), pytest.raises(CheckpointError, match="a: expected"):
            RestoreOptions(cast=True).sources({"a": found}, {"a": expected}, ("a",), Path("x"))


def test_a_shape_is_never_changed():
    with pytest.raises(CheckpointError, match=r"a: expected bfloat16\[3\], found bfloat16\[4\]"):
        RestoreOptions(cast=True, partial=True).sources({"a": Spec("float32", (4,))}, {"a": BF16}, ("a",), Path("x"))


def test_partial_restores_the_common_part_and_reports_both_remainders(store, caplog):
    params = {"encoder": zeros(ENCODER["encoder"]), "new": {"kernel": jnp.full(4, 7.0)}}
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        restored, _ = store.restore("latest", state(params), partial=True, only=("params",))
    assert_same_bits(restored.params, {"encoder": ENCODER["encoder"], "new": params["new"]})
    [line] = caplog.records
    assert "2 arrays restored, 1 keep their values (params.new.kernel), 1 of the checkpoint" in line.getMessage()
    assert "unused (params.head.kernel)" in line.getMessage()


def test_partial_without_a_common_part_is_an_error(store):
    with pytest.raises(CheckpointError, match=r"params.kernel: expected float32\[6\], missing"):
        store.restore("latest", state({"kernel": jnp.zeros(6)}), partial=True, only=("params",))


def test_rename_maps_names(store):
    like = state({"backbone": zeros(ENCODER["encoder"]), "head": zeros(ENCODER["head"])})
    with pytest.raises(CheckpointError, match=r"it has params.encoder.kernel: renamed\?"):
        store.restore("latest", like)
    restored, _ = store.restore("latest", like, rename={"params.encoder.*": "params.backbone.*"})
    assert_same_bits(restored.params, {"backbone": ENCODER["encoder"], "head": ENCODER["head"]})


def test_a_name_may_move_to_another_field(store):
    like = state(zeros(ENCODER), extra={"ema": zeros(ENCODER["head"])})
    restored, _ = store.restore("latest", like, rename={"params.head.*": "extra.ema.*"}, only=("extra",))
    assert_same_bits(restored.extra["ema"], ENCODER["head"])
    assert_same_bits(restored.params, zeros(ENCODER))


def test_the_first_matching_pattern_is_used_and_several_stars_keep_their_order():
    held = {"params.a.x.k": F32, "params.b.y.k": F32}
    rename = {"params.a.*": "params.c.*", "params.*.k": "params.*.q", "params.*.*.z": "params.*.*"}
    with pytest.raises(CheckpointError, match=r" x .*'params.\*.\*.z'.*params.a"):
        RestoreOptions(rename=rename).sources(held, held, ("params",), Path("x"))
    del rename["params.*.*.z"]
    expected = {"params.c.x.k": F32, "params.b.y.q": F32}
    sources = RestoreOptions(rename=rename).sources(held, expected, ("params",), Path("x"))
    assert sources == {"params.c.x.k": "params.a.x.k", "params.b.y.q": "params.b.y.k"}
    several = RestoreOptions(rename={"params.*.*": "params.*.new.*"})
    assert several.sources({"params.a.b": F32}, {"params.a.new.b": F32}, ("params",), Path("x")) == {
        "params.a.new.b": "params.a.b"
    }


def test_two_names_with_the_same_target_are_an_error():
    with pytest.raises(CheckpointError, match=r"both params.a and params.b .*to params.b"):
        RestoreOptions(rename={"params.a": "params.b"}).sources(
            {"params.a": F32, "params.b": F32}, {"params.b": F32}, ("params",), Path("x")
        )


def test_both_sides_need_the_same_number_of_stars():
    with pytest.raises(ValueError, match=r"as many `\*` on both sides, got 'a.\*' and 'b'"):
        RestoreOptions(rename={"a.*": "b"})


def test_a_state_restores_into_another_mesh_and_back(tmp_path):
    wide, narrow = (
        NamedSharding(jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
        for size in (8, 4)
    )
    numbers = np.arange(16.0, dtype=np.float32)
    store = CheckpointStore(tmp_path)
    store.save(state({"w": jax.device_put(numbers, wide)}), Position(), {})
    for like in (jax.device_put(numbers, narrow), jax.device_put(numbers, wide), jnp.zeros(16)):
        restored, _ = store.restore("latest", state({"w": like}))
        assert restored.params["w"].sharding == like.sharding
        assert_same_bits(np.asarray(restored.params["w"]), numbers)
