"""Data: loaders with a position, and sets that ship with the package."""

from jax_trainer.datasets.arrays import ArrayEpoch, ArrayLoader
from jax_trainer.datasets.digits import DIGITS_SOURCE, load_digits

__all__ = ["DIGITS_SOURCE", "ArrayEpoch", "ArrayLoader", "load_digits"]
