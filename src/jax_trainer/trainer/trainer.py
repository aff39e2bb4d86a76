"""`TrainerModule`: implement the loss; it trains, evaluates, logs, saves and resumes."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import optax
from compoconf import register, register_interface
from jax.core import Tracer

from jax_trainer.adapters import ModelHandle, calls, handle_of
from jax_trainer.adapters.handle import ModelHooks
from jax_trainer.callbacks import Callback, RunContext, full_names, merged_names
from jax_trainer.callbacks.monitor import parameter_table
from jax_trainer.callbacks.monitored import check_names
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.store import CheckpointStore, SavedCheckpoint
from jax_trainer.config.settings import classes_in
from jax_trainer.core import Batch, CompiledProgram, Program, TrainState, stream
from jax_trainer.datasets import ArrayLoader, Data, DatasetModule, DeviceTransforms
from jax_trainer.datasets.data_source import peeked
from jax_trainer.datasets.foreign import as_arrays, is_array
from jax_trainer.diagnostics.ledger import INIT, begin, phase
from jax_trainer.diagnostics.output import safe_console
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.diagnostics.user_frame import noting
from jax_trainer.engine import Plan, Preflight, checked_evals, evaluate, precompile, preflight, sweep_batches
from jax_trainer.engine.preflight import batch_size_of
from jax_trainer.logger import Logger, run_path_parts
from jax_trainer.optimizer import LRFindResult, find_learning_rate
from jax_trainer.runs.best import Ranking, Weights, select_weights
from jax_trainer.runs.callback_list import CallbacksLike, attached
from jax_trainer.runs.finding import Resume, find_target
from jax_trainer.runs.fingerprint import Fingerprint
from jax_trainer.runs.history import MetricDict
from jax_trainer.runs.predictions import Predictor, write_predictions
from jax_trainer.runs.run import Run, before_first_step
from jax_trainer.runs.sections import layout_for
from jax_trainer.runs.spec import Recording, RunSpec, mirror_of
from jax_trainer.sharding import MeshLike
from jax_trainer.trainer import arguments, experiment, run_folder, training, weights
from jax_trainer.trainer.base import BaseTrainer, Metrics, check_methods
from jax_trainer.trainer.config import TrainerConfig, check_reported
from jax_trainer.trainer.dry_run import DryRun, LayoutTable, Shapes, dry_run_of, layout_table
from jax_trainer.trainer.eval_sets import EvalSet, EvalSets, SetMetrics, loaded_sets
from jax_trainer.trainer.program import LoaderTransforms, ProgramBuilder, keeps_mask
from jax_trainer.trainer.run_folder import Which
from jax_trainer.trainer.training import TrainResults, named_sets

LOG = logging.getLogger("jax_trainer")
OF_EXAMPLE = "This batch is `exmp_input`, which must have all that the batches of the loaders have, also targets."
Sets = Mapping[str, Any]  # data by name
Step = Callable[[Any, Batch], Any]


@register
@register_interface
class TrainerModule(BaseTrainer):
    """Trains, validates, tests, saves and loads a model; a subclass defines the loss.

    Args:
        config: how to train; its keys can be passed as keywords instead, as in `train_epochs=5`.
        model_config: the configuration of a registered model; or pass `model`.
        optimizer_config: the configuration of a registered optimizer, or of several by name; or pass `optimizer`.
        exmp_input: an example batch, of which only shapes and dtypes matter; default: the first one of `dataset`.
        mesh: a device mesh, its axis sizes (`{"data": -1, "fsdp": 8}`), a `Layout`, or two shardings, of the model and
            of the data; can be set in `config` instead.
        model: an nnx or linen module, or a class or function that builds an nnx module from `rngs`.
        optimizer: an optax optimizer; or several by name, each also an `AlternatingOptimizer`. Not needed by a class
            that overrides `init_optimizer`.
        dataset: its device transforms (such as image normalisation) become part of every step; without one, those of
            the loaders do.
        callbacks: callbacks or callback configurations, as a list or by name, besides those of `config`.
        other_configs: stored with the run besides the three configurations: `dataset`, `eval_sets`, `seed`, `num_gpus`.
            The configuration of a `dataset` whose class is registered is always stored.
        folder: folder of an existing run, to load from and to resume; training without `resume` creates a new one.

    Attributes:
        respects_mask: whether the loss and all metrics count only the examples in the `mask` of a batch. Evaluations
            then pad a smaller last batch instead of compiling again for it. A class declares it for its own methods: a
            derived class that overrides the loss declares it again.
    """

    config: TrainerConfig
    respects_mask: ClassVar[bool] = False

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
        may_lack = ("optimizer",) if self._overrides("init_optimizer") else ()
        if (stored := vars(self).pop("_stored", None)) is not None:  # of a file or a run: it wins
            given = {"model_config": model_config, "optimizer_config": optimizer_config, "exmp_input": exmp_input}
            given |= {"mesh": mesh, "model": model, "optimizer": optimizer, "dataset": dataset, "callbacks": callbacks}
            passed: dict[str, Any] = {"given": given, "settings": settings, "stored": stored, "may_lack": may_lack}
            TrainerModule.__init__(self, **arguments.overruled(type(self), TrainerModule, **passed))
            return
        self._recorded = experiment.recorded(type(self), TrainerModule, *vars(self).pop("_called_with"))
        has_own_step = self._overrides("create_training_function", "create_functions")
        check_methods(self, has_own_step=has_own_step)
        self.config, self._given_callbacks = arguments.resolve(type(self), TrainerModule, config, callbacks, settings)
        model = experiment.as_config("model", arguments.one_of("model", model_config, model))
        optimizer = arguments.one_of("optimizer", optimizer_config, optimizer, may_lack=bool(may_lack))
        optimizer = experiment.as_config("optimizer", optimizer)
        self.exmp_input, self.dataset, self.folder = arguments.example_of(exmp_input, dataset), dataset, folder
        self._model, self._build_optimizer = self._handle(model), arguments.optimizer_of(optimizer)
        self.model_config, self.optimizer_config = map(arguments.config_or_none, (model, optimizer))
        self.model_mode = arguments.mode_of(self._model, self.config.model_mode)
        known_steps = lambda: self.config.total_steps(*self.config.run_length(self._loader_or_own(None)))
        parts = self._model, self.config, layout_for(self.config, mesh)
        self._builder = ProgramBuilder(*parts, known_steps, arguments.evaluating(optimizer))
        self.other_configs = experiment.storable(other_configs or {})
        self.logger: Logger | None = None  # of the last run; closed when the run ends
        self.callbacks: dict[str, Callback] = {}  # of the last run
        self._program: CompiledProgram | None = None
        self._has_optimizer = False  # whether the program can train
        self._is_initialising = False  # whether the initial weights are being made
        self._weights = weights.CurrentWeights()
        self._transforms = LoaderTransforms()  # used without a dataset
        self._known_metrics: dict[str, Metrics] = {}  # of the evaluation in progress, which must not be repeated

    # the loss, which a subclass implements, and what it may call

    def compute_metrics(self, outputs: Any, targets: Any, weights: Any = None) -> Metrics:
        """The `metrics` of the configuration, as entries for the dict of metrics that a loss returns.

        Args:
            outputs: of the model, such as logits.
            targets: what they should be.
            weights: the mask or the weights of the batch, one per example or per value; None: all count alike.
        """
        return self._metrics.computed(outputs, targets, weights)

    def model_apply(self, model: Any, inputs: Any, *others: Any, train: bool | None = None, **kwargs: Any) -> Any:
        """Calls the model of a `loss_function` with one or more inputs; a tuple is several.

        It is already in the mode of the step; `train` sets another one.
        """
        if others and isinstance(others[-1], bool):
            raise TypeError(f"`model_apply` takes the mode by name: `train={others[-1]}`.")
        return self._model.apply(model, (*calls.arguments(inputs), *others), train, **kwargs)

    @property
    def has_custom_comparison(self) -> bool:
        """Whether this class overrides `is_new_model_better`."""
        return self._overrides("is_new_model_better")

    # the model and its state

    def build_model(self, inputs: Any, rngs: Any) -> Any:
        """Builds the model for such inputs. Only an nnx module and a callable pytree have weights already."""
        return self._model.build(inputs, rngs)

    def run_model_init(self, exmp_input: Batch, init_rng: jax.Array) -> Any:
        """Initialises the weights: the variables of a linen module, an nnx module, or the parameters of functions."""
        return self._model.init(exmp_input, init_rng)

    def init_model(self, exmp_input: Batch) -> TrainState:
        """The initial state: weights from `seed`, and a new optimizer state."""
        return self.program.init(self._key, exmp_input)

    @property
    def state(self) -> TrainState:
        """The training state with the last weights.

        Before training, it is initialised from `seed` and the example, or with the weights of `init_from`.
        """
        if self._weights.last is None:
            self._check_readable()
            # the weights of an existing run are in its checkpoints, but not the base of LoRA
            loads = self.folder is None or self.config.lora is not None
            self._initialise(loads=loads)
            self._weights.is_initial = loads
        assert self._weights.last is not None
        return self._weights.last.state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._weights.set(state)

    @property
    def model(self) -> Any:
        """The model: a linen module without weights, any other model with those of `state`."""
        return self._model.module_at(self._readable_state)

    def _check_readable(self) -> None:
        if self._is_initialising or isinstance(jnp.zeros(()), Tracer):
            raise RuntimeError(
                "`self.state` and `self.model` have no values while a step is traced or the weights are initialised. A "
                "loss has its argument `model`; `batch_to_input` can read a number of classes from `self.config`."
            )

    def _readable_state(self) -> TrainState:
        self._check_readable()
        return self.state

    @property
    def model_name(self) -> str:
        """Name of the model, or of the class of the trainer if the model has none, and default folder of its runs."""
        return self._model.name or type(self).__name__

    def tabulate(self, exmp_input: Batch | None = None) -> str:
        """A table of the model's modules: inputs, outputs, parameters."""
        batch = self._transformed_example() if exmp_input is None else exmp_input
        return self._model.tabulate(self.model, calls.arguments(self.batch_to_input(batch)))

    def print_tabulate(self, exmp_input: Batch | None = None) -> None:
        """Prints `tabulate`."""
        safe_console(stderr=False).print(self.tabulate(exmp_input), markup=False, highlight=False, soft_wrap=True)

    def tabulate_params(self) -> str:
        """A table of the parameters: path, shape, dtype, number of elements."""
        return parameter_table(self.state.params)

    def layout_table(self) -> LayoutTable | None:
        """The sharding of the state over the devices; None: one device."""
        layout = self.program.layout
        return None if layout is None else layout_table(layout, self.state)

    # the program: device transforms, steps, optimizer

    def transform_batch(self, key: jax.Array, batch: Batch, train: bool) -> Batch:
        """Transforms a batch on the device before the model sees it; default: `device_transforms`."""
        return self.device_transforms.apply(key, batch, train=train)

    @property
    def device_transforms(self) -> DeviceTransforms:
        """The transforms of the dataset; without one, those of the training data."""
        return self._transforms.current if self.dataset is None else self.dataset.transforms

    @property
    def has_transforms(self) -> bool:
        """Whether batches are transformed on the device."""
        return self._overrides("transform_batch") or bool(self.device_transforms)

    def set_dataset(self, dataset: DatasetModule | None) -> None:
        """Replaces the dataset: the steps use its transforms, and callbacks see it from the next run on."""
        self.dataset, self._program = dataset, None

    def create_training_function(self) -> Step:
        """The uncompiled step `(state, batch) -> (state, metrics)`; an override can use `state.apply_gradients`."""
        return self._base_program().train_step

    def create_evaluation_function(self) -> Step:
        """The uncompiled evaluation step, `(state, batch) -> metrics`."""
        return self._base_program().eval_step

    def create_functions(self) -> tuple[Step, Step]:
        """The uncompiled training and evaluation steps."""
        return self.create_training_function(), self.create_evaluation_function()

    def create_jitted_functions(self) -> CompiledProgram:
        """The program of both steps with all options of the configuration; compiled at its first call."""
        apply = lambda key, batch, *, train: self.transform_batch(key, batch, train)
        transforms = SimpleNamespace(apply=apply) if self.has_transforms else None
        callbacks = (*self.config.callbacks.values(), *self._given_callbacks.values())
        options = {"respects_mask": keeps_mask(self), "eval_steps": dict(self._metrics.steps)}
        return self._builder.compiled(self._base_program(), self.create_functions(), transforms, callbacks, **options)

    @property
    def program(self) -> CompiledProgram:
        """The compiled program. Before training it can only evaluate: the optimizer depends on the run's length."""
        if self._program is None:
            self._program = self.create_jitted_functions()
        return self._program

    def init_optimizer(
        self, num_epochs: int | None = None, num_train_steps_per_epoch: Any = None
    ) -> optax.GradientTransformation:
        """Builds the optimizer of a run of this length; None: unknown, such as the length of a generator.

        With a batch size that changes, the steps per epoch are given by the number of complete epochs.
        """
        return self._build_optimizer(self.config.total_steps(num_epochs, num_train_steps_per_epoch))

    def prepare(self, train_loader: Any, num_epochs: int | None = None) -> CompiledProgram:
        """Builds the program that trains on this data, without running it."""
        training.check_batches(train_loader, self.exmp_input)
        self._use_transforms({}, train_loader)
        length = self.config.run_length(train_loader, num_epochs)
        self._builder = self._builder.with_optimizer(self.init_optimizer(*length), self.config.total_steps(*length))
        return self.create_jitted_functions()

    def dry_run(self, train_loader: Any = None) -> DryRun:
        """Traces the training without computing or writing anything; default: on the loader of the dataset."""
        self.config.check_limited()
        dataset, train_loader = self.dataset, self._loader_or_own(train_loader)
        steps = self.config.total_steps(None, self.config.run_length(train_loader)[1])
        val_loader = None if dataset is None else dataset.val_loader
        sets = EvalSets.of(val_loader, self.eval_sets, self.config, self.exmp_input)
        program = self.prepare(train_loader)  # with the metrics of the sets
        classes = {**dict(classes_in(self.configs)), "trainer": type(self)}
        shapes = self._shapes(program, sets.loaders)
        return dry_run_of(program, self._model, shapes, self.exmp_input, steps, classes)

    def preflight(
        self, train_loader: Any = None, *, memory: int | str | None = None, find_batch: bool = False
    ) -> Preflight:
        """Compiles the training step without training or writing anything: memory, FLOPs and its time on zeros.

        Args:
            train_loader: default: that of the dataset.
            memory: of a device, in bytes or as text ("80GB"); None: what JAX may use (the CPU: that of the machine).
            find_batch: also look for the largest batch that fits.
        """
        train_loader, config = self._loader_or_own(train_loader), self.config
        plan = training.plan_of(config, train_loader, None, self.exmp_input)
        data = training.data_of(self.dataset, train_loader, {}, resident=config.resident)
        program = self.prepare(train_loader)
        options: dict[str, Any] = {"memory": memory, "find_batch": find_batch}
        return preflight(program, data, plan, self.exmp_input, self._key, **options)

    def lr_find(
        self,
        train_loader: Any = None,
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        early_stop_threshold: float | None = 4.0,
    ) -> LRFindResult:
        """Sweeps the learning rate over a few steps on a copy of the state, and suggests one.

        Weights, optimizer, random numbers and data stay as they are, and nothing is written.

        Args:
            train_loader: default: that of the dataset.
            min_lr, max_lr: the smallest and the largest rate; factors of the learning rate if the optimizer does not
                record it, as `optax.adam(1e-3)`.
            num_training: the number of steps.
            early_stop_threshold: end when the smoothed loss is this many times the best one; None: never.
        """
        train_loader = self._loader_or_own(train_loader)
        program = self.prepare(train_loader)
        self._checked_sets(program, {}, {}, None, loads=self._weights.last is None)
        if self._weights.last is None and not self._overrides("init_model"):
            state = program.init(self._key, self.exmp_input)
        else:
            known = self.init_model(self.exmp_input) if self._weights.last is None else self.state
            state = weights.with_new_optimizer(program, self._key, known)
        options: dict[str, Any] = {"min_lr": min_lr, "max_lr": max_lr, "num_training": num_training}
        with closing(sweep_batches(program, train_loader)) as batches:
            return find_learning_rate(program, state, batches, early_stop_threshold=early_stop_threshold, **options)

    # training

    def init_callbacks(self, run: RunContext) -> dict[str, Callback]:
        """Creates the callbacks of a run, by name."""
        given, configs = self._given_callbacks, self.config.callbacks
        return attached({**{name: one for name, one in configs.items() if name not in given}, **given}, run)

    @checks_keywords
    def train_model(
        self,
        train_loader: Any,
        val_loader: Any = None,
        test_loader: Any = None,
        num_epochs: int | None = None,
        *,
        resume: Resume = False,
        allow_changes: Collection[str] = (),
        fork: bool = False,
        quiet: bool = False,
    ) -> TrainResults:
        """Trains; returns the metrics of every validated epoch, and under "test" those of the best weights.

        Without any validation, they are the training metrics of every epoch.

        `validations` of the result has every validation with its epoch and step, also those inside epochs; `best` is
        the best validation. Afterwards, `predict`, `bind_model`, `eval_model` and `test_model` use the best weights
        (`which="latest"`: the last ones); `state` has the last weights, from which training would continue.

        Args:
            train_loader: yields batches. All examples as arrays have no batch size: `ArrayLoader(arrays, 32)` does.
            val_loader, test_loader: one loader, or several by name; each may be all examples as arrays, as for
                `eval_model`. One of `val_loader` may be an `EvalSet`, with a schedule and metrics of its own.
            num_epochs: instead of `train_epochs`. Without either, `max_steps` or `max_time` ends the training.
            resume: "auto": continue the newest run that computes the same, also to another length, or start a new one.
                True: continue the run in `folder`, or else the newest that computes the same. A path: continue the run
                in that folder, or from that checkpoint. A completed run is not trained further.
            allow_changes: parts in which the run to resume may differ from this trainer: "program" (model, loss,
                options), "optimizer", "callbacks", "start" (seed, initial weights), "data". Anything else that differs
                is an error (`resume="auto"`: a new run).
            fork: resume into a new run folder; the original is not modified.
            quiet: show no progress, regardless of the configuration.

        Ctrl-C ends it after the current step, saved if the run has a `ModelCheckpoint`: the `KeyboardInterrupt` says
        how to resume, and its `result` is what would have been returned.
        """
        if "config" not in vars(self):
            kind = type(self).__name__
            raise TypeError(f"`{kind}.__init__` does not call `super().__init__(…)`. Call it with the other arguments.")
        begin()
        plan = training.plan_of(self.config, train_loader, num_epochs, self.exmp_input)
        sets = EvalSets.of(val_loader, self.eval_sets, self.config, self.exmp_input)
        self._metrics.use(sets.metrics)
        plan, evals = replace(plan, evals_every=sets.every), sets.loaders
        tests = self._test_sets(test_loader)
        with before_first_step():
            self.config.logger.check_mirror()
            program = self.prepare(train_loader, plan.max_epochs)
            self._use_transforms({**evals, **tests})
            loads = not resume and self._weights.last is None
            evals, tests, first = self._checked_sets(program, evals, tests, plan, loads=loads)
            if isinstance(train_loader, Iterator):
                first["train"], train_loader = peeked(train_loader)
            data = training.data_of(self.dataset, train_loader, evals, resident=self.config.resident)
            shown = self.config.enable_progress_bar and not quiet
            spec, fingerprint, state = self._spec(program, plan, data, tests, shown=shown), None, None
            if resume or not self.config.debug:  # which would trace what `debug` runs step by step
                state = self._own_state(program)
                fingerprint = self._fingerprint(spec, first, state, resume=bool(resume))
            where = run_path_parts(self.config.logger, self.model_name)
            options = {"own": self.folder, "mirror": self.config.logger.mirror, "allow_changes": allow_changes}
            target = find_target(resume, where, fingerprint, fork=fork, **options)
            is_new = target.resumes is None
            if fingerprint is not None and is_new and self._weights.last is not None:
                fingerprint = fingerprint.with_start(**{"from": self._weights.digest()})
            with phase(INIT), precompile(program, data, plan):
                loads = run_folder.loads_weights(self.config, target)
                self._start(program, resume=not is_new, loads=loads, state=state)
        self._weights.run = Run(replace(spec, fingerprint=fingerprint), target)
        try:
            return self._weights.run.execute(self._results)
        finally:
            self._weights.leave_run()

    def train_epoch(self, train_loader: Any, epoch_idx: int, train_metrics: Mapping[str, Any] | None = None) -> Metrics:
        """Trains one epoch from the current state, and returns its metrics; `train_metrics` is ignored.

        An override is called for every epoch of `train_model`, and calls `super().train_epoch(…)`.
        """
        if self._weights.run is not None:
            return full_names(self._weights.run.train_epoch(), "train")
        if not self._has_optimizer:
            program = self.prepare(train_loader)
            self._checked_sets(program, {}, {}, None, loads=self._weights.last is None)
            self._start(program, resume=False, loads=True)
        training.check_batches(train_loader, self.exmp_input)
        data = training.data_of(self.dataset, train_loader, {}, resident=self.config.resident)
        plan = self.config.training_plan(epoch_idx)
        self.state, metrics = training.train_one_epoch(self.program, self.state, data, plan, epoch_idx)
        return metrics

    def _shapes(self, program: CompiledProgram, evals: Sets, *, loads: bool = True) -> Shapes:
        """Traces the steps: mistakes in them, in metrics and in the weights that it `loads` show before any effect."""
        with noting(OF_EXAMPLE):
            state, trained, evaluated = program.shapes(lambda: self._key, self.exmp_input)
        if loads:
            run_folder.check_initial(self.config.initial_weights, state, program.info)
        check_reported(self.config.metrics, {*trained.names, *evaluated.names}, "trainer")
        names = self._metrics.names_in(program, state, self.exmp_input, evals, evaluated.names)
        if not self._overrides("on_validation_epoch_end", "eval_model", "is_new_model_better"):  # may add metrics
            known = merged_names({one: dict.fromkeys(reported) for one, reported in names.items()})
            of_training = full_names(dict.fromkeys(trained.names), "train")
            callbacks = {**self.config.callbacks, **self._given_callbacks}
            check_names(callbacks, self.config.progress_metric, known, of_training)
        return state, trained, evaluated

    def _checked_sets(
        self, program: CompiledProgram, evals: Sets, tests: Sets, plan: Plan | None, *, loads: bool
    ) -> tuple[Sets, Sets, dict[str, Batch]]:
        """Traces the steps, and checks the sets; returns them, and the first batches that were read of them."""
        if self.config.debug:
            return evals, tests, {}
        state, trained, _ = self._shapes(program, evals, loads=loads)
        if self.config.log_intermediates and not any(name.startswith("intermediate/") for name in trained.by_name):
            LOG.warning(
                "`log_intermediates` is on, but the model sows no values. Sow them: in nnx with "
                "`self.sow(nnx.Intermediate, name, value)`, in linen with `self.sow('intermediates', name, value)`."
            )
        evals, first = checked_evals(program, state, evals, self.exmp_input, plan)
        tests, of_tests = checked_evals(program, state, tests, self.exmp_input)
        return evals, tests, {**first, **of_tests}

    def _own_state(self, program: CompiledProgram) -> TrainState | None:
        """The state that an override of `init_model` makes; None without one, or if there are weights already."""
        if self._weights.last is not None or not self._overrides("init_model"):
            return None
        self._program = program
        self.pre_model_init_callback()
        return self.init_model(self.exmp_input)

    def _fingerprint(self, spec: RunSpec, first: Sets, state: TrainState | None, *, resume: bool) -> Fingerprint:
        """What a run computes that starts from `state`, from the current weights, or from new ones."""
        epochs, steps = self.config.run_length(spec.data.train, spec.plan.max_epochs)

        def rebuild(total_steps: int | None) -> CompiledProgram:
            """The program for a run of another length."""
            if self._overrides("init_optimizer"):
                one = steps if isinstance(steps, int) else 0
                tx = self.init_optimizer(epochs if total_steps is None or not one else total_steps // one, steps)
            else:
                tx = self._build_optimizer(total_steps)
            other = copy(self)
            other._builder = self._builder.with_optimizer(tx, total_steps)
            other._program = rebuilt = other.create_jitted_functions()
            rebuilt.shapes(lambda: self._key, self.exmp_input)
            return rebuilt

        if spec.program.debug:
            spec.program.shapes(lambda: self._key, self.exmp_input)
        starts_from = self._weights.start if resume else None
        has_own = self._weights.last is not None and not self._weights.is_initial
        if state is not None or (has_own and starts_from is None):
            starts_from = self._weights.digest(state)
        elif starts_from is None:
            starts_from = run_folder.initial_digest(self.config.initial_weights, must_exist=not resume)
        return Fingerprint.of(
            spec.program,
            spec.data,
            spec.plan,
            tests=spec.tests,
            first=first,
            words=experiment.stored_files(self.configs)["hparams"],
            callbacks={**self.config.callbacks, **self._given_callbacks},
            starts_from=starts_from,
            total_steps=self.config.total_steps(epochs, steps),
            rebuild=rebuild,
        )

    def _start(self, program: CompiledProgram, *, resume: bool, loads: bool, state: TrainState | None = None) -> None:
        """Sets `program` and the initial state; an existing state keeps its weights, a new one `loads` some.

        `state` is that of `_own_state`.
        """
        self._program, self._has_optimizer = program, True
        keeps = self._weights.restart(resume=resume)
        if keeps:
            program.init(self._key, self.exmp_input)  # also builds the nnx model
        else:
            self._initialise(loads=loads, state=state)
        state, is_loaded = self.state, loads and self.config.init_from is not None
        if keeps or is_loaded or (self._overrides("init_model") and not resume):
            self.state = weights.with_new_optimizer(program, self._key, state)

    def _initialise(self, *, loads: bool, state: TrainState | None = None) -> None:
        """Sets the initial state, with the weights of `init_from` if it `loads` them."""
        if state is None:
            self.pre_model_init_callback()
            self._is_initialising = True
            try:
                state = self.init_model(self.exmp_input)
            finally:
                self._is_initialising = False
        self.state = state
        if loads and (source := self.config.initial_weights) is not None:
            self.load_weights(source.path, **source.options)
        self.post_model_init_callback()

    def _spec(self, program: CompiledProgram, plan: Plan, data: Data, tests: Sets, *, shown: bool) -> RunSpec:
        """A run of this trainer: its hooks, its policies, and what it writes."""
        config, is_custom = self.config, self.has_custom_comparison
        monitor = (lambda metrics: None) if is_custom else self.compared_by
        # a test uses the best weights: without a saver, what ranks them must be reported
        must_rank = is_custom or bool(tests and config.saver is None)
        eval_model = self.eval_model if self._overrides("eval_model") else None
        hooks = partial(training.TrainerHooks, {**data.evals, **tests}, eval_model, self._known_metrics)
        recording = Recording(
            logger=self.init_logger,
            callbacks=self._create_callbacks,
            saver=config.saver,
            mirror=lambda folder: mirror_of(folder, config.logger, run_path_parts(config.logger, self.model_name)[1]),
            ranking=Ranking(monitor, self.is_new_model_better, is_custom=must_rank),
            is_ranked=bool(data.evals),
            dataset=self.dataset,
            trainer=self,
            transforms=training.describe(self.device_transforms),
            monitors=not is_custom,
            resume_call="train_model(…, resume={})",
            **experiment.stored_files(self.configs),
        )
        return RunSpec(
            program=program,
            plan=plan,
            data=data,
            init=lambda: self.state,
            tests=tests,
            observers=lambda run: [hooks(run.context, run.history)],
            progress=shown,
            progress_metric=config.progress_metric or "",
            train_epoch=partial(self.train_epoch, data.train) if self._overrides("train_epoch") else None,
            on_open=lambda run: training.report_start(run, self.layout_table(), shown=shown),
            recording=recording,
            options=config,
            test_batches=config.test_plan.eval_batches,
        )

    def _create_callbacks(self, run: RunContext) -> dict[str, Callback]:
        self.folder, self.logger = RunFolder(run.folder), run.logger  # the folder is locked now
        self.callbacks = self.init_callbacks(run)
        return self.callbacks

    def _results(self, run: Run) -> TrainResults:
        self._weights.leave_run()
        self._weights.best = run.kept_best
        return TrainResults(run)

    # evaluation and prediction; `which`: "best" or "latest" weights, see `bind_model`

    def eval_model(
        self, data_loader: Any, mode: str = "val", epoch_idx: int = 0, *, which: Weights | None = None
    ) -> Metrics:
        """The metrics on one evaluation set.

        An override is called after every evaluation of a run, and the metrics that it adds are logged.

        Args:
            data_loader: the data to evaluate on: batches; or all examples as arrays, in the form of a batch, which are
                batched like `exmp_input`.
            mode: name of the set, the prefix of its metrics.
            epoch_idx: the epoch of the evaluation, for overrides.
            which: "best" or "latest" weights, as for `bind_model`.
        """
        if mode in self._known_metrics:
            return dict(self._known_metrics[mode])
        return self._metrics_on({mode: data_loader}, self.config.limit_val_batches, which)

    def test_eval_function(self, val_loader: Any) -> Metrics:
        """Evaluates one batch, to test the evaluation."""
        return self._metrics_on({"val": val_loader}, 1)

    def test_model(self, test_loader: Any, *, which: Weights | None = None) -> Metrics:
        """The metrics on the test set, or on several of them by name.

        Args:
            test_loader: one loader, or several by name; each may be all examples as arrays, as for `eval_model`.
            which: "best" or "latest" weights, as for `bind_model`.
        """
        return self._metrics_on(self._test_sets(test_loader), self.config.test_plan.eval_batches, which)

    def predict(
        self,
        data_loader: Any,
        max_batches: int | None = None,
        *,
        which: Weights | None = None,
        output: str | Path | None = None,
        targets: bool = False,
        overwrite: bool = False,
    ) -> Any:
        """The concatenated model outputs of all examples, as numpy arrays.

        With `output`, they are written to a file while they are computed, in bounded memory, and a `PredictionFile` is
        returned. If the process is killed, the same call continues where it was.

        Args:
            data_loader: yields untransformed batches, as the dataset does; or all examples as arrays, in the form of a
                batch or only the input of the model, which are batched like `exmp_input`.
            max_batches: maximum number of batches.
            which: "best" or "latest" weights, as for `bind_model`.
            output: a .jsonl, .npz or .parquet file, with one row per example: its id and prediction.
            targets: also write the targets of the batches to `output`.
            overwrite: replace an existing `output`.
        """
        if is_array(data_loader) and not is_array(self.exmp_input):
            inputs = (as_arrays(data_loader, copy=False),)
            batch = weights.batch_around(inputs, self.exmp_input, self.batch_to_input)
            data_loader = ArrayLoader(batch, batch_size_of(self.exmp_input))
        data_loader = training.eval_data(data_loader, self.exmp_input)
        self._use_transforms({"predict": data_loader})
        predictor = self.predictor(which)
        if output is not None:
            options: dict[str, Any] = {"max_batches": max_batches, "targets": targets, "overwrite": overwrite}
            track = lambda batches, total: self.tracker(batches, desc="predict", total=total)
            return write_predictions(predictor, data_loader, output, **options, track=track)
        return predictor.outputs(data_loader, max_batches)

    def predictor(self, which: Weights | None = None) -> Predictor:
        """The program and the state that `predict` uses; `which`: "best" or "latest" weights, as for `bind_model`."""
        state = self._weights_of(which)  # first: an nnx model is built while it is made
        return Predictor(self.program, state)

    def bind_model(
        self, state: TrainState | None = None, *, which: Weights | None = None, transforms: bool = True
    ) -> Any:
        """A callable model with a copy of the weights, in evaluation mode.

        It takes inputs as the dataset yields them: with device transforms, such as normalisation, it returns a
        `BoundModel`, which applies them first. Otherwise it returns the module itself.

        Args:
            state: use the weights of this state, such as `self.state` in a callback.
            which: "best" or "latest" ("last" means the same); None: the best validated weights of the last run; without
                any, the current ones.
            transforms: False: return the module itself, for transformed inputs.
        """
        module, key = self._model.bind(self._weights_of(which, state)), stream(self._key, "eval transforms")
        if not (transforms and self.has_transforms):
            return module
        transform = lambda batch: self.transform_batch(key, batch, False)
        return weights.BoundModel(module, self.exmp_input, self.batch_to_input, transform)

    def _test_sets(self, test_loader: Any) -> Sets:
        sets = named_sets("test", test_loader, self.exmp_input)
        return {name: training.eval_data(data, self.exmp_input) for name, data in sets.items()}

    def _metrics_on(self, sets: Sets, max_batches: int | None = None, which: Weights | None = None) -> Metrics:
        if not sets:
            raise ValueError("No data to evaluate on: the loader is None or empty. Pass at least one set.")
        sets = {name: training.eval_data(data, self.exmp_input) for name, data in sets.items()}
        self._use_transforms(sets)
        state = self._weights_of(which)  # first: an nnx model is built while it is made
        return MetricDict(merged_names(evaluate(self.program, state, sets, max_batches=max_batches)))

    def _weights_of(self, which: Weights | None, state: TrainState | None = None) -> TrainState:
        if state is None:
            return select_weights(which, self.state, self._weights.best)
        if which is not None:
            raise TypeError("Pass either `state` or `which`, not both.")
        return state

    # checkpoints

    def save_model(self, metrics: Mapping[str, float] | None = None) -> Path:
        """Saves the current state as a checkpoint of its run, with `metrics`.

        Default: the metrics of the last evaluation, if it was of this state.
        """
        store, state = self._store("save to"), self.state
        at, known = self._weights.position(int(state.step))
        record = {"metrics": known if metrics is None else metrics, "saver": self.config.saver}
        return run_folder.save(store, state, at, **record, transforms=training.describe(self.device_transforms))

    def load_model(
        self, epoch_idx: int = -1, raise_if_not_found: bool = True, *, which: Which | None = None
    ) -> SavedCheckpoint | None:
        """Loads the weights of a checkpoint of this run; returns its step, epoch and metrics.

        Without any evaluation there is no best checkpoint, and the latest one is loaded.

        Args:
            epoch_idx: the epoch of the checkpoint; -1: the best one.
            raise_if_not_found: False: without a checkpoint, keep the current weights and return None.
            which: instead of the epoch: "best", "latest", or a step.
        """
        if self.folder is None and not raise_if_not_found:
            return None
        store = self._store("load from")
        found = run_folder.find_checkpoint(store, epoch_idx, which, must_exist=raise_if_not_found)
        if found is None:
            return None
        self.state, saved = run_folder.restored(store, found, self.state, has_transforms=self.has_transforms)
        return saved

    def load_weights(
        self,
        checkpoint: str | Path,
        *,
        which: Which = "best",
        rename: Mapping[str, str | None] | None = None,
        partial: bool = False,
        cast: bool = False,
    ) -> None:
        """Loads the weights of another run as initial weights, for fine-tuning.

        Training then starts at step 0 with a new optimizer state. By default the checkpoint must have exactly the
        arrays of this model.

        Args:
            checkpoint: the other run's folder, or the folder of one of its checkpoints.
            which: "best" by the metric that the run monitored (without any: the latest), "latest", or a step.
            rename: names in the checkpoint to names in this model: `{"params.encoder.*": "params.backbone.*"}`; None
                leaves them out, as in `{"params.head.*": None}`, and this model keeps its own.
            partial: load the arrays that both have; all others are left unchanged, and logged.
            cast: convert arrays to this model's precision.
        """
        options: dict[str, Any] = {"rename": rename, "partial": partial, "cast": cast}
        self.state = run_folder.initial_weights(checkpoint, which, self.state, self.program.info, **options)

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint: str | Path,
        exmp_input: Batch | None = None,
        *,
        model: Any = None,
        optimizer: Any = None,
        dataset: DatasetModule | None = None,
        which: Which = "best",
        overrides: Sequence[str] = (),
        **own: Any,
    ) -> Self:
        """Rebuilds the trainer of a run from its stored configuration, with the weights of its best checkpoint.

        Args:
            checkpoint: the run folder, which may have been moved, or the folder of one of its checkpoints.
            exmp_input: an example batch, for a run without a stored dataset.
            model, optimizer: for a run to which these were passed in Python.
            dataset: for a run whose dataset is not stored, or to evaluate on another one.
            which: "best", "latest", or a step.
            overrides: of the stored configuration, such as `num_gpus=1`.
            own: arguments of a subclass with a custom `__init__`; those with a default may be left out.
        """
        parts = {"exmp_input": exmp_input, "model": model, "optimizer": optimizer, "dataset": dataset, "own": own}
        trainer, step = experiment.rebuilt(cls, Path(checkpoint), overrides, **parts)
        trainer.load_model(which=which if step is None else step)
        return trainer

    def save_metrics(self, filename: str, metrics: Mapping[str, Any]) -> None:
        """Writes `metrics` to `metrics/<filename>.json` in the run's folder."""
        run_folder.write_metrics(self.folder, filename, metrics)

    @property
    def configs(self) -> dict[str, Any]:
        """All configurations, as stored with the run."""
        own = (self.config, self.model_config, self.optimizer_config, self.dataset, self.other_configs)
        return {**experiment.configs_of(type(self), *own), **self._recorded}

    def _store(self, purpose: str) -> CheckpointStore:
        better = self.is_new_model_better if self.has_custom_comparison else None
        return run_folder.open_store(self.folder, purpose, self.config.saver, better)

    # what the methods above share

    @cached_property
    def eval_sets(self) -> dict[str, EvalSet]:
        """The `eval_sets` of the configuration file, by name; they are loaded when they are used."""
        sets = loaded_sets(self.other_configs.get("eval_sets", {}), self.dataset, self.device_transforms)
        if self._metrics.use(EvalSets.of(None, sets, self.config, self.exmp_input).metrics):
            self._program = None
        return sets

    @cached_property
    def _metrics(self) -> SetMetrics:
        return SetMetrics(self.config.metrics, self.config.num_classes)

    def _with_metrics(self, own: Metrics, outputs: Any, targets: Any, weights: Any) -> Metrics:
        """The metrics of a trainer itself, and those of its configuration."""
        return self._metrics.merged(type(self).__name__, own, self.compute_metrics(outputs, targets, weights))

    def _handle(self, model: Any) -> ModelHandle:
        made = {"build": self.build_model, "init": self.run_model_init, "rngs": self.get_model_rng}
        # only an override of `build_model` needs them: otherwise `batch_to_input` may read `self.model`
        inputs = lambda: self.batch_to_input(self.exmp_input) if self._overrides("build_model") else None
        hooks = ModelHooks(self.batch_to_input, lambda: self._key, self._transformed_example, inputs, **made)
        return handle_of(model, hooks)

    def _loader_or_own(self, train_loader: Any) -> Any:
        return self.dataset.train_loader if train_loader is None and self.dataset is not None else train_loader

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.config.seed)

    def _overrides(self, *names: str) -> bool:
        """Whether this trainer has one of these methods of its own, instead of the default."""
        return any(getattr(getattr(self, name), "__func__", None) is not getattr(TrainerModule, name) for name in names)

    def _base_program(self) -> Program:
        has_own = self._overrides("create_functions", "create_training_function", "create_evaluation_function")
        return self._builder.base(getattr(self, self._model.loss_name), self.exmp_input, has_custom_steps=has_own)

    def _transformed_example(self) -> Batch:
        return self.transform_batch(self._key, self.exmp_input, False)

    def _use_transforms(self, sets: Sets, train_loader: Any = None) -> None:
        """Uses the transforms of the data, unless the trainer has a dataset."""
        if self.dataset is None and self._transforms.update(sets, train_loader):
            self._program = None
