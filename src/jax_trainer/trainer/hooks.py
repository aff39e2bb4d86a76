"""Calls the hooks of a trainer like those of a callback."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jax_trainer.callbacks import Callback, CallbackConfig, RunContext, full_names
from jax_trainer.callbacks.hook_calls import call_hook, check_hooks
from jax_trainer.engine import Edit, EvalRoundEnd
from jax_trainer.runs import History
from jax_trainer.trainer.base import TrainerBase
from jax_trainer.trainer.model_methods import ModelMethods

_LOADERS = {"on_validation_epoch_end": ("val_loader",), "on_test_epoch_end": ("test_loader",)}
_STEPS = dict.fromkeys(
    ("training_step", "train_step", "validation_step", "test_step"), "loss_function` or `loss_function_linen"
)
_FOREIGN = {  # methods of a LightningModule, and the equivalent here
    "configure_optimizers": "init_optimizer",
    "configure_callbacks": "init_callbacks",
    **dict.fromkeys(("train_dataloader", "val_dataloader", "test_dataloader"), "train_model"),
    "predict_step": "predict",
    "finalize": "on_training_end",
}


def check_trainer_hooks(trainer: Any) -> None:
    """Raises an error for unknown hook names and parameters of a trainer."""
    kind = type(trainer)
    has_custom_steps = (kind.create_training_function, kind.create_functions) != (
        ModelMethods.create_training_function,
        ModelMethods.create_functions,
    )
    check_hooks(trainer, TrainerBase, _LOADERS, _FOREIGN if has_custom_steps else {**_FOREIGN, **_STEPS})


class TrainerHooks(Callback):
    """Calls the `on_…` methods of a trainer; the metrics that they add to an evaluation are logged and returned."""

    config: CallbackConfig

    def __init__(self, run: RunContext, history: History, loaders: Mapping[str, Any]) -> None:
        super().__init__(CallbackConfig(), run)
        self._history, self._loaders = history, loaders

    def on_training_start(self) -> None:
        self.trainer.on_training_start()

    def on_training_end(self) -> None:
        self.trainer.on_training_end()

    def on_training_epoch_start(self, epoch: int) -> None:
        call_hook(self.trainer.on_training_epoch_start, epoch_idx=epoch)

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> Edit | None:
        edit = call_hook(self.trainer.on_training_epoch_end, train_metrics=train_metrics, epoch_idx=epoch)
        return self._by_trainer(edit)

    def on_validation_epoch_start(self, epoch: int) -> None:
        call_hook(self.trainer.on_validation_epoch_start, epoch_idx=epoch)

    def on_validation_epoch_end(self, eval_metrics: dict[str, Any], epoch: int) -> Edit | None:
        before = dict(eval_metrics)
        eval_metrics |= self._custom_eval_metrics(epoch)
        loader = {"val_loader": self._loader()}
        edit = call_hook(self.trainer.on_validation_epoch_end, loader, eval_metrics=eval_metrics, epoch_idx=epoch)
        self._add(before, eval_metrics)
        return self._by_trainer(edit)

    def on_test_epoch_start(self, epoch: int) -> None:
        call_hook(self.trainer.on_test_epoch_start, epoch_idx=epoch)

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        before = dict(test_metrics)
        test_metrics |= self._custom_eval_metrics(epoch)
        loader = {"test_loader": self._loader()}
        call_hook(self.trainer.on_test_epoch_end, loader, test_metrics=test_metrics, epoch_idx=epoch)
        self._add(before, test_metrics)

    def _by_trainer(self, edit: Edit | None) -> Edit | None:
        name = type(self.trainer).__name__
        return replace(edit, by=edit.by or name) if isinstance(edit, Edit) else edit

    def _loader(self) -> Any:
        """The evaluated loader, or several by name."""
        assert isinstance(self.event, EvalRoundEnd)
        loaders = {name.partition("_")[2] or name: self._loaders[name] for name in self.event.metrics}
        return next(iter(loaders.values())) if len(loaders) == 1 else loaders

    def _custom_eval_metrics(self, epoch: int) -> dict[str, Any]:
        """The metrics that an overridden `eval_model` adds; the known ones are not computed again."""
        trainer, event = self.trainer, self.event
        if type(trainer).eval_model is ModelMethods.eval_model or not isinstance(event, EvalRoundEnd):
            return {}
        found: dict[str, Any] = {}
        with trainer.with_known_metrics({name: full_names(one, name) for name, one in event.metrics.items()}):
            for name in event.metrics:
                found |= trainer.eval_model(self._loaders[name], name, epoch)
        return found

    def _add(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        added = {name: value for name, value in now.items() if name not in before}
        if not added:
            return
        event = self.event
        assert isinstance(event, EvalRoundEnd)
        if bare := [name for name in added if "/" not in name]:
            raise ValueError(
                f"Metrics that a hook adds need full names, such as 'val/{bare[0]}'; got {', '.join(bare)}."
            )
        # later callbacks, such as ModelCheckpoint, see them
        event.metrics[next(iter(event.metrics))].update(added)
        self._history.add(event, added)
        scalars = {name: float(value) for name, value in added.items() if np.ndim(value) == 0}
        self.run.logger.write(event.step, {"epoch": event.epoch, **scalars})
