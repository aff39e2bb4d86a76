"""The model, optimizer, state and compiled program of a trainer; prediction and evaluation."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from compoconf import ConfigInterface
from flax import nnx

from jax_trainer.adapters import handle_of
from jax_trainer.adapters.calls import arguments
from jax_trainer.adapters.handle import ModelHooks
from jax_trainer.callbacks import Callback, merged_names, with_needs_of
from jax_trainer.callbacks.callback import state_in_use
from jax_trainer.callbacks.summary import parameter_table
from jax_trainer.core import (
    Batch,
    CompiledProgram,
    FlatState,
    MeshLike,
    Program,
    TrainState,
    compile_program,
    explaining,
    kinds_of,
    stream,
)
from jax_trainer.core.extra_args import by_signature, clipped
from jax_trainer.core.layout_table import LayoutTable, layout_table
from jax_trainer.core.output import safe_console
from jax_trainer.datasets import DatasetModule, DeviceTransforms, common_transforms, transforms_of, with_transforms
from jax_trainer.datasets.transforms import describe_transforms
from jax_trainer.engine import evaluate, predictions
from jax_trainer.interfaces import ModelMode
from jax_trainer.runs import KeptBest, Run, Weights, select_weights
from jax_trainer.settings import SettingsError
from jax_trainer.trainer.arguments import optimizer_of
from jax_trainer.trainer.base import TrainerBase
from jax_trainer.trainer.bound import BoundModel, batch_around
from jax_trainer.trainer.custom_steps import accepting_step_states, as_step_state, with_custom_steps
from jax_trainer.trainer.layout import layout_for


class ModelMethods(TrainerBase):
    """Builds the model and the compiled program, holds the state, and evaluates it. See `TrainerModule`."""

    def __init__(
        self,
        config: Any,
        model: Any,
        optimizer: Any,
        exmp_input: Batch,
        mesh: MeshLike | None,
        dataset: DatasetModule | None,
    ) -> None:
        self.config, self.dataset, self.exmp_input = config, dataset, exmp_input
        hooks = ModelHooks(
            to_input=self.batch_to_input,
            key=lambda: self._key,
            example=self._transformed_example,
            inputs=lambda: self.batch_to_input(self.exmp_input),
            build=self.build_model,
            init=self.run_model_init,
            rngs=self.get_model_rng,
        )
        self._model, self._optimizer = handle_of(model, hooks), optimizer_of(optimizer)
        self.model_config, self.optimizer_config = (_config(argument) for argument in (model, optimizer))
        self.model_mode: ModelMode = self._checked_mode()
        self._layout = layout_for(config, mesh)
        self._base: Program | None = None  # without what the configuration adds
        self.tx: optax.GradientTransformation = optax.identity()
        self._program: CompiledProgram | None = None
        self._flat_state: FlatState | None = None
        self._kept_best: KeptBest | None = None  # of the last run
        self._run: Run | None = None  # the current one
        self._callback_objects: dict[str, Callback] = {}
        self._carried: DeviceTransforms | None = None  # transforms of the data; None: no data yet
        self._just_evaluated: dict[str, dict[str, Any]] = {}  # by the current run, which must not evaluate twice

    # the model and its initial weights

    def build_model(self, inputs: Any, rngs: nnx.Rngs) -> Any:
        """Builds the model for such inputs. Only an nnx module and a callable pytree have weights already."""
        return self._model.build(inputs, rngs)

    def run_model_init(self, exmp_input: Batch, init_rng: jax.Array) -> Any:
        """Initialises the weights: returns the variables of a linen module, an nnx module with its weights, or the
        parameters of functions.
        """
        return self._model.init(exmp_input, init_rng)

    def init_model(self, exmp_input: Batch) -> TrainState:
        """The initial state: weights from `seed`, and a new optimizer state."""
        return self.program.init(self._key, exmp_input)

    def pre_model_init_callback(self) -> None:
        """Called before `init_model`."""

    def post_model_init_callback(self) -> None:
        """Called after `init_model`, when the state is available."""

    @property
    def state(self) -> TrainState:
        """The training state with the last weights. Before training, it is initialised from `seed` and the example."""
        if self._run is not None and self._run.flat_state is not None:
            return self._run.state
        if self._flat_state is None:
            self.pre_model_init_callback()
            self.state = self.init_model(self.exmp_input)
            self.post_model_init_callback()
            assert self._flat_state is not None
        return self._flat_state.state

    @state.setter
    def state(self, state: TrainState) -> None:
        if self._run is not None and self._run.is_training:
            raise state_in_use()
        if self._run is not None and self._run.flat_state is not None:
            self._run.state = state  # the first step will use it
        self._flat_state, self._kept_best = FlatState.of(state), None

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.config.seed)

    @property
    def model(self) -> Any:
        """The model: a linen module without weights, any other model with those of `state`."""
        return self._model.module_at(lambda: self.state)

    def bind_model(
        self, state: TrainState | None = None, *, which: Weights | None = None, transforms: bool = True
    ) -> Any:
        """A callable model with a copy of the weights, in evaluation mode.

        It takes inputs as the dataset yields them: with device transforms, such as normalisation, it returns a
        `BoundModel`, which applies them first. Otherwise it returns the module itself.

        Args:
            state: use the weights of this state, such as `self.state` in a callback.
            which: "best" or "last"; None: the best validated weights of the last run, or the current ones without any.
            transforms: False: return the module itself, for transformed inputs.
        """
        module = self._model.bind(self._weights(which, state))
        if not (transforms and _Transforms(self)):
            return module
        transformed = partial(self._transformed_inputs, stream(self._key, "eval transforms"))
        return BoundModel(module, transformed)

    def _weights(self, which: Weights | None, state: TrainState | None = None) -> TrainState:
        if state is None:
            return select_weights(which, self.state, self._kept_best)
        if which is not None:
            raise TypeError("Pass either `state` or `which`, not both.")
        return state

    def _transformed_inputs(self, key: jax.Array, *inputs: Any) -> tuple[Any, ...]:
        """The model inputs after the transforms of an evaluation."""
        batch = batch_around(inputs, self.exmp_input, self.batch_to_input)
        return arguments(self.batch_to_input(self.transform_batch(key, batch, False)))

    def _transformed_example(self) -> Batch:
        return self.transform_batch(self._key, self.exmp_input, False)

    def _checked_mode(self) -> ModelMode:
        mode = self._model.mode
        if self._model.tx is not None:
            raise TypeError(
                f"The model is a {type(self._model.model).__name__}, which has its own optimizer. Pass its module, or "
                "train the state with `fit`."
            )
        if self.config.model_mode not in (None, mode):
            text = f"`model_mode` is {self.config.model_mode}, but {self._model.name} is a {mode} model."
            raise SettingsError([("trainer.model_mode", f"{text} Leave it out: it is inferred from the model.")])
        return mode

    # the compiled program

    @property
    def program(self) -> CompiledProgram:
        """The compiled program. Before training it can only evaluate: the optimizer depends on the run's length."""
        if self._program is None:
            self._program = self.create_jitted_functions()
        return self._program

    def transform_batch(self, key: jax.Array, batch: Batch, train: bool) -> Batch:
        """Transforms a batch on the device before the model sees it; default: `device_transforms`."""
        return self.device_transforms.apply(key, batch, train=train)

    @property
    def device_transforms(self) -> DeviceTransforms:
        """The transforms of the dataset; without one, those of the training data."""
        return (self._carried or DeviceTransforms()) if self.dataset is None else self.dataset.transforms

    @property
    def has_transforms(self) -> bool:
        """Whether batches are transformed on the device."""
        return bool(_Transforms(self))

    @property
    def describe_transforms(self) -> str:
        """Description of `device_transforms`; "" without any."""
        words = describe_transforms(self.device_transforms) if self.device_transforms else ""
        return re.sub(r" at 0x[0-9a-f]+", "", words)  # addresses differ between processes

    def _use_transforms(self, transforms: DeviceTransforms | None, evals: Mapping[str, Any]) -> None:
        """Uses the transforms of the data, which all of `evals` must share, unless the trainer has a dataset."""
        if self.dataset is None and transforms is not None:
            before, self._carried = self.device_transforms, common_transforms(transforms, evals)
            if self._carried != before:
                self._program = None

    def _use_eval_transforms(self, sets: Mapping[str, Any]) -> None:
        """Uses the transforms of the first set that has any, if none are known yet."""
        carried = (self._carried, *map(transforms_of, sets.values()))
        self._use_transforms(next((found for found in carried if found is not None), None), sets)

    def create_training_function(self) -> Callable[[Any, Batch], Any]:
        """The uncompiled training step, `(state, batch) -> (state, metrics)`.

        An override can use `state.apply_gradients`.
        """
        return self._program_without_options().train_step

    def create_evaluation_function(self) -> Callable[[Any, Batch], Any]:
        """The uncompiled evaluation step, `(state, batch) -> metrics`."""
        return self._program_without_options().eval_step

    def create_functions(self) -> tuple[Callable[[Any, Batch], Any], Callable[[Any, Batch], Any]]:
        """The uncompiled training and evaluation steps."""
        return self.create_training_function(), self.create_evaluation_function()

    def create_jitted_functions(self) -> CompiledProgram:
        """The program of both steps with all options of the configuration; compiled at its first call."""
        config = self.config
        return compile_program(
            self._program_with_options(), layout=self._layout, debug=config.debug, eval_seed=config.seed_eval
        )

    def _program_with_options(self) -> Program:
        config, base = self.config, self._program_without_options()
        functions = self.create_functions()
        if not isinstance(functions, tuple) or len(functions) != 2:
            raise TypeError(
                f"`create_functions` must return the training and the evaluation step, got {kinds_of(functions)}."
            )
        program = with_custom_steps(base, *functions, self._to_step_state, micro_batches=config.accumulate)
        program = with_needs_of((*config.callbacks.values(), *self._callback_objects.values()), program)
        program = with_transforms(program, _Transforms(self))
        return config.program_options.wrap(program)

    def _program_without_options(self) -> Program:
        if self._base is None:
            config = self.config
            options = config.program_options.step_options()
            options["intermediates"] = config.interm_log_modes if config.log_intermediates else ()
            options["clip_norm"] = None  # in `tx`, which a custom step uses, too
            with explaining(self.exmp_input):
                program = self._model.program(getattr(self, self._model.loss_name), self.tx, **options)
            self._to_step_state = as_step_state(self._model, self.tx)
            self._base = accepting_step_states(program, self._to_step_state)
        return self._base

    def _use_optimizer(self, tx: optax.GradientTransformation) -> CompiledProgram:
        norm = self.config.clip_norm
        self.tx, self._base = tx if norm is None else clipped(by_signature(tx), norm), None
        return self.create_jitted_functions()

    def set_dataset(self, dataset: DatasetModule | None) -> None:
        """Replaces the dataset: the steps use its transforms, and callbacks see it from the next run on."""
        self.dataset, self._program = dataset, None

    # evaluation and prediction

    def eval_model(
        self, data_loader: Any, mode: str = "val", epoch_idx: int = 0, *, which: Weights | None = None
    ) -> dict[str, Any]:
        """The metrics on one evaluation set.

        An override is called after every evaluation of a run, and the metrics that it adds are logged.

        Args:
            data_loader: the data to evaluate on.
            mode: name of the set, the prefix of its metrics.
            epoch_idx: the epoch of the evaluation, for overrides.
            which: "best" or "last" weights, as for `bind_model`.
        """
        if mode in self._just_evaluated:
            return dict(self._just_evaluated[mode])
        return self._metrics_on({mode: data_loader}, self.config.limit_val_batches, which)

    @contextmanager
    def with_known_metrics(self, metrics: Mapping[str, dict[str, Any]]) -> Iterator[None]:
        """Context in which `eval_model` returns these metrics of already evaluated sets."""
        self._just_evaluated = dict(metrics)
        try:
            yield
        finally:
            self._just_evaluated = {}

    def test_eval_function(self, val_loader: Any) -> dict[str, Any]:
        """Evaluates one batch, to test the evaluation."""
        return self._metrics_on({"val": val_loader}, 1)

    def predict(self, data_loader: Any, max_batches: int | None = None, *, which: Weights | None = None) -> Any:
        """The concatenated model outputs of all batches, as numpy arrays; pass a single batch as `[batch]`.

        Args:
            data_loader: yields untransformed batches, as the dataset does.
            max_batches: maximum number of batches.
            which: "best" or "last"; None: the best validated weights of the last run, or the current ones without any.
        """
        self._use_eval_transforms({"predict": data_loader})
        state = self._weights(which)  # first: an nnx model is built while it is made
        outputs = list(predictions(self.program, state, data_loader, max_batches=max_batches))
        return jax.tree.map(lambda *parts: np.concatenate([np.atleast_1d(part) for part in parts]), *outputs)

    def tabulate(self, exmp_input: Batch | None = None) -> str:
        """A table of the model's modules: inputs, outputs, parameters."""
        batch = self._transformed_example() if exmp_input is None else exmp_input
        return self._model.tabulate(self.model, arguments(self.batch_to_input(batch)))

    def tabulate_params(self) -> str:
        """A table of the parameters: path, shape, dtype, number of elements."""
        return parameter_table(self.state.params)

    def layout_table(self) -> LayoutTable | None:
        """The sharding of the state over the devices; None: one device."""
        layout = self.program.layout
        return None if layout is None else layout_table(layout, self.state)

    def print_tabulate(self, exmp_input: Batch | None = None) -> None:
        """Prints `tabulate`."""
        self._show(self.tabulate(exmp_input))

    def _metrics_on(
        self, sets: Mapping[str, Any], max_batches: int | None = None, which: Weights | None = None
    ) -> dict[str, Any]:
        if not sets:
            raise ValueError("No data to evaluate on: the loader is None or empty. Pass at least one set.")
        self._use_eval_transforms(sets)
        state = self._weights(which)  # first: an nnx model is built while it is made
        return merged_names(evaluate(self.program, state, sets, max_batches=max_batches))

    def _show(self, text: str) -> None:
        safe_console(stderr=False).print(text, markup=False, highlight=False, soft_wrap=True)


class _Transforms:
    """The `transform_batch` of a trainer, in the form that steps take."""

    def __init__(self, trainer: ModelMethods) -> None:
        self._trainer = trainer

    def __bool__(self) -> bool:
        is_overridden = type(self._trainer).transform_batch is not ModelMethods.transform_batch
        return is_overridden or bool(self._trainer.device_transforms)

    def apply(self, key: jax.Array, batch: Batch, *, train: bool) -> Batch:
        return self._trainer.transform_batch(key, batch, train)


def _config(argument: Any) -> Any:
    return argument if isinstance(argument, ConfigInterface) else None
