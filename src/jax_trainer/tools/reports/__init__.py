"""Looks at run folders: reads what runs have written, lists, compares and shows them. Imports no JAX."""

from jax_trainer.tools.reports.diff import RunDiff, compare_runs
from jax_trainer.tools.reports.html import Report, history_html, report
from jax_trainer.tools.reports.listing import find_runs
from jax_trainer.tools.reports.record import RunRecord, read_run

__all__ = ["Report", "RunDiff", "RunRecord", "compare_runs", "find_runs", "history_html", "read_run", "report"]
