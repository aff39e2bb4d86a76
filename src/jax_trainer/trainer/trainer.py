"""`TrainerModule`: write the loss, and everything else of training is there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

import jax
import optax
from compoconf import register, register_interface, registered
from flax import nnx
from jax.sharding import Mesh

from jax_trainer.adapters import linen_program, nnx_program
from jax_trainer.callbacks import Callback, ProgressBar, Run, full_names, logger_observers
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config import dump_config
from jax_trainer.core import (
    Batch,
    CompiledProgram,
    HeldState,
    Layout,
    PyTree,
    TrainState,
    compile_program,
    copy_state,
    step_of,
    stream,
    with_ema,
    with_finite_guard,
)
from jax_trainer.datasets import Data, DatasetModule, Position, with_transforms
from jax_trainer.engine import Event, Plan, drive, eval_events, evaluate, train_events
from jax_trainer.interfaces import ModelMode, build_model, model_mode
from jax_trainer.logger import Logger, run_place
from jax_trainer.logger.rows import drop_rows_after
from jax_trainer.optimizer import OptimizerInterface
from jax_trainer.settings import SettingsError
from jax_trainer.trainer.config import BaseTrainer, TrainerConfig
from jax_trainer.trainer.dry_run import DryRun, traced
from jax_trainer.trainer.experiment import StoredRun, build, stored_run, trainer_class
from jax_trainer.trainer.results import Results, named_sets

WEIGHTS = ("params", "model_state", "extra")  # what of a state judging needs


@register
@register_interface
class TrainerModule(BaseTrainer):
    """Trains, validates, tests, saves and loads a model; a subclass says what the loss is.

    Args:
        config: how to train.
        model_config: of a registered model.
        optimizer_config: of a registered optimizer.
        exmp_input: an example batch; only its shapes and types matter.
        mesh: devices that share each batch along their axis "data".
        dataset: its device transforms (such as normalising images) become part of every step.
        other_configs: stored with the run besides the three configurations: `dataset`, `seed`, `num_gpus`. That of a
            `dataset` whose class is registered is stored anyway.
        folder: of an existing run, to load from and to resume; training that does not resume makes a new one.
    """

    config: TrainerConfig

    def __init__(
        self,
        config: TrainerConfig,
        model_config: Any,
        optimizer_config: Any,
        exmp_input: Batch,
        *,
        mesh: Mesh | None = None,
        dataset: DatasetModule | None = None,
        other_configs: Mapping[str, Any] | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        self.config, self.model_config, self.optimizer_config = config, model_config, optimizer_config
        self.exmp_input, self.dataset, self.folder = exmp_input, dataset, folder
        self.other_configs = _storable(other_configs or {})
        self.model_mode = self._agreed_mode()
        self._layout = None if mesh is None else Layout(mesh=mesh)
        self._optimizer: OptimizerInterface = optimizer_config.instantiate(OptimizerInterface)
        self._program: CompiledProgram | None = None
        self._held: HeldState | None = None

    # what a subclass writes

    def batch_to_input(self, batch: Any) -> Any:
        """What of a batch the model is called with."""
        raise NotImplementedError(f"{type(self).__name__} must say what of a batch the model gets: `batch_to_input`.")

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, dict[str, Any]]:
        """The loss of an nnx model on a batch, and what else to report."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss_function`, which an nnx model needs.")

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, dict[str, Any]]]:
        """The loss of a linen model on a batch, its changed collections, and what else to report."""
        raise NotImplementedError(f"{type(self).__name__} has no `loss_function_linen`, which a linen model needs.")

    def model_apply(self, model: Any, inputs: Any, train: bool | None = None, **kwargs: Any) -> Any:
        """The output of an nnx model. A loss gets it in the right mode; `train` puts it into one."""
        if train is not None:
            model.train() if train else model.eval()
        return model(*inputs, **kwargs) if isinstance(inputs, tuple) else model(inputs, **kwargs)

    def model_linen_apply(
        self, params: PyTree, state: Any, input: Any, rng: jax.Array, train: bool = True, **kwargs: Any
    ) -> tuple[Any, PyTree]:
        """The output of a linen model, and its changed collections; what is random in it comes from `rng`."""
        inputs = input if isinstance(input, tuple) else (input,)
        return state._replace(rng=stream(rng, "model")).apply(params, *inputs, train=train, **kwargs)

    # the state and the program

    @property
    def state(self) -> TrainState:
        """All that training changes. Before training it is made from `seed` and the example batch."""
        if self._held is None:
            self._held = HeldState.of(self.program.init(jax.random.key(self.config.seed), self.exmp_input))
        return self._held.state

    @property
    def program(self) -> CompiledProgram:
        """What gets compiled. Before training it can evaluate only: the optimizer is made with the run's length."""
        if self._program is None:
            self._program = self._compiled(optax.identity())
        return self._program

    def init_optimizer(
        self, num_epochs: int | None = None, num_train_steps_per_epoch: int | None = None
    ) -> optax.GradientTransformation:
        """The optimizer of a run of this length."""
        try:
            return self._optimizer.build(self._total_steps(num_epochs, num_train_steps_per_epoch))
        except SettingsError as error:
            raise error.under("optimizer") from None

    def prepare(self, train_loader: Any, num_epochs: int | None = None) -> CompiledProgram:
        """The program that trains on this data; nothing has run yet."""
        return self._compiled(self.init_optimizer(num_epochs, self._steps_per_epoch(train_loader)))

    def dry_run(self, train_loader: Any = None) -> DryRun:
        """What would be trained; left out, the loader is the dataset's."""
        if train_loader is None and self.dataset is not None:
            train_loader = self.dataset.train_loader
        steps = self._total_steps(None, self._steps_per_epoch(train_loader))
        report = traced(self.prepare(train_loader), self.config.seed, self.exmp_input, steps)
        has_validation = self.dataset is not None and self.dataset.val_loader is not None
        self.config.check_monitored(named_sets("val", [] if has_validation else None), report.judged)
        return report

    def _steps_per_epoch(self, train_loader: Any) -> int | None:
        limits = (_length(train_loader), self.config.max_steps_per_epoch, self.config.overfit_batches or None)
        return min((limit for limit in limits if limit is not None), default=None)

    def _total_steps(self, num_epochs: int | None, steps_per_epoch: int | None) -> int | None:
        epochs = self.config.train_epochs if num_epochs is None else num_epochs
        steps = None if steps_per_epoch is None else steps_per_epoch * epochs
        return min((limit for limit in (steps, self.config.max_steps) if limit is not None), default=None)

    def _compiled(self, tx: optax.GradientTransformation) -> CompiledProgram:
        config = self.config
        options: dict[str, Any] = {
            "micro_batches": config.accumulate,
            "precision": config.precision,
            "log_norms": config.log_grad_norm,
        }
        if self.model_mode == "nnx":
            program = nnx_program(self._nnx_model, self.loss_function, tx, **options)
        else:
            model: Any = build_model(self.model_config, self.exmp_input, nnx.Rngs(0))
            program = linen_program(model, self.loss_function_linen, tx, to_input=self.batch_to_input, **options)
        if self.dataset is not None:
            program = with_transforms(program, self.dataset.transforms)
        if config.ema is not None:
            program = with_ema(program, config.ema)
        if config.detect_nans:
            program = with_finite_guard(program, max_consecutive=0)
        return compile_program(program, layout=self._layout, debug=config.debug)

    def _nnx_model(self, rngs: nnx.Rngs, example: Batch) -> Any:
        return build_model(self.model_config, self.batch_to_input(example), rngs)

    def _agreed_mode(self) -> ModelMode:
        mode = model_mode(self.model_config)
        if self.config.model_mode not in (None, mode):
            text = f"`model_mode` is {self.config.model_mode}, and {self.model_config.class_name} is a model of {mode}."
            raise SettingsError([("trainer.model_mode", f"{text} Leave it out: the model says so itself.")])
        return mode

    # training and judging

    def train_model(
        self,
        train_loader: Any,
        val_loader: Any = None,
        test_loader: Any = None,
        num_epochs: int | None = None,
        *,
        resume: bool = False,
        quiet: bool = False,
    ) -> dict[int | str, dict[str, Any]]:
        """Trains; returns the metrics of every validated epoch, and under "test" those of the best weights.

        Args:
            val_loader, test_loader: one loader, or several by name.
            num_epochs: instead of `train_epochs`.
            resume: go on from the latest checkpoint of `folder`, whose stored configuration becomes the present one.
            quiet: show no progress, whatever the configuration says.
        """
        plan, program = self.config.plan(num_epochs), self.prepare(train_loader, num_epochs)
        evals = named_sets("val", val_loader) if self.config.validates else {}
        data, tests = self._data(train_loader, evals), named_sets("test", test_loader)
        if (
            not self.config.debug
        ):  # finds mistakes in the loss before anything is written; debugged code sees no tracers
            _, _, judged = program.shapes(jax.random.key(self.config.seed), self.exmp_input)
            self.config.check_monitored(evals, judged.by_name)
        state, at = self._start(program, resume), Position()
        folder = self._run_folder(resume)
        store = self._store(folder, validates=bool(evals))
        if resume:
            state, saved = store.restore("latest", like=state)
            at = saved.position
            drop_rows_after(folder.metrics_file, saved.step, saved.epoch)
        self._program, self._held = program, HeldState.of(state)
        logger, results = self.config.logger.instantiate(Logger, folder.path), Results()
        try:
            run = Run(folder.path, logger, store, self.dataset, validates=bool(evals))
            records = [*logger_observers(logger), results]  # first: a callback may save what they wrote, or stop
            watching = [*self._bar(folder, quiet), *records, *self._callbacks(run)]
            plan = plan.seen_by(watching)
            drive(self._events(data, plan, at, tests, store), watching, state, at)
            if tests and "test" not in results.metrics:  # a callback has ended the run, and was told so
                for event in self._test_events(tests, plan, store, results.epoch):
                    for observer in records:
                        observer.handle(event)
        finally:
            logger.close(results.status)
        return results.metrics

    def eval_model(self, data_loader: Any, mode: str = "val") -> dict[str, Any]:
        """The metrics of the current weights on one set; `mode` is what it is called."""
        return self._metrics_on({mode: data_loader})

    def test_model(self, test_loader: Any) -> dict[str, Any]:
        """The metrics of the current weights on the test set, or on several of them by name."""
        return self._metrics_on(named_sets("test", test_loader))

    def load_model(self, which: str | int = "best") -> None:
        """Takes the weights of a checkpoint of this run: the "best", the "latest", or those of a step.

        Where nothing was judged there is no best one, and the latest is taken: so does the test after training.
        """
        if self.folder is None:
            raise ValueError("This trainer has no run folder yet to load from. Train first, or pass `folder`.")
        store = self._store(self.folder)
        chosen: Any = store.best() or "latest" if which == "best" else which
        self._held = HeldState.of(self._with_weights(store, chosen))

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint: str | Path,
        exmp_input: Batch | None = None,
        *,
        dataset: DatasetModule | None = None,
        which: str | int = "best",
        overrides: Sequence[str] = (),
    ) -> Self:
        """The trainer of a run as its stored configuration says, with the weights of its best checkpoint.

        Args:
            checkpoint: the run's folder, wherever it is now.
            exmp_input: an example batch, for a run whose dataset is not stored with it.
            dataset: for a run that had one which is not stored with it, or to judge on another.
            which: "best", "latest", or a step.
            overrides: of the stored configuration, such as `num_gpus=1`.
        """
        folder = RunFolder.open(Path(checkpoint))
        run = stored_run(folder, overrides).value
        kind = cls._kind_for(trainer_class(run), folder)
        trainer = build(run, exmp_input=exmp_input, dataset=dataset, folder=folder, kind=kind)
        trainer.load_model(which)
        return trainer

    @classmethod
    def _kind_for(cls, stored: type[Any], folder: RunFolder) -> type[Any]:
        """What to build of a run of class `stored`."""
        if stored is cls._stored_as():
            return cls
        if not issubclass(stored, cls):
            raise TypeError(f"{folder.path} is a run of {stored.__name__}, not of {cls.__name__}.")
        return stored

    @classmethod
    def _stored_as(cls) -> type[Any]:
        """The class by which its runs are stored: itself, or its parent where it was never registered."""
        return next(base for base in cls.__mro__ if base.__name__ in registered(BaseTrainer))

    def _metrics_on(self, sets: Mapping[str, Any]) -> dict[str, Any]:
        if not sets:
            raise ValueError("There is no data to judge the weights on.")
        state, metrics = self.state, {}  # the state first: an nnx model is built while it is made
        for name, values in evaluate(self.program, state, sets).items():
            metrics |= full_names(values, name)
        return metrics

    def _start(self, program: CompiledProgram, resume: bool) -> TrainState:
        fresh = program.init(jax.random.key(self.config.seed), self.exmp_input)
        if self._held is None or resume:
            return fresh
        now = self.state  # loaded, trained before, or looked at: its weights stay, and counters begin again
        averaged = {name: value for name, value in now.extra.items() if name == "ema"}
        begun = fresh.replace(params=now.params, model_state=now.model_state, extra={**fresh.extra, **averaged})
        return copy_state(begun)  # whoever holds `now` keeps it: a step reuses the memory of its state

    def _events(
        self, data: Data, plan: Plan, at: Position, tests: Mapping[str, Any], store: CheckpointStore
    ) -> Iterator[Event]:
        epoch = at.epoch
        with closing(train_events(self.program, self.state, data, plan, at)) as events:  # type: ignore[type-var]
            for event in events:
                self._held, epoch = event.held, event.epoch
                yield event
        yield from self._test_events(tests, plan, store, epoch)

    def _test_events(self, tests: Mapping[str, Any], plan: Plan, store: CheckpointStore, epoch: int) -> Iterator[Event]:
        if tests:
            best = store.best()
            state = self.state if best is None else self._with_weights(store, best)
            limits = Plan(max_steps=0, eval_batches=plan.fast_dev_run or None)
            yield from eval_events(self.program, Event(step_of(self.state), epoch, HeldState.of(state)), tests, limits)

    def _with_weights(self, store: CheckpointStore, which: Any) -> TrainState:
        return store.restore(which, like=self.state, only=WEIGHTS)[0]

    def _data(self, train_loader: Any, evals: Mapping[str, Any]) -> Data:
        data = Data(train_loader) if self.dataset is None else self.dataset.data()
        return replace(data, train=train_loader, evals=evals, resident=self.config.resident)

    # the run's folder and who watches

    def _run_folder(self, resume: bool) -> RunFolder:
        if resume and self.folder is None:
            raise ValueError("There is nothing to resume: pass `folder`, the folder of the run.")
        if not resume or self.folder is None:
            self.folder = RunFolder.create(*run_place(self.config.logger, self.model_config.class_name))
        self.folder.write_text(self.folder.config_file.name, dump_config(self.configs))
        return self.folder

    @property
    def configs(self) -> dict[str, Any]:
        """All configurations, as they are stored with the run."""
        trainer, dataset = _of_class(self.config, self._stored_as()), self.dataset
        own = {"trainer": trainer, "model": self.model_config, "optimizer": self.optimizer_config}
        if dataset is not None and type(dataset).__name__ in registered(DatasetModule):
            own["dataset"] = _of_class(dataset.config, type(dataset))
        return {**own, **self.other_configs}

    def _store(self, folder: RunFolder, *, validates: bool = True) -> CheckpointStore:
        saver = self.config.saver
        options = {} if saver is None else saver.store_options(validates=validates)
        return CheckpointStore(folder.checkpoints, **options)

    def _bar(self, folder: RunFolder, quiet: bool) -> list[ProgressBar]:
        is_shown = self.config.enable_progress_bar and not quiet
        return [ProgressBar(title=f"Run folder: {folder.path}")] if is_shown else []

    def _callbacks(self, run: Run) -> list[Any]:
        return [config.instantiate(Callback, run) for config in self.config.callbacks.values()]


def _of_class(config: Any, kind: type[Any]) -> Any:
    """`config` with the name of this class: several may share a configuration, which by itself knows one of them."""
    named = copy(config)
    named.class_name = kind.__name__
    return named


def _storable(other_configs: Mapping[str, Any]) -> dict[str, Any]:
    """`other_configs`, if a run that is stored with them can be loaded again."""
    known = {field.name for field in fields(StoredRun) if field.init} - {"trainer", "model", "optimizer"}
    if unknown := sorted(other_configs.keys() - known):
        raise ValueError(f"`other_configs` may have {', '.join(sorted(known))}, and has {', '.join(unknown)}.")
    return dict(other_configs)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # endless, or a generator
        return None
