"""Datasets, loaders that resume at any batch, batches, transforms and prefetching.

`examples` has ready-made datasets. `records.py` needs Grain; import it as `jax_trainer.datasets.records`.
"""

from jax_trainer.datasets import examples
from jax_trainer.datasets.arrays import ArrayLoader, load_arrays
from jax_trainer.datasets.batch import Batch, SupervisedBatch
from jax_trainer.datasets.data_source import Data, DataSource, resident_loader
from jax_trainer.datasets.examples import DIGITS_SOURCE, load_digits
from jax_trainer.datasets.foreign import DataError
from jax_trainer.datasets.module import DatasetConfig, DatasetModule, UnusedKeyWarning
from jax_trainer.datasets.prefetch import NOT_READY, BatchIterator, StepBatch, describe_batch
from jax_trainer.datasets.sources import CombinedLoader, EpochLoader, Position
from jax_trainer.datasets.storage import local_copy
from jax_trainer.datasets.transforms import (
    DeviceTransforms,
    ImageTransform,
    common_transforms,
    normalize,
    random_crop,
    random_flip,
    transforms_of,
    with_transforms,
)

__all__ = [
    "DIGITS_SOURCE",
    "NOT_READY",
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
    "EpochLoader",
    "ImageTransform",
    "Position",
    "StepBatch",
    "SupervisedBatch",
    "UnusedKeyWarning",
    "common_transforms",
    "describe_batch",
    "examples",
    "load_arrays",
    "load_digits",
    "local_copy",
    "normalize",
    "random_crop",
    "random_flip",
    "resident_loader",
    "transforms_of",
    "with_transforms",
]
