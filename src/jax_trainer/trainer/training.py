"""A training of a trainer: how a run calls its hooks, what it shows, and what it returns."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jax_trainer.callbacks import Callback, CallbackConfig, RunContext, full_names
from jax_trainer.callbacks.hook_calls import call_hook
from jax_trainer.callbacks.screen import progress_console
from jax_trainer.core import Batch, CompiledProgram, TrainState
from jax_trainer.datasets import ArrayLoader, Data, DataError, DatasetModule, DeviceTransforms, Position
from jax_trainer.datasets.foreign import as_arrays, is_arrays
from jax_trainer.datasets.transforms import describe_transforms
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.engine import Edit, EvalRoundEnd, Plan, run
from jax_trainer.engine.batches import train_source
from jax_trainer.engine.events import Status
from jax_trainer.engine.preflight import batch_size_of
from jax_trainer.runs import Best, History, MetricDict, ResultDict, Run, TimeReport, Validation, Weights
from jax_trainer.trainer.config import TrainerConfig
from jax_trainer.trainer.dry_run import LayoutTable

LAYOUT = "layout.txt"


def plan_of(config: TrainerConfig, train_loader: Any, num_epochs: int | None, example: Batch) -> Plan:
    """The plan of a training; refuses data that cannot be iterated, or is too short."""
    plan = config.training_plan(None if num_epochs is None else checked_int("num_epochs", num_epochs, 1))
    check_batches(train_loader, example)
    train_source(Data(train_loader), plan)
    return plan


def is_all_examples(data: Any, example: Batch) -> bool:
    """Whether `data` is all examples as arrays; a tuple that is not like the example batch may be one of batches."""
    if hasattr(data, "epoch") or not is_arrays(data):  # a loader may be a dataclass
        return False
    if not isinstance(data, tuple):
        return True
    return isinstance(example, tuple | list) and jax.tree.structure([*data]) == jax.tree.structure([*example])


def check_batches(train_loader: Any, example: Batch) -> None:
    """Refuses all examples as arrays: a training depends on the size and the order of its batches."""
    if is_all_examples(train_loader, example):
        shapes = ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(train_loader))
        raise DataError(
            f"The 'train' data is all examples, in arrays of shapes {shapes}, without a batch size. Choose it: "
            "`ArrayLoader(arrays, batch_size=32, shuffle=True)`; `fit` also takes arrays."
        )


def eval_data(data: Any, example: Batch) -> Any:
    """Data to evaluate on; all examples as arrays become batches of the size of the example batch."""
    return ArrayLoader(as_arrays(data, copy=False), batch_size_of(example)) if is_all_examples(data, example) else data


def data_of(dataset: DatasetModule | None, train_loader: Any, evals: Mapping[str, Any], *, resident: Any) -> Data:
    """The data of a training, with the options of the dataset."""
    data = Data(train_loader) if dataset is None else dataset.data()
    return replace(data, train=train_loader, evals=evals, resident=resident)


def describe(transforms: DeviceTransforms) -> str:
    """Device transforms as text, the same in every process; "" without any."""
    words = describe_transforms(transforms) if transforms else ""
    return re.sub(r" at 0x[0-9a-f]+", "", words)  # addresses differ between processes


class TrainerHooks(Callback):
    """Calls the `on_…` methods of a trainer; the metrics that they add to an evaluation are logged and returned.

    Args:
        loaders: the evaluation sets by name.
        eval_model: the trainer's `eval_model`, if a subclass overrides it: the metrics that it adds are added, too.
        known: where `eval_model` looks for metrics by set, so that they are not computed twice.
        run: the context of the run.
        history: takes the added metrics.
    """

    config: CallbackConfig

    def __init__(
        self,
        loaders: Mapping[str, Any],
        eval_model: Callable[..., dict[str, Any]] | None,
        known: dict[str, dict[str, Any]],
        run: RunContext,
        history: History,
    ) -> None:
        super().__init__(CallbackConfig(), run)
        self._history, self._loaders, self._eval_model, self._known = history, loaders, eval_model, known

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
        with self._adding_metrics(eval_metrics, epoch) as loader:
            values = {"eval_metrics": eval_metrics, "epoch_idx": epoch}
            edit = call_hook(self.trainer.on_validation_epoch_end, {"val_loader": loader}, **values)
        return self._by_trainer(edit)

    def on_test_epoch_start(self, epoch: int) -> None:
        call_hook(self.trainer.on_test_epoch_start, epoch_idx=epoch)

    def on_test_epoch_end(self, test_metrics: dict[str, Any], epoch: int) -> None:
        with self._adding_metrics(test_metrics, epoch) as loader:
            values = {"test_metrics": test_metrics, "epoch_idx": epoch}
            call_hook(self.trainer.on_test_epoch_end, {"test_loader": loader}, **values)

    def _by_trainer(self, edit: Edit | None) -> Edit | None:
        return replace(edit, by=edit.by or type(self.trainer).__name__) if isinstance(edit, Edit) else edit

    @contextmanager
    def _adding_metrics(self, metrics: dict[str, Any], epoch: int) -> Iterator[Any]:
        """Yields the evaluated loader, or several by name; logs and keeps what is added to `metrics` meanwhile."""
        event, before = self.event, dict(metrics)
        assert isinstance(event, EvalRoundEnd)
        if self._eval_model is not None:
            self._known.update({name: full_names(one, name) for name, one in event.metrics.items()})
            try:
                for name in event.metrics:
                    metrics |= self._eval_model(self._loaders[name], name, epoch)
            finally:
                self._known.clear()
        loaders = {name.partition("_")[2] or name: self._loaders[name] for name in event.metrics}
        yield next(iter(loaders.values())) if len(loaders) == 1 else loaders
        added = {name: value for name, value in metrics.items() if name not in before}
        if bare := [name for name in added if "/" not in name]:
            raise ValueError(
                f"Metrics that a hook adds need full names, such as 'val/{bare[0]}'; got {', '.join(bare)}."
            )
        if added:
            # later callbacks, such as ModelCheckpoint, see them
            event.metrics[next(iter(event.metrics))].update(added)
            self._history.add(event, added)
            scalars = {name: float(value) for name, value in added.items() if np.ndim(value) == 0}
            self.run.logger.write(event.step, {"epoch": event.epoch, **scalars})


class TrainResults(ResultDict[int | str]):
    """The metrics of the last validation of every epoch, by epoch, and those of the test under "test".

    Without any validation, they are the training metrics of every epoch.

    Attributes:
        validations: all validations in order, also those inside epochs: `(epoch, step, metrics)` each.
        status: "completed", or "stopped" if a callback ended the training.
        reason: why it was stopped.
        best: epoch, step and metrics of the best weights in validation, which the trainer now uses; None: it uses the
            last ones.
        tested: which weights were tested, "best" or "last"; None: no test.
        time: where the time went, over all starts of the run.
    """

    def __init__(self, run: Run) -> None:
        history = run.history
        epochs = history.validated() or history.training
        super().__init__({epoch: MetricDict(metrics) for epoch, metrics in epochs.items()})
        if history.tests:
            self["test"] = MetricDict(history.tests)
        self.validations: list[Validation] = history.validations
        self.status: Status = history.status
        self.reason = history.reason
        self.best: Best | None = None if run.kept_best is None else run.kept_best.best
        self.tested: Weights | None = run.tested
        self.time: TimeReport = run.time


def named_sets(kind: str, loaders: Any, example: Batch = None) -> dict[str, Any]:
    """Evaluation sets by the names that metrics carry: one loader is "val", several are "val_<name>".

    A dict of arrays with keys of the example batch is one set.

    >>> named_sets("val", {"clean": [1], "noisy": [2]})
    {'val_clean': [1], 'val_noisy': [2]}
    """
    if loaders is None:
        return {}
    is_batch = isinstance(loaders, Mapping) and isinstance(example, Mapping) and bool(loaders.keys() & example.keys())
    if not isinstance(loaders, Mapping) or (is_batch and is_arrays(loaders)):
        return {kind: loaders}
    return {kind if name == kind else f"{kind}_{name}": loader for name, loader in loaders.items()}


def report_start(run: Run, table: LayoutTable | None, *, shown: bool) -> None:
    """Logs the size of a new model; writes the sharding of the state, if there are several devices, and shows it."""
    if run.logger is not None and not run.is_resumed:
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.state.params))
        run.logger.log_scalar("param/num_model_params", count, 0)
    if table is None or run.target is None:
        return
    run.target.write_text(LAYOUT, table.text())
    if shown and run.writes:
        progress_console().print(table.text(), markup=False, highlight=False, soft_wrap=True)


def train_one_epoch(
    program: CompiledProgram, state: TrainState, data: Data, plan: Plan, epoch: int
) -> tuple[TrainState, dict[str, Any]]:
    """Trains one epoch outside of a run; returns the state and the metrics of the epoch."""
    history = History()
    state = run(program, state, data, replace(plan, max_steps=None), [history], Position(epoch - 1))
    return state, dict(history.training.get(epoch, {}))
