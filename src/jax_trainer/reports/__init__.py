"""Looks at run folders: reads what runs have written, lists, compares and shows them. Imports no JAX."""

from jax_trainer.reports.diff import RunDiff, compare_runs
from jax_trainer.reports.index import RunSummary, find_runs

__all__ = ["RunDiff", "RunSummary", "compare_runs", "find_runs"]
