"""Logs to the user's active run of Weights & Biases. Needs the extra `wandb`."""

from collections.abc import Mapping

from jax_trainer.core import lazy_import


class ActiveWandb:
    """Logs to the active run, which the user starts and finishes."""

    def __init__(self) -> None:
        self._run = lazy_import("wandb", extra="wandb").run
        if self._run is None:
            raise ValueError("`log_to_wandb=True` needs an active run of wandb: call `wandb.init(…)` before training.")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs `values` at `step`; wandb ignores steps before its current one."""
        self._run.log(dict(values), step=step)
