import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import flax.struct
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jax_trainer.datasets import records
from jax_trainer.datasets.arrays import ArrayLoader
from jax_trainer.datasets.batch import Batch
from jax_trainer.datasets.records import GrainLoader, LoaderError

pytestmark = pytest.mark.integration  # `make integrations` runs them


@flax.struct.dataclass
class Record(Batch):
    id: np.ndarray
    image: np.ndarray


def as_record(number):
    return Record(1, np.asarray(number, np.int32), np.full((2, 3), number, np.uint8))


def from_bytes(data):
    return {"id": np.frombuffer(data, np.int64)[0], "bytes": np.frombuffer(data, np.uint8)}


def broken(number):
    if number == 20:
        raise ValueError("the record is torn")
    return number


def noisy(record, random):
    return record + random.random()


def noisy_batch(batch, random):
    return {"value": batch, "noise": random.random(len(batch))}


class Counted:
    """Counts what is read, and how."""

    def __init__(self, length):
        self.length, self.calls, self.rows = length, 0, []

    def __len__(self):
        return self.length

    def __getitem__(self, row):
        self.calls += 1
        self.rows.append(row)
        return row


class CountedAtOnce(Counted):
    def __getitems__(self, rows):
        self.calls += 1
        self.rows += rows
        return list(rows)


def left_behind():
    """What of ours runs or lies around: processes, threads, shared memory."""
    shared = {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem."))}
    return {*multiprocessing.active_children(), *threading.enumerate(), *shared}


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    before = left_behind()
    yield
    until = time.monotonic() + 5  # threads take a moment to end
    while (left := left_behind() - before) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    paths = [tmp_path_factory.mktemp("records") / f"part-{part}.array_record" for part in range(2)]
    for path, numbers in zip(paths, (range(20), range(20, 34)), strict=True):
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for number in numbers:
            writer.write(np.int64(number).tobytes())
        writer.close()
    return paths


# ------------------------------------------------------------------------------------------ the same as for arrays


def test_the_batches_are_those_of_the_array_loader(subtests):
    for options in [{}, {"shuffle": True}, {"shuffle": True, "drop_last": True, "seed": 7}]:
        for read_ahead in [0, 2]:
            with subtests.test(read_ahead=read_ahead, options=options):
                arrays = ArrayLoader(np.arange(34), 16, **options)
                loader = GrainLoader(range(34), 16, read_ahead=read_ahead, **options)
                assert len(loader) == len(arrays) and loader.examples == 34
                for epoch, start in [(1, 0), (2, 0), (2, 1), (5, 2), (6, 0), (7, 3), (7, 0), (7, 0), (7, 0)]:
                    assert same(list(loader.epoch(epoch, start)), list(arrays.epoch(epoch, start)))
                    np.testing.assert_array_equal(loader.order(epoch), arrays.order(epoch))
                assert same(list(loader), list(arrays))


def test_transforms_see_the_random_numbers_they_see_for_arrays():
    options = {"shuffle": True, "record_transform": noisy, "batch_transform": noisy_batch}
    arrays = ArrayLoader(np.arange(34.0), 16, **options)
    loader = GrainLoader(np.arange(34.0), 16, **options)
    for a, b in zip(loader.epoch(3, 1), arrays.epoch(3, 1), strict=True):
        np.testing.assert_array_equal(a["value"], b["value"])
        np.testing.assert_array_equal(a["noise"], b["noise"])


def test_two_iterators_of_one_loader_do_not_mix():
    loader = GrainLoader(range(34), 16)
    first, second = loader.epoch(1), loader.epoch(1)
    received = [next(first), next(second), next(first), next(second)]
    assert [batch[0] for batch in received] == [0, 0, 16, 16]


def test_records_that_are_batches_know_their_size():
    loader = GrainLoader(range(34), 16, decode=as_record, batch_transform=size_is_right)
    shapes = [(batch.size, batch.id.shape, batch.image.shape) for batch in loader]
    assert shapes[1:] == [(16, (16,), (16, 2, 3)), (2, (2,), (2, 2, 3))]


def size_is_right(batch, random):
    assert batch.size == len(batch.id)
    return batch


def test_the_parts_of_the_processes_join_to_the_batch(subtests):
    for examples in [34, 33, 32]:
        with subtests.test(examples=examples):
            options = {"shuffle": True, "decode": as_record, "read_ahead": 0}
            full = GrainLoader(range(examples), 16, process=(0, 1), **options)
            parts = [GrainLoader(range(examples), 16, process=(index, 4), **options) for index in range(4)]
            for batch, *shares in zip(full.epoch(2), *(part.epoch(2) for part in parts), strict=True):
                assert [share.size for share in shares] == [batch.size] * 4  # over all processes
                if batch.size == 16:
                    np.testing.assert_array_equal(np.concatenate([share.id for share in shares]), batch.id)
                    assert [share.image.shape for share in shares] == [(4, 2, 3)] * 4
                else:  # the partial last batch is complete in every process
                    assert all(np.array_equal(share.id, batch.id) for share in shares)


def test_entering_late_reads_only_what_is_needed():
    source = Counted(4_000_004)
    loader = GrainLoader(source, 4, shuffle=True, read_ahead=0)
    np.testing.assert_array_equal(next(loader.epoch(9, 1_000_000)), loader.order(9)[-4:])
    assert source.calls == 4


def test_a_source_that_reads_many_at_once_is_called_once_per_batch():
    source = CountedAtOnce(34)
    assert [len(batch) for batch in GrainLoader(source, 16, read_ahead=0)] == [16, 16, 2]
    assert source.calls == 3 and source.rows == list(range(34))


def test_files_are_read_in_the_order_they_are_given(files):
    loader = GrainLoader(files, 16, decode=from_bytes)
    assert loader.examples == 34
    assert np.concatenate([batch["id"] for batch in loader]).tolist() == list(range(34))
    loader = GrainLoader(str(files[1]), 3, decode=from_bytes)
    assert next(iter(loader))["id"].tolist() == [20, 21, 22]


# ------------------------------------------------------------------------------------------ what is refused


def test_what_makes_no_batches_is_an_error_with_a_fix(subtests):
    for source, options, error, message in [
        ("nowhere.array_record", {}, FileNotFoundError, "No ArrayRecord file at 'nowhere.array_record' .1 of 1"),
        ([Path("a"), "b"], {}, FileNotFoundError, "'a' .2 of 2 missing"),
        ([], {"shuffle": True}, ValueError, "empty.* 0 examples"),
        (range(5), {"drop_last": True}, ValueError, "5 examples.* batch of 8"),
        (iter([1]), {}, TypeError, "`__len__` and `__getitem__`.*list_iterator"),
        (range(9), {"threads": 0}, ValueError, "`threads` must be .*at least 1, got 0"),
        (range(9), {"read_ahead": 1.5}, ValueError, "`read_ahead` must be"),
    ]:
        with subtests.test(source=source, options=options), pytest.raises(error, match=message):
            GrainLoader(source, **{"batch_size": 8, **options})


def test_files_without_a_way_to_decode_them_are_refused(files):
    with pytest.raises(ValueError, match="bytes.*`decode`"):
        GrainLoader(files, 16)


def test_records_that_are_no_arrays_are_refused(subtests):
    for decode in [lambda _: None, lambda _: object()]:
        with subtests.test(decode=decode), pytest.raises(LoaderError, match="arrays of numbers.*`decode`"):
            next(iter(GrainLoader(range(9), 3, decode=decode, read_ahead=0)))


def test_without_grain_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    spec = importlib.util.spec_from_file_location("records_without_grain", records.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'jax-trainer\[grain\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# ------------------------------------------------------------------------------------------ its threads


def test_an_error_names_the_batch_and_the_loader_continues_after_it(subtests):
    for read_ahead in [0, 2]:
        with subtests.test(read_ahead=read_ahead):
            loader = GrainLoader(range(34), 4, decode=broken, read_ahead=read_ahead)
            received = []
            with pytest.raises(LoaderError, match=r"Batch 5 \(from 0\) of epoch 1 .*torn") as caught:
                received.extend(loader)
            assert isinstance(caught.value.__cause__, ValueError)
            assert next(loader.epoch(1, 6)).tolist() == [24, 25, 26, 27]


def test_an_unreferenced_loader_ends_its_thread():
    batches = iter(GrainLoader(range(34), 4))
    next(batches)
    assert any(thread.name.startswith("grain") for thread in threading.enumerate())
    del batches
    gc.collect()


def test_an_interrupt_while_a_batch_is_made_stays_an_interrupt():
    def interrupted(number):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(GrainLoader(range(9), 3, decode=interrupted, read_ahead=0)))


# ------------------------------------------------------------------------------------------ with several threads


def with_noise(record, random):
    return {**record, "noise": random.random(3)}


def in_reverse(batch, random):
    return {name: leaf[::-1] for name, leaf in batch.items()}  # not contiguous


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)


def test_the_number_of_threads_changes_nothing(files, subtests):
    for threads in [1, 2, 3]:
        with subtests.test(threads=threads):
            options = {
                "decode": from_bytes,
                "shuffle": True,
                "record_transform": with_noise,
                "batch_transform": in_reverse,
            }
            plain = GrainLoader(files, 16, read_ahead=0, **options)
            loader = GrainLoader(files, 16, threads=threads, **options)
            for epoch, start, until in [(3, 1, 3), (4, 0, 3), (5, 0, 3), (6, 0, 2)]:  # entered late, and left early
                batches = list(itertools.islice(loader.epoch(epoch, start), until - start))
                expected = list(itertools.islice(plain.epoch(epoch, start), until - start))
                assert [len(batch["id"]) for batch in batches] == [16, 16, 2][start:until]
                assert all(map(equal, batches, expected))
            assert not [
                thread for thread in threading.enumerate() if thread.name.startswith("grain")
            ]  # with no epoch open


def at_once(number):
    BOTH.wait(5)  # a barrier: raises if only one thread comes
    return number


BOTH = threading.Barrier(2)


def test_several_threads_make_batches_at_the_same_time():
    loader = GrainLoader(range(4), 1, decode=at_once, threads=2)
    assert np.concatenate(list(loader.epoch(1))).tolist() == [0, 1, 2, 3]


SCRIPT = """
import json, sys
from jax_trainer.datasets.records import GrainLoader

batches = GrainLoader(range(34), 4, shuffle=True, threads=2).epoch(3, 5)
print(json.dumps([next(batches).tolist() for _ in range(int(sys.argv[1]))]))
"""


def test_a_fresh_process_continues_with_the_same_batches_and_exits(tmp_path, subtests):
    for taken in [4, 1]:
        with subtests.test(taken=taken):
            (path := tmp_path / "script.py").write_text(SCRIPT)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            command = [sys.executable, "-W", "error::ResourceWarning", str(path), str(taken)]
            done = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (0, "")
            loader = GrainLoader(range(34), 4, shuffle=True, read_ahead=0)
            assert json.loads(done.stdout) == [batch.tolist() for batch in loader.epoch(3, 5)][:taken]
