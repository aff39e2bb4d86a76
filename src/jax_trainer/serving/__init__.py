"""Runs exported models, and serves them over HTTP. It needs JAX alone, and no code of the run that was exported."""

from jax_trainer.serving.app import ServeConfig
from jax_trainer.serving.artifact import ArraySpec, ExportedModel, ExportError, load_export
from jax_trainer.serving.server import ServeSummary, serve

__all__ = ["ArraySpec", "ExportError", "ExportedModel", "ServeConfig", "ServeSummary", "load_export", "serve"]
