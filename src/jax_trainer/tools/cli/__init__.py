"""`jax-trainer`: train, test, resume, check and describe experiments from the command line."""

from jax_trainer.tools.cli.main import main

__all__ = ["main"]
