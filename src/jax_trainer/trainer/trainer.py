"""`TrainerModule`: implement the loss; it trains, evaluates, logs, saves and resumes."""

import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from compoconf import register, register_interface
from rich.progress import track

from jax_trainer.callbacks import Callback, RunContext, full_names, merged_names
from jax_trainer.callbacks.monitored import may_add_metrics
from jax_trainer.callbacks.progress import progress_console
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.core import (
    Batch,
    CompiledProgram,
    FlatState,
    MeshLike,
    TrainState,
    checked_int,
    copy_state,
    noting,
)
from jax_trainer.datasets import Data, DatasetModule, DataSource, DeviceTransforms, Position, transforms_of
from jax_trainer.datasets.foreign import as_example, check_batch
from jax_trainer.engine import EpochEnd, EvalRoundEnd, Event, Plan, checked_evals, eval_events, run
from jax_trainer.engine.batches import train_source
from jax_trainer.logger import Logger
from jax_trainer.optimizer import checked_optimizer
from jax_trainer.processes import process_group
from jax_trainer.registration import full_name
from jax_trainer.runs import (
    CallbacksLike,
    Ranking,
    Recording,
    Run,
    RunSpec,
    RunTarget,
    Weights,
    before_first_step,
    broadcast_from_primary,
)
from jax_trainer.settings import SettingsError, classes_in, config_of
from jax_trainer.suggestions import check_keywords, checks_keywords, keywords_of
from jax_trainer.trainer.arguments import one_of
from jax_trainer.trainer.base import TrainerBase
from jax_trainer.trainer.callback_setup import resolve_callbacks
from jax_trainer.trainer.checkpoint_methods import CheckpointMethods
from jax_trainer.trainer.config import TrainerConfig
from jax_trainer.trainer.dry_run import DryRun, traced
from jax_trainer.trainer.hooks import TrainerHooks, check_trainer_hooks
from jax_trainer.trainer.model_methods import ModelMethods
from jax_trainer.trainer.results import TrainResults, named_sets
from jax_trainer.trainer.resuming import Resume, resolve_target
from jax_trainer.trainer.stored import config_files, configs_of, hparams_of

LOG = logging.getLogger("jax_trainer")
LAYOUT = "layout.txt"
_ELSEWHERE = {  # names of Lightning and Keras for the methods of a trainer
    "fit": "Train with `train_model(train_loader, val_loader)`.",
    "test": "Test with `test_model(test_loader)`.",
    **dict.fromkeys(("validate", "evaluate"), "Evaluate with `eval_model(val_loader)`."),
    **dict.fromkeys(("log", "log_dict"), "Return metrics from the loss to log them: `return loss, {'acc': acc}`."),
    "load_state_dict": "Load with `load_model()` or `load_from_checkpoint(folder, …)`.",
    "save_checkpoint": "Save with `save_model()`.",
}


@register
@register_interface
class TrainerModule(CheckpointMethods):
    """Trains, validates, tests, saves and loads a model; a subclass defines the loss.

    Args:
        config: how to train; its keys can be passed as keywords instead, as in `train_epochs=5`.
        model_config: the configuration of a registered model; or pass `model`.
        optimizer_config: the configuration of a registered optimizer; or pass `optimizer`.
        exmp_input: an example batch, of which only shapes and dtypes matter; default: the first one of `dataset`.
        mesh: a device mesh, its axis sizes (`{"data": -1, "fsdp": 8}`), a `Layout`, or two shardings, of the model and
            of the data; can be set in `config` instead.
        model: an nnx or linen module, or a class or function that builds an nnx module from `rngs`.
        optimizer: an optax optimizer.
        dataset: its device transforms (such as image normalisation) become part of every step; without one, those of
            the loaders do.
        callbacks: callbacks or callback configurations, as a list or by name, besides those of `config`.
        other_configs: stored with the run besides the three configurations: `dataset`, `seed`, `num_gpus`. The
            configuration of a `dataset` whose class is registered is always stored.
        folder: folder of an existing run, to load from and to resume; training without `resume` creates a new one.
    """

    config: TrainerConfig

    def __init__(
        self,
        config: Any = None,
        model_config: Any = None,
        optimizer_config: Any = None,
        exmp_input: Batch = None,
        mesh: MeshLike | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        dataset: DatasetModule | None = None,
        callbacks: CallbacksLike = (),
        other_configs: Mapping[str, Any] | None = None,
        folder: RunFolder | None = None,
        **settings: Any,
    ) -> None:
        check_trainer_hooks(self)
        if config is not None and settings:
            raise TypeError(
                f"`config` and keywords are both set: put {', '.join(settings)} into `config`, or leave out `config`."
            )
        kind = config_of(type(self))
        if config is not None and not isinstance(config, TrainerConfig):
            raise TypeError(
                f"`config` must be a {kind.__name__}, got a {type(config).__name__}. Pass the model and the optimizer "
                "by keyword: `model=…, optimizer=…`."
            )
        check_keywords(type(self).__name__, settings, [*(keywords_of(kind) or settings), *_KEYWORDS])
        config, objects = resolve_callbacks(config, callbacks, kind, settings)
        super().__init__(
            config,
            one_of(model_config, model, ("model_config", "model")),
            one_of(optimizer_config, optimizer, ("optimizer_config", "optimizer")),
            _example(exmp_input, dataset),
            mesh,
            dataset,
            other_configs,
            folder,
        )
        self.logger: Logger | None = None  # of the last run; closed when the run ends
        self.callbacks: dict[str, Callback] = {}  # of the last run
        self._callback_objects = objects
        self._has_optimizer = False

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = f" {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}.{hint}"
            raise AttributeError(text, name=name, obj=self)

    # setup

    def init_optimizer(
        self, num_epochs: int | None = None, num_train_steps_per_epoch: int | None = None
    ) -> optax.GradientTransformation:
        """Builds the optimizer of a run of this length; None: unknown, such as the length of a generator."""
        try:
            return self._optimizer.build(self._total_steps(num_epochs, num_train_steps_per_epoch))
        except SettingsError as error:
            raise error.under("optimizer") from None

    def init_logger(self, folder: RunFolder) -> Logger:
        """Creates the logger of a run in `folder`."""
        return self.config.logger.instantiate(Logger, folder.path)

    def init_callbacks(self, run: RunContext) -> dict[str, Callback]:
        """Creates the callbacks of a run, by name."""
        objects = self._callback_objects
        configured = {name: config for name, config in self.config.callbacks.items() if name not in objects}
        made = {name: config.instantiate(Callback, run) for name, config in configured.items()}
        for callback in objects.values():
            callback.attach(run)
        return {**made, **objects}

    def prepare(self, train_loader: Any, num_epochs: int | None = None) -> CompiledProgram:
        """Builds the program that trains on this data, without running it."""
        self._use_transforms(transforms_of(train_loader) or DeviceTransforms(), {})
        made = self.init_optimizer(*self._run_length(train_loader, num_epochs))
        with noting("This is the return value of `init_optimizer`."):
            made = checked_optimizer(made)
        return self._use_optimizer(made)

    def dry_run(self, train_loader: Any = None) -> DryRun:
        """Traces the training without computing or writing anything; default: on the loader of the dataset."""
        self.config.check_limited()
        if train_loader is None and self.dataset is not None:
            train_loader = self.dataset.train_loader
        steps = self._total_steps(None, self._steps_per_epoch(train_loader))
        report = traced(self.prepare(train_loader), self.config.seed, self.exmp_input, steps)
        has_validation = self.dataset is not None and self.dataset.val_loader is not None
        self._check_monitored(named_sets("val", [] if has_validation else None), report.evaluated)
        classes = {path: full_name(cls) for path, cls in classes_in(self.configs)}
        return replace(report, classes={**classes, "trainer": full_name(type(self))})

    def _run_length(self, train_loader: Any, num_epochs: int | None) -> tuple[int | None, int | None]:
        """Epochs and steps per epoch, as far as known; a limit in steps is converted to epochs."""
        epochs = self.config.train_epochs if num_epochs is None else num_epochs
        steps, limit = self._steps_per_epoch(train_loader), self.config.max_steps or self.config.fast_dev_run
        if epochs is None and limit:
            steps = limit if not steps else min(steps, limit)
            epochs = -(-limit // steps)
        return epochs, steps

    def _steps_per_epoch(self, train_loader: Any) -> int | None:
        limits = (_length(train_loader), self.config.max_steps_per_epoch, self.config.overfit_batches or None)
        return min((limit for limit in limits if limit is not None), default=None)

    def _total_steps(self, num_epochs: int | None, steps_per_epoch: int | None) -> int | None:
        """The length of the run for schedules; `fast_dev_run` counts only without another limit."""
        epochs = self.config.train_epochs if num_epochs is None else num_epochs
        steps = None if steps_per_epoch is None or epochs is None else steps_per_epoch * epochs
        limits = [limit for limit in (steps, self.config.max_steps) if limit is not None]
        return min(limits, default=self.config.fast_dev_run or None)

    def _check(
        self,
        program: CompiledProgram,
        evals: Mapping[str, Any],
        tests: Mapping[str, Any],
        num_epochs: int | None = None,
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Traces the steps to find mistakes in the loss and the data before anything is written; not in debug mode.

        Returns the sets, which still yield the batches that were read.
        """
        if not self.config.debug:
            state, trained, evaluated = program.shapes(self._key, self.exmp_input)
            self._check_monitored(evals, evaluated.by_name)
            if evals:
                evals = checked_evals(program, state, evals, self.exmp_input, self.config.plan(num_epochs))
            tests = checked_evals(program, state, tests, self.exmp_input)
            if self.config.log_intermediates and not any(name.startswith("intermediate/") for name in trained.by_name):
                LOG.warning(
                    "`log_intermediates` is on, but the model sows no values. Sow them: in nnx with "
                    "`self.sow(nnx.Intermediate, name, value)`, in linen with `self.sow('intermediates', name, value)`."
                )
        return evals, tests

    def _check_monitored(self, evals: Iterable[str], evaluated: Iterable[str]) -> None:
        kind = type(self)
        may_add = kind.on_validation_epoch_end is not TrainerBase.on_validation_epoch_end
        may_add |= kind.eval_model is not ModelMethods.eval_model or any(
            map(may_add_metrics, self._callback_objects.values())
        )
        if not (may_add or self.has_custom_comparison):
            others = {name: one.config for name, one in self._callback_objects.items()}
            self.config.check_monitored(evals, evaluated, others)

    # training

    @checks_keywords
    def train_model(
        self,
        train_loader: Any,
        val_loader: Any = None,
        test_loader: Any = None,
        num_epochs: int | None = None,
        *,
        resume: Resume = False,
        fork: bool = False,
        quiet: bool = False,
    ) -> TrainResults:
        """Trains; returns the metrics of every validated epoch, and under "test" those of the best weights.

        `validations` of the result has every validation with its epoch and step, also those inside epochs; `best` is
        the best validation. Afterwards, `predict`, `bind_model`, `eval_model` and `test_model` use the best weights
        (`which="last"`: the last ones); `state` has the last weights, from which training would continue.

        Args:
            val_loader, test_loader: one loader, or several by name.
            num_epochs: instead of `train_epochs`. Without either, `max_steps` or `max_time` ends the training.
            resume: True: resume from the latest checkpoint of `folder`. A path: resume the run in that folder, or from
                that checkpoint; the current configuration replaces the stored one. "auto": resume the newest run with
                exactly this configuration, or start a new one. A completed run is not trained further.
            fork: resume into a new run folder; the original is not modified.
            quiet: show no progress, regardless of the configuration.

        Ctrl-C ends it after the current step, saved if the run has a `ModelCheckpoint`: the `KeyboardInterrupt` says
        how to resume, and its `result` is what would have been returned.
        """
        if "config" not in vars(self):
            kind = type(self).__name__
            raise TypeError(f"`{kind}.__init__` does not call `super().__init__(…)`. Call it with the other arguments.")
        num_epochs = None if num_epochs is None else checked_int("num_epochs", num_epochs, 1)
        plan = self.config.plan(num_epochs)
        train_source(Data(train_loader), plan)  # refuses data that cannot be iterated, or is too short
        evals = named_sets("val", val_loader) if self.config.validates else {}
        tests = named_sets("test", test_loader)
        with before_first_step():
            program = self.prepare(train_loader, num_epochs)
            self._use_eval_transforms({**evals, **tests})
            evals, tests = self._check(program, evals, tests, num_epochs)
            target = broadcast_from_primary(lambda: resolve_target(self, resume, fork=fork))
            self._start(program, resume=target.resumes is not None)
        spec = self._spec(program, plan, self._data(train_loader, evals), tests, target, quiet=quiet)
        self._run = Run(spec, target)
        try:
            return self._run.execute(self._finish)
        finally:
            self._leave_run()

    def _spec(
        self,
        program: CompiledProgram,
        plan: Plan,
        data: Data,
        tests: Mapping[str, Any],
        target: RunTarget,
        *,
        quiet: bool,
    ) -> RunSpec:
        """A run of this trainer: its hooks, its policies, and what it writes."""
        config = self.config
        return RunSpec(
            program=program,
            plan=plan,
            data=data,
            init=lambda: self._state_in(target.folder),
            tests=tests,
            test_batches=config.test_plan.eval_batches,
            observers=lambda run: [TrainerHooks(run.context, run.history, {**data.evals, **tests})],
            policy=config.guards or "raise",
            max_rollbacks=config.max_rollbacks,
            finite_metrics=config.checked_eval_metrics if config.guards else (),
            progress=config.enable_progress_bar and not quiet,
            train_epoch=lambda epoch: self.train_epoch(data.train, epoch),
            on_open=lambda run: self._report(run, target, quiet=quiet),
            recording=self._recording(validates=bool(data.evals), must_rank=bool(tests)),
        )

    def _recording(self, *, validates: bool, must_rank: bool) -> Recording:
        config, is_custom, configs = self.config, self.has_custom_comparison, configs_of(self)
        monitor = (lambda metrics: None) if is_custom else self.compared_by
        must_rank &= config.saver is None  # a test uses the best weights: what ranks them must be reported
        return Recording(
            logger=self._open_logger,
            callbacks=self._create_callbacks,
            files=config_files(configs),
            hparams=hparams_of(configs),
            saver=config.saver,
            ranking=Ranking(monitor, self.is_new_model_better, is_custom=is_custom or must_rank),
            keeps_training=False,
            is_ranked=validates,
            dataset=self.dataset,
            trainer=self,
            transforms=self.describe_transforms,
            monitors=not is_custom,
            resume_call="train_model(…, resume={})",
        )

    def _state_in(self, folder: RunFolder) -> TrainState:
        self.folder = folder  # now that it is locked
        return self.state

    def _open_logger(self, folder: RunFolder) -> Logger:
        self.logger = self.init_logger(folder)
        return self.logger

    def _create_callbacks(self, run: RunContext) -> dict[str, Callback]:
        self.callbacks = self.init_callbacks(run)
        return self.callbacks

    def _report(self, run: Run, target: RunTarget, *, quiet: bool) -> None:
        """Logs the size of a new model; writes and shows the sharding of the state, if there are several devices."""
        if not run.is_resumed and run.logger is not None:
            count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(run.state.params))
            run.logger.log_scalar("param/num_model_params", count, 0)
        if (table := self.layout_table()) is None:
            return
        target.write_text(LAYOUT, table.text())
        if self.config.enable_progress_bar and not quiet and process_group().is_primary:
            progress_console().print(table.text(), markup=False, highlight=False, soft_wrap=True)

    def _finish(self, run: Run) -> TrainResults:
        self._leave_run()
        self._kept_best = run.kept_best
        return TrainResults(run.history, None if run.kept_best is None else run.kept_best.best, run.tested)

    def _leave_run(self) -> None:
        """Takes over the state that the run has reached."""
        run, self._run = self._run, None
        if run is not None and run.flat_state is not None:
            self._flat_state, self._at, self._last_metrics = run.flat_state, run.at, dict([run.evaluated])

    def train_epoch(
        self, train_loader: Any, epoch_idx: int, train_metrics: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Trains one epoch from the current state, and returns its metrics.

        `train_model` calls it for every epoch. `train_metrics` is ignored: metrics are computed per epoch.
        """
        if self._run is not None:
            return full_names(self._run.train_epoch(), "train")
        if not self._has_optimizer:
            program = self.prepare(train_loader)
            self._check(program, {}, {})
            self._start(program, resume=False)
        observer = _EpochMetrics()
        plan, at = replace(self.config.plan(epoch_idx), max_steps=None), Position(epoch_idx - 1)
        self.state = run(self.program, self.state, self._data(train_loader, {}), plan, [observer], at)
        return full_names(observer.metrics, "train")

    def test_model(
        self, test_loader: Any, apply_callbacks: bool = False, epoch_idx: int = 0, *, which: Weights | None = None
    ) -> dict[str, Any]:
        """The metrics on the test set, or on several of them by name.

        Args:
            test_loader: one loader, or several by name.
            apply_callbacks: also notify the callbacks of the last run, whose logger is closed.
            epoch_idx: the epoch passed to the callbacks.
            which: "best" or "last"; None: the best validated weights of the last run, or the current ones without any.
        """
        sets = named_sets("test", test_loader)
        if apply_callbacks and sets:
            for name, loader in sets.items():
                DataSource(loader, name)  # refuses empty data
            self._use_eval_transforms(sets)
            state = self._weights(which)
            at = Event(int(state.step), epoch_idx, FlatState.of(state))
            for event in eval_events(self.program, at, sets, self.config.test_plan):
                for callback in self.callbacks.values():
                    callback.handle(event)
                if isinstance(event, EvalRoundEnd):
                    return merged_names(event.metrics)
        return self._metrics_on(sets, self.config.test_plan.eval_batches, which)

    def tracker(self, iterator: Iterable[Any], **options: Any) -> Iterable[Any]:
        """`iterator` with a progress bar, if it is enabled and this is the primary process.

        Options: `desc`, the label of the bar, and `total`.
        """
        if not self.config.enable_progress_bar or jax.process_index():
            return iterator
        return track(iterator, options.get("desc", ""), options.get("total"), console=progress_console())

    def _start(self, program: CompiledProgram, *, resume: bool) -> None:
        """Sets `program` and the initial state; an existing state keeps its weights."""
        before, is_overridden = self._flat_state, type(self).init_model is not ModelMethods.init_model
        self._program, self._has_optimizer, self._at, self._last_metrics = program, True, Position(), {}
        self._kept_best = None
        if before is None or resume:
            self._flat_state = None
            state = self.state
        else:
            state, _ = before.state, program.init(self._key, self.exmp_input)  # `init` also builds the nnx model
        if (before is not None or is_overridden) and not resume:
            averaged = {name: copy_state(value) for name, value in state.extra.items() if name == "ema"}
            initial = program.init_from_params(self._key, state.params, state.model_state)
            self.state = initial.replace(extra={**initial.extra, **averaged})

    def _data(self, train_loader: Any, evals: Mapping[str, Any]) -> Data:
        data = Data(train_loader) if self.dataset is None else self.dataset.data()
        return replace(data, train=train_loader, evals=evals, resident=self.config.resident)


_KEYWORDS = [name for name in inspect.signature(TrainerModule).parameters if name != "settings"]


class _EpochMetrics:
    """Collects the metrics of an epoch."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def handle(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self.metrics = event.metrics


def _example(exmp_input: Batch, dataset: DatasetModule | None) -> Batch:
    if exmp_input is None and dataset is None:
        raise TypeError("Pass `exmp_input`, an example batch, such as `next(iter(train_loader))`.")
    if callable(getattr(exmp_input, "__next__", getattr(exmp_input, "epoch", None))):
        kind = type(exmp_input).__name__
        raise TypeError(f"`exmp_input` is a {kind}, and must be one batch: `exmp_input=next(iter(train_loader))`.")
    if dataset is not None and not isinstance(dataset, DatasetModule):
        kind = type(dataset).__name__
        raise TypeError(f"`dataset` must be a DatasetModule, got a {kind}. Pass loaders to `train_model`.")
    if exmp_input is None and dataset is not None:
        return dataset.example()
    exmp_input = as_example(exmp_input)
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(exmp_input)):
        check_batch(exmp_input, "example batch (`exmp_input`)")
    return exmp_input


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # endless, or a generator
        return None
