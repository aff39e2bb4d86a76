import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from jax_trainer.checkpoint.arrays import LARGEST, PACK, named_leaves, packed
from jax_trainer.checkpoint.json_codec import DTYPES
from jax_trainer.checkpoint.record import Record, write_manifest
from jax_trainer.checkpoint.restore import read_named, stored_in
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


def test_every_kind_of_small_array_round_trips_bit_for_bit(checkpoint):
    restored, _ = CheckpointStore(checkpoint.parent).restore("latest", STATE)
    assert_same_bits(restored, STATE)


def test_large_arrays_are_stored_by_name_and_small_and_empty_ones_packed():
    together, places = packed(named_leaves(STATE))
    assert set(together) == {"params.large", PACK}
    assert set(places) == set(named_leaves(STATE)) - {"params.large"}
    assert packed({"none": np.zeros((0, 3))}) == ({}, {"none": ("float64", [0, 3], 0)})


def test_a_subset_can_be_read(checkpoint):
    record = Record.read(checkpoint)
    assert set(stored_in(checkpoint, record)) == set(named_leaves(STATE))
    read = read_named(checkpoint, record, {"params.int8_7": KINDS["int8_7"]})
    assert list(read) == ["params.int8_7"]
    np.testing.assert_array_equal(read["params.int8_7"], KINDS["int8_7"])


def test_restored_arrays_are_writable(checkpoint):
    restored, _ = CheckpointStore(checkpoint.parent).restore("latest", STATE)
    restored.params["float32_7"][0] = 5


def test_an_invalid_index_is_rejected(checkpoint):
    file = checkpoint / "checkpoint.json"
    record, small = json.loads(file.read_text()), "params.float32_7"
    entries: list[Any] = [
        ["float32", [7], 10**9],
        ["float32", [10**12], 0],
        ["float32", [-1], 0],
        ["float32", [7], -4],
        ["object", [7], 0],
        ["float32", 7, 0],
        ["float32", [7]],
        "float32",
        None,
    ]
    for entry in entries:
        file.write_text(json.dumps({**record, "small": {**record["small"], small: entry}}))
        write_manifest(checkpoint)  # a tampered checkpoint with a valid manifest
        assert f"{checkpoint}" in CheckpointStore(checkpoint.parent).verify(checkpoint), entry


def test_a_pack_of_another_size_is_rejected_before_it_is_read(checkpoint):
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint / 'state'}/"}).result()
    name = f"{PACK}/.zarray"
    store[name] = json.dumps(json.loads(store[name]) | {"shape": [10**12]}).encode()
    write_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=r"stored as uint8\[1000000000000\]"):
        CheckpointStore(checkpoint.parent).restore("latest", STATE)
