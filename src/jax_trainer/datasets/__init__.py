"""Datasets, loaders that resume at any batch, batches, transforms and prefetching.

`examples` has ready-made datasets. `records.py` needs Grain; import it as `jax_trainer.datasets.records`.
"""

from jax_trainer.datasets import examples
from jax_trainer.datasets.arrays import ArrayEpoch, ArrayLoader, RowLoader, load_arrays, resident_loader
from jax_trainer.datasets.batch import Batch, SupervisedBatch
from jax_trainer.datasets.combined import CombinedLoader
from jax_trainer.datasets.data_source import Data, DataSource, FirstBatches
from jax_trainer.datasets.epoch_iterator import EpochIterator, StepBatch, describe_batch
from jax_trainer.datasets.examples import DIGITS_SOURCE, load_digits
from jax_trainer.datasets.foreign import DataError
from jax_trainer.datasets.module import DatasetConfig, DatasetModule, UnusedKeyWarning
from jax_trainer.datasets.order import HostTransforms, Order, joined_states, nearby_multiples, own_state
from jax_trainer.datasets.prefetch import NOT_READY, BatchIterator, PrefetchIterator, SyncIterator
from jax_trainer.datasets.sources import EpochLoader, Position
from jax_trainer.datasets.storage import local_copy
from jax_trainer.datasets.transforms import (
    DeviceTransforms,
    ImageTransform,
    common_transforms,
    normalize,
    random_crop,
    random_erase,
    random_flip,
    transforms_of,
    with_transforms,
)

__all__ = [
    "DIGITS_SOURCE",
    "NOT_READY",
    "ArrayEpoch",
    "ArrayLoader",
    "Batch",
    "BatchIterator",
    "CombinedLoader",
    "Data",
    "DataError",
    "DataSource",
    "DatasetConfig",
    "DatasetModule",
    "DeviceTransforms",
    "EpochIterator",
    "EpochLoader",
    "FirstBatches",
    "HostTransforms",
    "ImageTransform",
    "Order",
    "Position",
    "PrefetchIterator",
    "RowLoader",
    "StepBatch",
    "SupervisedBatch",
    "SyncIterator",
    "UnusedKeyWarning",
    "common_transforms",
    "describe_batch",
    "examples",
    "joined_states",
    "load_arrays",
    "load_digits",
    "local_copy",
    "nearby_multiples",
    "normalize",
    "own_state",
    "random_crop",
    "random_erase",
    "random_flip",
    "resident_loader",
    "transforms_of",
    "with_transforms",
]
