"""One source of every kind of data, all of 22 examples in six batches; shared by tests, and by processes of theirs."""

import importlib
import itertools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.datasets import ArrayLoader, CombinedLoader
from jax_trainer.datasets.records import GrainLoader
from tests.datasets.torch_numbers import EXAMPLES, IDS

SIZE, BATCHES = 4, 6
NEEDS_TORCH = "`make integrations` installs torch"
RECORDS = list(IDS)


class Counted:
    """A loader of one's own that keeps its position in a dict."""

    def __init__(self):
        self._at = 0

    def __iter__(self):
        while self._at < BATCHES:
            self._at += 1
            yield np.full(SIZE, self._at, np.int32)
        self._at = 0

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._at = state["at"]


class CountsInItsState:
    """One that hands out the very dict and array in which it counts."""

    def __init__(self):
        self._state = {"at": 0, "seen": np.zeros(BATCHES, np.int64)}

    def __iter__(self):
        state = self._state
        while state["at"] < BATCHES:
            state["seen"][state["at"]] += 1
            state["at"] += 1
            yield state["at"] * 10 + state["seen"][:SIZE].astype(np.int32)
        state["at"] = 0

    def get_state(self):
        return self._state

    def set_state(self, state):
        self._state = {"at": state["at"], "seen": state["seen"].copy()}


def shuffled(epoch):
    return iter(ArrayLoader(IDS, SIZE, shuffle=True, seed=epoch))


FEW_THREADS = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)  # its defaults are for slow disks


def grain_pipeline(repeat: int | None = 1):
    records = grain.MapDataset.source(RECORDS).shuffle(seed=3).repeat(repeat)
    return records.to_iter_dataset(FEW_THREADS).batch(SIZE)


def grain_loader(workers=0):
    sampler = grain.samplers.IndexSampler(EXAMPLES, shuffle=True, seed=3, num_epochs=1)
    return grain.DataLoader(
        data_source=RECORDS,  # type: ignore[arg-type] - a list will do
        sampler=sampler,
        operations=[grain.transforms.Batch(SIZE)],
        worker_count=workers,
        read_options=FEW_THREADS,
    )


def hugging_face(buffer: int = 0, *, batched: bool = True):
    """A stream in three shards; each of its batches is a dict."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's `datasets` is not installed")
    stream = datasets.Dataset.from_dict({"id": IDS}).to_iterable_dataset(num_shards=3).with_format("numpy")
    stream = stream.shuffle(seed=5, buffer_size=buffer) if buffer else stream
    return stream.batch(SIZE) if batched else stream


def of_torch(name: str) -> Callable[[], Any]:
    """A source of `torch_sources`; without torch, the test that makes it is skipped."""

    def made() -> Any:
        pytest.importorskip("torchdata", reason=NEEDS_TORCH)
        return importlib.import_module("tests.datasets.torch_sources").SOURCES[name]()

    return made


WITH_TORCH = [
    *("torch", "torch, own generator", "torch, in order", "torch, Hugging Face"),
    *("torchdata", "torchdata, torch's sampler", "torchdata, epoch sampler", "torchdata, stateful dataset"),
    *("torchdata, counted", "torchdata nodes", "torchdata, Hugging Face"),
    *("torchdata of a Hugging Face shuffle buffer", "torchdata, combined", "torchdata, combined in turn"),
]
KINDS: dict[str, Callable[[], Any]] = {
    "array loader": lambda: ArrayLoader(IDS, SIZE, shuffle=True),
    "grain loader": lambda: GrainLoader(RECORDS, SIZE, shuffle=True),
    "list": lambda: list(ArrayLoader(IDS, SIZE)),
    "function": lambda: lambda: iter(ArrayLoader(IDS, SIZE)),
    "function of the epoch": lambda: shuffled,
    "stream": lambda: itertools.chain.from_iterable(map(shuffled, itertools.count(1))),
    "own state": Counted,
    "own state, handed out": CountsInItsState,
    "grain": grain_pipeline,
    "grain iterator": lambda: iter(grain_pipeline(None)),
    "grain's loader": grain_loader,
    "Hugging Face": hugging_face,
    "Hugging Face, shuffled shards": lambda: hugging_face(1),
    "Hugging Face, shuffle buffer": lambda: hugging_face(6),
    "combined": lambda: CombinedLoader(
        {"few": ArrayLoader(IDS[:8], SIZE, shuffle=True), "all": KINDS["array loader"]()},
        "max_size_cycle",
        size_of="all",
    ),
    "combined, to the shorter one": lambda: CombinedLoader(
        {"stateful": Counted(), "longer": lambda: iter(ArrayLoader(np.tile(IDS, 2), SIZE))}, "min_size"
    ),
    **{name: of_torch(name) for name in WITH_TORCH},
}
WITH_WORKERS = {
    **{name: of_torch(name) for name in ("torch, workers", "torchdata, workers", "torchdata, lasting workers")},
    "grain's loader, workers": lambda: grain_loader(2),
}
REPLAYING = {"function", "function of the epoch", "stream", "torch", "torch, own generator", "torch, in order"}
REPLAYING |= {"torch, Hugging Face", "combined, to the shorter one"} | {
    kind for kind in KINDS if kind.endswith("shuffle buffer")
}
MISSING = [name for name, package in (("torch", "torchdata"), ("Hugging Face", "datasets")) if not find_spec(package)]
INSTALLED = [kind for kind in KINDS if not any(name in kind for name in MISSING)]
STATEFUL = {kind for kind in KINDS if kind.startswith(("own state", "grain", "torchdata", "Hugging Face", "combined"))}
STATEFUL -= {"grain loader", "combined", *REPLAYING}


def ids_of(batch):
    """The ids of all entries of a batch but its size."""
    entries = [one for name, one in sorted(batch.items()) if name != "size"] if isinstance(batch, dict) else batch
    first, *others = jax.tree.leaves(entries)
    return jnp.concatenate([first, *others], axis=-1) if others else first
