"""The model, the optimizer and the state of a trainer, and all that can be done with them without a run."""

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

from jax_trainer.adapters import linen_program, nnx_program
from jax_trainer.adapters.bridged import with_variables
from jax_trainer.adapters.mode import mode_flags
from jax_trainer.adapters.nnx import Split
from jax_trainer.callbacks import Callback, LearningRateMonitorConfig, merged_names
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
    copied,
    explaining,
    kinds_of,
    stream,
    with_ema,
    with_finite_check,
    with_finite_guard,
    with_statistics,
)
from jax_trainer.core.layout_table import LayoutTable, layout_table
from jax_trainer.core.output import safe_console
from jax_trainer.datasets import DatasetModule, DeviceTransforms, common_transforms, transforms_of, with_transforms
from jax_trainer.datasets.transforms import describe_transforms
from jax_trainer.engine import evaluate, predictions
from jax_trainer.interfaces import ModelMode
from jax_trainer.optimizer.reported import with_learning_rate
from jax_trainer.runs import KeptBest, Weights, select_weights
from jax_trainer.settings import SettingsError
from jax_trainer.trainer.arguments import ModelArgument, Module, optimizer_of
from jax_trainer.trainer.base import TrainerBase
from jax_trainer.trainer.bound import BoundModel, batch_around
from jax_trainer.trainer.custom_steps import accepting_step_states, as_step_state, with_own_steps
from jax_trainer.trainer.layout import layout_for


class ModelMethods(TrainerBase):
    """Builds the model and what gets compiled, holds the state, and judges it. See `TrainerModule`."""

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
        self._model, self._optimizer = ModelArgument(model), optimizer_of(optimizer)
        self.model_config, self.optimizer_config = (_config(given) for given in (model, optimizer))
        self.model_mode: ModelMode = self._agreed_mode()
        self._layout = layout_for(config, mesh)
        self._module: Any = None  # of a linen model
        self._split: Split | None = None  # of an nnx model
        self._base: Program | None = None  # without what the configuration adds
        self.tx: optax.GradientTransformation = optax.identity()
        self._program: CompiledProgram | None = None
        self._held: FlatState | None = None
        self._kept_best: KeptBest | None = None  # of the run that has just ended
        self._state_is_in_use = False
        self._callback_objects: dict[str, Callback] = {}
        self._carried: DeviceTransforms | None = None  # by the data; None: none was seen yet
        self._just_evaluated: dict[str, dict[str, Any]] = {}  # by the run that asks for more: not to be judged again

    # the model and its first weights

    def build_model(self, inputs: Any, rngs: nnx.Rngs) -> Module:
        """The module, for such inputs. One of linen draws no weights here."""
        return self._model.build(inputs, rngs)

    def run_model_init(self, exmp_input: Batch, init_rng: jax.Array) -> Any:
        """The first weights: of linen, the variables; of nnx, the module with them."""
        inputs = self.batch_to_input(exmp_input)
        if self.model_mode == "nnx":
            return with_variables(self.build_model(inputs, nnx.Rngs(init_rng)), inputs, stream(init_rng, "bridged"))
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        init = self._linen_module(inputs).init
        return init(self.get_model_rng(init_rng), *inputs, **mode_flags(init, train=False, only_required=True))

    def init_model(self, exmp_input: Batch) -> TrainState:
        """The state before training: weights from `seed`, and an optimizer that has seen nothing."""
        return self.program.init(self._key, exmp_input)

    def pre_model_init_callback(self) -> None:
        """Called before `init_model`."""

    def post_model_init_callback(self) -> None:
        """Called after it, when there is a state."""

    @property
    def state(self) -> TrainState:
        """All that training changes, with the last weights. Before training it is made from `seed` and the example."""
        if self._held is None:
            self.pre_model_init_callback()
            self.state = self.init_model(self.exmp_input)
            self.post_model_init_callback()
            assert self._held is not None
        return self._held.state

    @state.setter
    def state(self, state: TrainState) -> None:
        if self._state_is_in_use:
            raise state_in_use()
        self.set_state(state)

    def set_state(self, state: TrainState) -> None:
        """Makes `state` the present one; a run does so itself."""
        self._held, self._kept_best = FlatState.of(state), None

    def use_best(self, kept: KeptBest | None) -> None:
        """After a run: these weights are used until others are set, where nobody asks for the last ones."""
        self._kept_best = kept

    @contextmanager
    def having_state_in_use(self) -> Iterator[None]:
        """Meanwhile a run trains the state: nobody else may assign it."""
        self._state_is_in_use = True
        try:
            yield
        finally:
            self._state_is_in_use = False

    @property
    def _key(self) -> jax.Array:
        return jax.random.key(self.config.seed)

    @property
    def model(self) -> Any:
        """The module itself: of linen without weights, of nnx with the last ones, those of `state`."""
        return self._linen_module(self._example_inputs()) if self.model_mode == "linen" else self._bound(self.state)

    def bind_model(
        self, state: TrainState | None = None, *, which: Weights | None = None, transforms: bool = True
    ) -> Any:
        """A model with weights, to call: in evaluation mode, and apart from what is trained.

        It takes inputs as the dataset gives them: where batches are transformed on the device, as by normalising, that
        is done first, and what is returned is a `BoundModel`. Otherwise it is the module itself.

        Args:
            state: another state, whose weights it has: in a callback, `self.state`.
            which: "best" or "last"; None: the best validated weights of the run that has just ended, if there are some,
                and the present ones otherwise.
            transforms: False: the module itself, for inputs that are transformed already.
        """
        module = self._bound(self._weights(which, state))
        if not (transforms and _Transforms(self)):
            return module
        seen = partial(self._transformed_inputs, stream(self._key, "eval transforms"))
        return BoundModel(module, seen)

    def _weights(self, which: Weights | None, state: TrainState | None = None) -> TrainState:
        if state is None:
            return select_weights(which, self.state, self._kept_best)
        if which is not None:
            raise TypeError("Pass `state`, whose weights are used, or `which`, not both.")
        return state

    def _transformed_inputs(self, key: jax.Array, *inputs: Any) -> tuple[Any, ...]:
        """Inputs of the model, given as the dataset does, as an evaluation would see them."""
        batch = batch_around(inputs, self.exmp_input, self.batch_to_input)
        seen = self.batch_to_input(self.transform_batch(key, batch, False))
        return seen if isinstance(seen, tuple) else (seen,)

    def _bound(self, state: TrainState) -> Any:
        """The module itself with the weights of a state, in evaluation mode."""
        params, model_state = copied((state.extra.get("ema", state.params), state.model_state))  # what is judged
        if self.model_mode == "linen":
            return self.model.bind({"params": params, **model_state})
        return self._nnx_split().join(params, model_state, stream(state.key, "bound"), train=False)

    def _nnx_split(self) -> Split:
        if self._split is None:
            build = lambda: self.run_model_init(self._transformed_example(), stream(self._key, "init"))
            with nnx.use_eager_sharding(False):  # partitioned parameters would want a mesh
                self._split = Split(nnx.eval_shape(build), nnx.Param)
        return self._split

    def _linen_module(self, inputs: Any) -> Any:
        if self._module is None:
            self._module = self.build_model(inputs, nnx.Rngs(0))
        return self._module

    def _transformed_example(self) -> Batch:
        return self.transform_batch(self._key, self.exmp_input, False)

    def _example_inputs(self) -> Any:
        return self.batch_to_input(self._transformed_example())

    def _agreed_mode(self) -> ModelMode:
        mode = self._model.mode
        if self.config.model_mode not in (None, mode):
            text = f"`model_mode` is {self.config.model_mode}, and {self._model.name} is a model of {mode}."
            raise SettingsError([("trainer.model_mode", f"{text} Leave it out: the model says so itself.")])
        return mode

    # what gets compiled

    @property
    def program(self) -> CompiledProgram:
        """What gets compiled. Before training it can evaluate only: the optimizer is made with the run's length."""
        if self._program is None:
            self._program = self.create_jitted_functions()
        return self._program

    def transform_batch(self, key: jax.Array, batch: Batch, train: bool) -> Batch:
        """What happens to a batch on the device, before the model sees it: what `device_transforms` say."""
        return self.device_transforms.apply(key, batch, train=train)

    @property
    def device_transforms(self) -> DeviceTransforms:
        """The transforms of the dataset; without one, those that the training data carries."""
        return (self._carried or DeviceTransforms()) if self.dataset is None else self.dataset.transforms

    @property
    def sees_transformed(self) -> bool:
        """Whether something happens to batches on the device."""
        return bool(_Transforms(self))

    @property
    def describe_transforms(self) -> str:
        """What `device_transforms` do; "" where there are none."""
        words = describe_transforms(self.device_transforms) if self.device_transforms else ""
        return re.sub(r" at 0x[0-9a-f]+", "", words)  # where functions lie in memory differs between processes

    def _see_through(self, transforms: DeviceTransforms | None, evals: Mapping[str, Any]) -> None:
        """Takes over the transforms of the data, which all of `evals` must share, unless a dataset has the word."""
        if self.dataset is None and transforms is not None:
            before, self._carried = self.device_transforms, common_transforms(transforms, evals)
            if self._carried != before:
                self._program = None

    def _see_evals(self, sets: Mapping[str, Any]) -> None:
        """The same before an evaluation: the first set that carries transforms decides, where none were seen yet."""
        carried = (self._carried, *map(transforms_of, sets.values()))
        self._see_through(next((found for found in carried if found is not None), None), sets)

    def create_training_function(self) -> Callable[[Any, Batch], Any]:
        """The step, uncompiled: `(state, batch) -> (state, metrics)`; one of your own has `state.apply_gradients`."""
        return self._program_without_options().train_step

    def create_evaluation_function(self) -> Callable[[Any, Batch], Any]:
        """Judging one batch, uncompiled: `(state, batch) -> metrics`."""
        return self._program_without_options().eval_step

    def create_functions(self) -> tuple[Callable[[Any, Batch], Any], Callable[[Any, Batch], Any]]:
        """Both of them."""
        return self.create_training_function(), self.create_evaluation_function()

    def create_jitted_functions(self) -> CompiledProgram:
        """Both of them with everything that the configuration adds, ready to run; compiled when they first do."""
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
        program = with_own_steps(base, *functions, self._dressed, micro_batches=config.accumulate)
        if self._monitors_rate:
            program = with_learning_rate(program, log_freq="step")  # per epoch the callback logs it
        program = with_transforms(program, _Transforms(self))
        if config.ema is not None:
            program = with_ema(program, config.ema)
        if config.log_param_stats or config.log_grad_stats:
            params = config.param_log_modes if config.log_param_stats else ()
            grads = config.grad_log_modes if config.log_grad_stats else ()
            program = with_statistics(program, params=params, grads=grads)
        if config.guards is not None:
            limit = config.max_skipped if config.guards == "skip" else 0
            return with_finite_guard(program, max_consecutive=limit, watched=config.watched)
        return program if config.on_nonfinite == "ignore" else with_finite_check(program)

    @property
    def _monitors_rate(self) -> bool:
        given = (*self.config.callbacks.values(), *(one.config for one in self._callback_objects.values()))
        return any(isinstance(one, LearningRateMonitorConfig) and one.every_n_epochs for one in given)

    def _program_without_options(self) -> Program:
        if self._base is None:
            program = self._model_program(self.tx)
            model = self._nnx_split if self.model_mode == "nnx" else self._module.apply
            self._dressed = as_step_state(model, self.tx, is_nnx=self.model_mode == "nnx")
            self._base = accepting_step_states(program, self._dressed)
        return self._base

    def _model_program(self, tx: optax.GradientTransformation) -> Program:
        config = self.config
        options: dict[str, Any] = {
            "micro_batches": config.accumulate,
            "precision": config.precision,
            "log_norms": config.log_grad_norm,
            "intermediates": config.interm_log_modes if config.log_intermediates else (),
            "init_is_traced": not self._model.has_weights,
            "to_input": self.batch_to_input,
        }
        if self.model_mode == "nnx":
            make = lambda key, example: self.run_model_init(example, key)
            if self._model.lacks_variables:  # which it gets in place, so before anything is traced
                make(stream(self._key, "init"), self._transformed_example())
            return nnx_program(make, self.loss_function, tx, **options)
        with explaining(self.exmp_input):
            module = self._linen_module(self.batch_to_input(self.exmp_input))
        first = lambda key, example: self.run_model_init(example, key)
        return linen_program(module, self.loss_function_linen, tx, init_variables=first, **options)

    def _use_optimizer(self, tx: optax.GradientTransformation) -> CompiledProgram:
        self.tx, self._base = tx, None
        return self.create_jitted_functions()

    def set_dataset(self, dataset: DatasetModule | None) -> None:
        """Takes the transforms of another dataset into the steps, and tells callbacks of it from the next run on."""
        self.dataset, self._program = dataset, None

    # what can be asked of the weights

    def eval_model(
        self, data_loader: Any, mode: str = "val", epoch_idx: int = 0, *, which: Weights | None = None
    ) -> dict[str, Any]:
        """The metrics on one set; `mode` is what it is called, and `which` are the weights, as for `bind_model`.

        One of your own is asked after every evaluation of a run, and what it adds is added there.
        """
        if mode in self._just_evaluated:
            return dict(self._just_evaluated[mode])
        return self._metrics_on({mode: data_loader}, self.config.limit_val_batches, which)

    @contextmanager
    def with_known_metrics(self, metrics: Mapping[str, dict[str, Any]]) -> Iterator[None]:
        """Meanwhile `eval_model` knows the metrics of these sets."""
        self._just_evaluated = dict(metrics)
        try:
            yield
        finally:
            self._just_evaluated = {}

    def test_eval_function(self, val_loader: Any) -> dict[str, Any]:
        """Judges one batch, to see whether evaluating works."""
        return self._metrics_on({"val": val_loader}, 1)

    def predict(self, data_loader: Any, max_batches: int | None = None, *, which: Weights | None = None) -> Any:
        """The outputs for all batches, one after the other, on the host; a single batch is given as `[batch]`.

        Args:
            data_loader: of batches as the dataset gives them.
            max_batches: at most so many of them.
            which: "best" or "last"; None: the best validated weights of the run that has just ended, if there are some,
                and the present ones otherwise.
        """
        self._see_evals({"predict": data_loader})
        state = self._weights(which)  # first: an nnx model is built while it is made
        outputs = list(predictions(self.program, state, data_loader, max_batches=max_batches))
        return jax.tree.map(lambda *parts: np.concatenate([np.atleast_1d(part) for part in parts]), *outputs)

    def tabulate(self, exmp_input: Batch | None = None) -> str:
        """A table of the model's modules: inputs, outputs, parameters."""
        batch = self._transformed_example() if exmp_input is None else exmp_input
        inputs = self.batch_to_input(batch)
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        wide = {"width": 140, "force_terminal": False, "force_jupyter": False}
        if self.model_mode == "nnx":
            return nnx.tabulate(self.model, *inputs, console_kwargs=wide)
        return self.model.tabulate(self.get_model_rng(self._key), *inputs, console_kwargs=wide)

    def tabulate_params(self) -> str:
        """A table of the parameters: path, shape, type, numbers."""
        return parameter_table(self.state.params)

    def layout_table(self) -> LayoutTable | None:
        """How the state is laid out over the devices; None: one has all of it."""
        layout = self.program.layout
        return None if layout is None else layout_table(layout, self.state)

    def print_tabulate(self, exmp_input: Batch | None = None) -> None:
        """Shows `tabulate`."""
        self._show(self.tabulate(exmp_input))

    def _metrics_on(
        self, sets: Mapping[str, Any], max_batches: int | None = None, which: Weights | None = None
    ) -> dict[str, Any]:
        if not sets:
            raise ValueError("There is no data to judge the weights on.")
        self._see_evals(sets)
        state = self._weights(which)  # first: an nnx model is built while it is made
        return merged_names(evaluate(self.program, state, sets, max_batches=max_batches))

    def _show(self, text: str) -> None:
        safe_console(stderr=False).print(text, markup=False, highlight=False, soft_wrap=True)


class _Transforms:
    """What `transform_batch` of a trainer does, as the steps take it."""

    def __init__(self, learner: ModelMethods) -> None:
        self._learner = learner

    def __bool__(self) -> bool:
        is_own = type(self._learner).transform_batch is not ModelMethods.transform_batch
        return is_own or bool(self._learner.device_transforms)

    def apply(self, key: jax.Array, batch: Batch, *, train: bool) -> Batch:
        return self._learner.transform_batch(key, batch, train)


def _config(given: Any) -> Any:
    return given if isinstance(given, ConfigInterface) else None
