"""Looks at run folders: reads what a run has written, and shows it as one HTML page. Imports no JAX."""

from jax_trainer.reports.html import Report, history_html, report
from jax_trainer.reports.record import RunRecord, read_run

__all__ = ["Report", "RunRecord", "history_html", "read_run", "report"]
