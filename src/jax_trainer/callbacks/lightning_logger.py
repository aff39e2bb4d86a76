"""`LightningLogger`: writes the metrics of a run to a logger of Lightning as well."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.callbacks.log_metrics import LogMetrics
from jax_trainer.checkpoint.folder import CONFIG
from jax_trainer.engine import Edit, Event

_METHODS = ("log_metrics", "log_hyperparams", "finalize")


def is_lightning_logger(found: Any) -> bool:
    """Whether an object has the methods of a logger of Lightning."""
    return all(callable(getattr(found, name, None)) for name in _METHODS)


class LightningLogger(Callback):
    """Writes every metric to a logger of Lightning, such as its `CSVLogger`, besides the record in the run folder.

    The logger chooses its own folder and version. It cannot drop points: after a resume, it has those since the
    checkpoint twice. Its hyperparameters are those in `config.yaml`.

    Args:
        logger: an object with the methods `log_metrics`, `log_hyperparams` and `finalize`.
        every_n_steps: write step metrics every n steps; 0: only per epoch.
    """

    config: CallbackConfig
    needs = ()

    def __init__(self, logger: Any, every_n_steps: int = 50) -> None:
        if not is_lightning_logger(logger):
            raise TypeError(f"`logger` must have {', '.join(_METHODS)}, as loggers of Lightning do, got {logger!r}.")
        self._logger, self._every = logger, every_n_steps
        super().__init__()

    def reset(self) -> None:
        self._log = LogMetrics(self, self._every)

    def handle(self, event: Event) -> Edit | None:
        if self.is_primary:
            self._log.handle(event)
        return super().handle(event)

    def state_dict(self) -> dict[str, Any]:
        return self._log.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._log.load_state_dict(state)

    def on_training_start(self) -> None:
        """Logs the configuration of the run."""
        if self.is_primary and isinstance(self.run.folder, Path) and (stored := self.run.folder / CONFIG).exists():
            self._logger.log_hyperparams(yaml.safe_load(stored.read_text()) or {})

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes these metrics of a step, as a `MetricWriter`."""
        self._logger.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self, status: str) -> None:
        """Ends the logger, as a `MetricWriter`."""
        self._logger.finalize({"completed": "success", "failed": "failed"}.get(status, "aborted"))
