"""The run of Weights & Biases that a user began. Needs the extra `wandb`."""

from collections.abc import Mapping

from jax_trainer.core import lazy_import


class ActiveWandb:
    """Logs to the run that is active now; it must have been begun, and stays the user's to end."""

    def __init__(self) -> None:
        self._run = lazy_import("wandb", extra="wandb").run
        if self._run is None:
            raise ValueError(
                "`log_to_wandb=True` logs to the active run of wandb, and there is none: call `wandb.init(…)` before."
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs `values` at `step`, unless wandb stands at a later step already."""
        self._run.log(dict(values), step=step)
