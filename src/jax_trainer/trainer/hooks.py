"""The trainer's own hooks, told like those of a callback."""

from typing import Any

import numpy as np

from jax_trainer.callbacks import Callback, CallbackConfig, Run
from jax_trainer.engine import EvalRoundEnd
from jax_trainer.trainer.results import Results


class TrainerHooks(Callback):
    """Calls the `on_…` methods of a trainer; what they add to the metrics of an evaluation is logged and returned."""

    config: CallbackConfig

    def __init__(self, run: Run, results: Results) -> None:
        super().__init__(CallbackConfig(), run)
        self._results = results

    def on_training_start(self) -> None:
        """Passes it on."""
        self.trainer.on_training_start()

    def on_training_end(self) -> None:
        """Passes it on."""
        self.trainer.on_training_end()

    def on_training_epoch_start(self, epoch: int) -> None:
        """Passes it on."""
        self.trainer.on_training_epoch_start(epoch)

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        """Passes it on."""
        self.trainer.on_training_epoch_end(train_metrics, epoch)

    def on_validation_epoch_start(self, epoch: int) -> None:
        """Passes it on."""
        self.trainer.on_validation_epoch_start(epoch)

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> None:
        """Passes it on, and takes in what was added."""
        before = dict(eval_metrics)
        self.trainer.on_validation_epoch_end(eval_metrics, epoch)
        self._add(before, eval_metrics)

    def on_test_epoch_start(self, epoch: int) -> None:
        """Passes it on."""
        self.trainer.on_test_epoch_start(epoch)

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        """Passes it on, and takes in what was added."""
        before = dict(test_metrics)
        self.trainer.on_test_epoch_end(test_metrics, epoch)
        self._add(before, test_metrics)

    def _add(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        added = {name: value for name, value in now.items() if name not in before}
        if not added:
            return
        event = self.event
        assert isinstance(event, EvalRoundEnd)
        if bare := [name for name in added if "/" not in name]:
            raise ValueError(f"Metrics that a hook adds have full names, as in 'val/{bare[0]}'; got {', '.join(bare)}.")
        # whoever is told of the evaluation after this, such as ModelCheckpoint, finds them there
        event.metrics[next(iter(event.metrics))].update(added)
        self._results.add(event, added)
        scalars = {name: float(value) for name, value in added.items() if np.ndim(value) == 0}
        self.run.logger.write(event.step, {"epoch": event.epoch, **scalars})
