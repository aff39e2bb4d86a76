import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jax_trainer.checkpoint.content import read_named, stored_in
from jax_trainer.checkpoint.json_codec import DTYPES
from jax_trainer.checkpoint.leaves import named_leaves
from jax_trainer.checkpoint.manifest import write_manifest
from jax_trainer.checkpoint.packing import INDEX, LARGEST, PACK, packed
from jax_trainer.checkpoint.record import Record
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.datasets import Position
from jax_trainer.testing import assert_same_bits

KINDS = {f"{name}_{size}": np.arange(size).astype(dtype) for name, dtype in DTYPES.items() for size in (1, 7)}
LARGE = np.arange(LARGEST, dtype=np.float32)
STATE = TrainState(
    jnp.int32(3), {**KINDS, "large": LARGE, "none": np.zeros((0, 3))}, {}, (), jnp.zeros(2, jnp.uint32), {}
)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return CheckpointStore(tmp_path).save(STATE, Position(), {})


def test_every_kind_of_small_array_comes_back_bit_for_bit(checkpoint):
    restored, _ = CheckpointStore(checkpoint.parent).restore("latest", STATE)
    assert_same_bits(restored, STATE)


def test_what_is_large_is_stored_by_its_name_and_what_is_small_together():
    together, places = packed(named_leaves(STATE))
    assert set(together) == {"params.large", "params.none", PACK}
    assert set(places) == set(named_leaves(STATE)) - {"params.large", "params.none"}


def test_one_small_array_stays_by_itself():
    assert packed({"a": np.zeros(3), "b": LARGE}) == ({"a": pytest.approx(np.zeros(3)), "b": pytest.approx(LARGE)}, {})


def test_some_of_them_can_be_read_alone(checkpoint):
    record = Record.read(checkpoint)
    assert set(stored_in(checkpoint, record)) == set(named_leaves(STATE))
    read = read_named(checkpoint, {"params.int8_7": KINDS["int8_7"]})
    assert list(read) == ["params.int8_7"]
    np.testing.assert_array_equal(read["params.int8_7"], KINDS["int8_7"])


def test_what_was_restored_may_be_written_to(checkpoint):
    restored, _ = CheckpointStore(checkpoint.parent).restore("latest", STATE)
    restored.params["float32_7"][0] = 5


@pytest.mark.parametrize(
    "entry",
    [
        ["float32", [7], 10**9],
        ["float32", [10**12], 0],
        ["float32", [-1], 0],
        ["float32", [7], -4],
        ["object", [7], 0],
        ["float32", 7, 0],
        ["float32", [7]],
        "float32",
        None,
    ],
    ids=str,
)
def test_an_index_that_makes_no_sense_is_refused(checkpoint, entry):
    file = checkpoint / INDEX
    file.write_text(json.dumps({**json.loads(file.read_text()), "params.float32_7": entry}))
    write_manifest(checkpoint)  # somebody else made it like this
    with pytest.raises(CheckpointError, match="small.json"):
        CheckpointStore(checkpoint.parent).restore("latest", STATE)


def test_a_pack_of_another_size_is_refused_before_it_is_read(checkpoint):
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint / 'state'}/"}).result()
    name = f"{PACK}/.zarray"
    store[name] = json.dumps(json.loads(store[name]) | {"shape": [10**12]}).encode()
    write_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=r"stored as uint8\[1000000000000\]"):
        CheckpointStore(checkpoint.parent).restore("latest", STATE)


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_an_index_that_is_none_is_refused(checkpoint, text):
    (checkpoint / INDEX).write_text(text)
    write_manifest(checkpoint)
    with pytest.raises(CheckpointError):
        CheckpointStore(checkpoint.parent).restore("latest", STATE)
