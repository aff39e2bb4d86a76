"""One source of every kind of data, all of 22 examples in six batches; shared by tests, and by processes of theirs."""

import importlib.util
import itertools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset
from torchdata.nodes import Batcher, Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from jax_trainer.datasets import ArrayLoader, CombinedLoader
from jax_trainer.datasets.records import GrainLoader
from tests.datasets.needs_torch import torch
from tests.datasets.torch_numbers import EXAMPLES, IDS, CountsOn, Numbers

SIZE, BATCHES = 4, 6
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


def torch_loader(kind, dataset=Numbers, **options):
    return kind(dataset(), batch_size=SIZE, **options)


def own_sampler(kind):
    return torch_loader(kind, sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5)))


def epoch_sampler(kind):
    return torch_loader(kind, sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=5))


def torch_nodes(**options):
    indices = SamplerWrapper(DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=5))
    return Loader(Batcher(indices, SIZE, drop_last=False), **options)


def hugging_face(buffer: int = 0, *, batched: bool = True):
    """A stream in three shards; each of its batches is a dict."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's `datasets` is not installed")
    stream = datasets.Dataset.from_dict({"id": IDS}).to_iterable_dataset(num_shards=3).with_format("numpy")
    stream = stream.shuffle(seed=5, buffer_size=buffer) if buffer else stream
    return stream.batch(SIZE) if batched else stream


class SubclassedLoader(StatefulDataLoader):
    """What people make of torch's loaders."""


WORKERS = {"num_workers": 2, "multiprocessing_context": "spawn"}
KINDS = {
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
    "torch": lambda: torch_loader(DataLoader, shuffle=True),
    "torch, own generator": lambda: torch_loader(DataLoader, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "torch, in order": lambda: torch_loader(DataLoader),
    "torchdata": lambda: torch_loader(StatefulDataLoader, shuffle=True),
    "torchdata, torch's sampler": lambda: own_sampler(StatefulDataLoader),
    "torchdata, epoch sampler": lambda: epoch_sampler(StatefulDataLoader),
    "torchdata, stateful dataset": lambda: torch_loader(StatefulDataLoader, CountsOn, shuffle=True),
    "torchdata, subclassed": lambda: torch_loader(SubclassedLoader, shuffle=True),
    "torchdata nodes": lambda: torch_nodes(restart_on_stop_iteration=False),
    "torchdata, Hugging Face": lambda: StatefulDataLoader(hugging_face(batched=False), batch_size=SIZE),
    "Hugging Face": hugging_face,
    "Hugging Face, shuffled shards": lambda: hugging_face(1),
    "Hugging Face, shuffle buffer": lambda: hugging_face(6),
    "torch, Hugging Face": lambda: DataLoader(hugging_face(6, batched=False), batch_size=SIZE),
    "torchdata of a Hugging Face shuffle buffer": lambda: StatefulDataLoader(
        hugging_face(6, batched=False), batch_size=SIZE
    ),
    "combined": lambda: CombinedLoader(
        {"few": ArrayLoader(IDS[:8], SIZE, shuffle=True), "all": KINDS["array loader"]()},
        "max_size_cycle",
        size_of="all",
    ),
    "combined, stateful": lambda: CombinedLoader(
        {"few": list(ArrayLoader(IDS[:8], SIZE)), "all": KINDS["torchdata"]()}, "max_size_cycle", size_of="all"
    ),
    "combined, to the shorter one": lambda: CombinedLoader(
        {"stateful": Counted(), "longer": lambda: iter(ArrayLoader(np.tile(IDS, 2), SIZE))}, "min_size"
    ),
    "combined, in turn": lambda: CombinedLoader(
        {
            "list": list(ArrayLoader(IDS[:8], SIZE)),
            "stateful": StatefulDataLoader(Subset(Numbers(), range(8, EXAMPLES)), batch_size=SIZE, shuffle=True),
        },
        "sequential",
    ),
}
WITH_WORKERS = {
    "torch, workers": lambda: torch_loader(DataLoader, shuffle=True, **WORKERS),
    "torchdata, workers": lambda: torch_loader(StatefulDataLoader, shuffle=True, **WORKERS),
    "torchdata, lasting workers": lambda: torch_loader(
        StatefulDataLoader, shuffle=True, persistent_workers=True, **WORKERS
    ),
    "grain's loader, workers": lambda: grain_loader(2),
}
REPLAYING = {"function", "function of the epoch", "stream", "torch", "torch, own generator", "torch, in order"}
REPLAYING |= {"torch, Hugging Face", "combined, to the shorter one"} | {
    kind for kind in KINDS if kind.endswith("shuffle buffer")
}
INSTALLED = [kind for kind in KINDS if "Hugging Face" not in kind or importlib.util.find_spec("datasets")]
STATEFUL = {kind for kind in KINDS if kind.startswith(("own state", "grain", "torchdata", "Hugging Face", "combined"))}
STATEFUL -= {"grain loader", "combined", *REPLAYING}


def ids_of(batch):
    """The ids of all entries of a batch but its size."""
    entries = [one for name, one in sorted(batch.items()) if name != "size"] if isinstance(batch, dict) else batch
    first, *others = jax.tree.leaves(entries)
    return jnp.concatenate([first, *others], axis=-1) if others else first
