"""Sources of torch and torchdata; `data_sources` imports them when one is made, as torch takes seconds to import."""

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch.utils.data import (  # pyright: ignore[reportMissingImports]
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Subset,
)
from torchdata.nodes import Batcher, Loader, SamplerWrapper  # pyright: ignore[reportMissingImports]
from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore[reportMissingImports]

from jax_trainer.datasets import ArrayLoader, CombinedLoader
from tests.datasets.data_sources import SIZE, hugging_face
from tests.datasets.torch_numbers import EXAMPLES, IDS, CountsOn
from tests.datasets.torch_numbers import Numbers as NumbersDataset

Numbers: Any = NumbersDataset  # torch takes any class with a length and items, its types do not


def torch_loader(kind, dataset=Numbers, **options):
    return kind(dataset(), batch_size=SIZE, **options)


def own_sampler(kind):
    return torch_loader(kind, sampler=RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5)))


def epoch_sampler(kind):
    return torch_loader(kind, sampler=DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=5))


def torch_nodes(**options):
    indices = SamplerWrapper(DistributedSampler(Numbers(), num_replicas=1, rank=0, seed=5))
    return Loader(Batcher(indices, SIZE, drop_last=False), **options)


class CountedLoader(StatefulDataLoader):
    """What people make of torch's loaders: it counts how often it is gone through."""

    started = 0

    def __iter__(self):
        self.started += 1
        return super().__iter__()


WORKERS = {"num_workers": 2, "multiprocessing_context": "spawn"}
SOURCES = {
    "torch": lambda: torch_loader(DataLoader, shuffle=True),
    "torch, own generator": lambda: torch_loader(DataLoader, shuffle=True, generator=torch.Generator().manual_seed(5)),
    "torch, in order": lambda: torch_loader(DataLoader),
    "torchdata": lambda: torch_loader(StatefulDataLoader, shuffle=True),
    "torchdata, torch's sampler": lambda: own_sampler(StatefulDataLoader),
    "torchdata, epoch sampler": lambda: epoch_sampler(StatefulDataLoader),
    "torchdata, stateful dataset": lambda: torch_loader(StatefulDataLoader, CountsOn, shuffle=True),
    "torchdata, counted": lambda: torch_loader(CountedLoader, shuffle=True),
    "torchdata nodes": lambda: torch_nodes(restart_on_stop_iteration=False),
    "torchdata nodes that restart": torch_nodes,
    "torchdata, Hugging Face": lambda: StatefulDataLoader(hugging_face(batched=False), batch_size=SIZE),
    "torch, Hugging Face": lambda: DataLoader(hugging_face(6, batched=False), batch_size=SIZE),
    "torchdata of a Hugging Face shuffle buffer": lambda: StatefulDataLoader(
        hugging_face(6, batched=False), batch_size=SIZE
    ),
    "torchdata, combined": lambda: CombinedLoader(
        {"few": list(ArrayLoader(IDS[:8], SIZE)), "all": torch_loader(StatefulDataLoader, shuffle=True)},
        "max_size_cycle",
        size_of="all",
    ),
    "torchdata, combined in turn": lambda: CombinedLoader(
        {
            "list": list(ArrayLoader(IDS[:8], SIZE)),
            "stateful": StatefulDataLoader(Subset(Numbers(), range(8, EXAMPLES)), batch_size=SIZE, shuffle=True),
        },
        "sequential",
    ),
    "torch, workers": lambda: torch_loader(DataLoader, shuffle=True, **WORKERS),
    "torchdata, workers": lambda: torch_loader(StatefulDataLoader, shuffle=True, **WORKERS),
    "torchdata, lasting workers": lambda: torch_loader(
        StatefulDataLoader, shuffle=True, persistent_workers=True, **WORKERS
    ),
}
