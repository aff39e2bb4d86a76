"""`TrainLoop`: an iterator over training that yields checkpoints."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.core.scope import CollectionFilter, DenyList, in_filter
from jax.sharding import Mesh

from jax_trainer.adapters.mode import mode_flags
from jax_trainer.callbacks import with_needs_of
from jax_trainer.core import (
    Batch,
    Layout,
    Metrics,
    Program,
    ProgramOptions,
    PyTree,
    TrainState,
    check_call,
    checked_int,
    checked_loss,
    class_of,
    compile_program,
    kinds_of,
    make_program,
    readable_bytes,
    resolve_layout,
    streams,
)
from jax_trainer.core.loss_shape import check_loss, check_pairing
from jax_trainer.core.output import OUT
from jax_trainer.datasets import Data, Position, common_transforms, transforms_of, with_transforms
from jax_trainer.datasets.data_source import peeked
from jax_trainer.engine import LoopState
from jax_trainer.optimizer import checked_optimizer
from jax_trainer.styles.looping.calls import Collections, ModelCall, split
from jax_trainer.styles.looping.checkpoint_files import CheckpointFileReader
from jax_trainer.styles.looping.checkpoints import Checkpoint, number_of_weights, state_of
from jax_trainer.styles.looping.steps import Steps
from jax_trainer.suggestions import checks_keywords

SOWN = "intermediates"  # the Flax collection of sown values
ALL_BUT_SOWN = DenyList(SOWN)


@checks_keywords
@dataclass(frozen=True, eq=False)
class TrainTask:
    """The model, optimizer, loss and data of a training.

    Args:
        apply: the `apply` of a linen module, or a function `(variables, *inputs)`.
        optimizer: an optax optimizer.
        loss: a function `(*outputs, *targets)` that returns a scalar.
        data: yields pairs of inputs and targets, `(x, y)`, each an array or a tuple of arrays: `((x1, x2), ())`. An
            iterator, a list, a loader, or a function that returns an iterator; all but the first start over at the end.
    """

    apply: Callable[..., Any] = field(repr=False)
    optimizer: optax.GradientTransformation = field(repr=False)
    loss: Callable[..., Any]
    data: Any = field(repr=False)

    def __post_init__(self) -> None:
        checked_optimizer(self.optimizer)
        _check_function("TrainTask.apply", self.apply, "apply")
        _check_function("TrainTask.loss", self.loss)


@checks_keywords
class TrainLoop:
    """An iterator over training: yields checkpoints, and continues where it stopped.

    Args:
        init: the `init` of a linen module, or a function `(rngs, *inputs)` that returns variables; or, to resume, a
            reader of checkpoint files or a `Checkpoint`.
        task: what to train.
        rnkey: root random key; default: `jax.random.key(0)`. A resumed loop uses the key of its checkpoint.
        input_sample: inputs to initialise the model with; default: the first batch.
        n_steps_per_checkpoint: yield a checkpoint at every multiple of this step, and at the last step.
        n_steps: total number of steps, after which iteration ends.
        collections: names of the model's random streams, as in `{"init": ["params"], "apply": ["dropout"]}`.
        mutable_collections: the variable collections that training updates; all others are constant.
        devices: shard batches evenly over these devices; default: one device.
        stdout: print the initialisation time and the size of the model.
        options: precision, gradient accumulation, clipping, EMA (in `extra` of a checkpoint), statistics, and what a
            non-finite step does; see `ProgramOptions`.
    """

    def __init__(
        self,
        init: Callable[..., Any] | CheckpointFileReader | Checkpoint,
        task: TrainTask,
        rnkey: jax.Array | None = None,
        input_sample: Any = None,
        n_steps_per_checkpoint: int = 1,
        n_steps: int = 0,
        collections: Mapping[str, Sequence[str]] | None = None,
        mutable_collections: CollectionFilter = ALL_BUT_SOWN,
        devices: Sequence[Any] | None = None,
        stdout: bool = True,
        options: ProgramOptions | None = None,
    ) -> None:
        began = time.perf_counter()
        if not isinstance(task, TrainTask):
            raise TypeError(f"`task` must be a TrainTask, got a {type(task).__name__}.")
        if not isinstance(init, CheckpointFileReader | Checkpoint):
            _check_function("init", init, "init")
        if rnkey is not None and not hasattr(rnkey, "dtype"):
            raise TypeError(f"`rnkey` must be a key, such as `jax.random.key(0)`, got {rnkey!r}.")
        self.n_steps_per_checkpoint, self.n_steps = n_steps_per_checkpoint, n_steps
        self._stdout, self._has_printed_size = stdout, False
        data = Data.of(task.data)
        options = ProgramOptions.of(options, detect_nans=False, mesh=_layout(devices), policies=("raise", "skip"))
        program = _program(init, task, Collections.of(collections), mutable_collections, options)
        program = with_transforms(program, common_transforms(transforms_of(data.train), data.evals))
        program = options.wrap(with_needs_of((), program, log_rate=options.log_learning_rate))
        layout = resolve_layout(options.mesh)
        compiled = compile_program(program, layout=layout, donate=False, keep_grads=True)
        key = jax.random.key(0) if rnkey is None else rnkey
        if input_sample is None:
            example, source = peeked(data.train)
            data = replace(data, train=source)
            compiled.shapes(key, example)  # traces: finds mistakes in model, loss and batch before anything is computed
        else:
            example = (input_sample, ())
        restored = self._restored(init, lambda: jax.eval_shape(program.init, key, example), layout)
        self._steps = Steps(compiled, data, restored or (compiled.init(key, example), Position()))
        self._print(f"Total model initialization time is {time.perf_counter() - began:.2f} seconds.")

    @property
    def step(self) -> int:
        """Total number of completed steps."""
        return self._steps.step

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The latest checkpoint; None before the first step."""
        return self._steps.checkpoint

    @property
    def n_steps(self) -> int:
        """The step at which iteration ends."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        self._n_steps = checked_int("n_steps", value, 0)

    @property
    def n_steps_per_checkpoint(self) -> int:
        """The loop yields a checkpoint at every multiple of this step."""
        return self._n_steps_per_checkpoint

    @n_steps_per_checkpoint.setter
    def n_steps_per_checkpoint(self, value: int) -> None:
        self._n_steps_per_checkpoint = checked_int("n_steps_per_checkpoint", value, 1)

    def __iter__(self) -> Iterator[Checkpoint]:
        self._report_if_done(self.n_steps)
        return self

    def __next__(self) -> Checkpoint:
        checkpoint = self._up_to(self.n_steps)
        if checkpoint is None:
            raise StopIteration
        return checkpoint

    def __call__(self, n_steps: int) -> Iterator[Checkpoint]:
        """Yields the checkpoints up to step `n_steps`, regardless of the loop's own `n_steps`."""
        return self.run(n_steps)

    def run(self, n_steps: int) -> Iterator[Checkpoint]:
        """Yields the checkpoints up to step `n_steps`; the same as calling the loop."""
        self._report_if_done(checked_int("n_steps", n_steps, 0))
        return iter(partial(self._up_to, n_steps), None)

    def next_step(self) -> Checkpoint:
        """Trains one step, also beyond `n_steps`."""
        return self._to(self.step + 1, yields_partial=False)

    def next_checkpoint(self) -> Checkpoint:
        """Trains up to the next checkpoint, also beyond `n_steps`."""
        return self._to(self._next(self.n_steps), yields_partial=False)

    def close(self) -> None:
        """Ends the loop and its data threads. Its checkpoints stay valid."""
        self._steps.close()

    def _up_to(self, n_steps: int) -> Checkpoint | None:
        """The next checkpoint; None beyond `n_steps`."""
        self._steps.raise_pending()
        return self._to(self._next(n_steps), yields_partial=True) if self.step < n_steps else None

    def _to(self, step: int, *, yields_partial: bool) -> Checkpoint:
        if not self._has_printed_size:
            number, size = number_of_weights(self._steps.params)
            self._print(f"Total number of trainable weights: {number} ~ {readable_bytes(size)}.")
            self._has_printed_size = True
        return self._steps.to(step, yields_partial=yields_partial)

    def _next(self, n_steps: int) -> int:
        """The step of the next checkpoint."""
        every = self.n_steps_per_checkpoint
        regular = (self.step // every + 1) * every
        return min(regular, n_steps) if self.step < n_steps else regular

    def _restored(
        self, init: Any, outline: Callable[[], TrainState], layout: Layout | None
    ) -> tuple[TrainState, Position | LoopState] | None:
        """The state to resume from, and its position in the data; None for a new training."""
        if isinstance(init, Checkpoint):
            state = state_of(init)
            _check_fits(state, outline())
            placed = state if layout is None else jax.device_put(state, layout.state_shardings(state))
            return placed, init.loop_state or Position()
        if not isinstance(init, CheckpointFileReader):
            return None
        began = time.perf_counter()
        found = init.read(_placed(outline(), layout))
        if found is not None:
            self._print(f"A checkpoint was loaded in {time.perf_counter() - began:.2f} seconds.")
        return found

    def _report_if_done(self, n_steps: int) -> None:
        if self.step >= n_steps:
            self._print(f"The loop is at step {self.step}, and `n_steps` is {n_steps}: nothing left to train.")

    def _print(self, text: str) -> None:
        if self._stdout:
            OUT.write(f"{text}\n")


def _program(
    init: Callable[..., Any] | CheckpointFileReader | Checkpoint,
    task: TrainTask,
    collections: Collections,
    mutable: CollectionFilter,
    options: ProgramOptions,
) -> Program:
    target = init.target if isinstance(init, CheckpointFileReader) else init
    call = ModelCall(task.apply, collections.apply)

    def variables(key: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        if isinstance(target, Checkpoint):
            return target.model_params, target.model_state
        flags = mode_flags(target, train=False, only_required=True)
        made = dict(target(streams(key, *collections.init), *split(batch)[0], **flags))
        made.pop(SOWN, None)  # sown during initialisation, not needed later
        return made.pop("params", {}), made

    def loss_fn(params: PyTree, model_state: PyTree, batch: Batch, rng: jax.Array, *, train: bool) -> Any:
        inputs, targets = split(batch)
        outputs, changed = call(params, model_state, inputs, rng, train=True)
        check_call(task.loss, "TrainTask.loss", *("outputs" for _ in outputs), *("targets" for _ in targets))
        loss = task.loss(*outputs, *targets)
        if isinstance(loss, tuple | dict):
            raise TypeError(
                f"`TrainTask.loss` must return a scalar, got {kinds_of(loss)}. Compute other metrics in an `EvalTask`."
            )
        loss = checked_loss(loss, "TrainTask.loss")
        check_loss(loss, {"predictions": outputs, "targets": targets})
        check_pairing(lambda a, b: task.loss(*a, *b), outputs, targets)
        kept = {name: changed[name] if in_filter(mutable, name) else old for name, old in model_state.items()}
        return loss, (kept, {})

    def no_eval_step(state: TrainState, batch: Batch) -> Metrics:
        return Metrics({}, 0)

    program = make_program(variables, loss_fn, task.optimizer, **options.step_options())
    return program._replace(eval_step=no_eval_step)


def _check_fits(state: TrainState, outline: TrainState) -> None:
    for name in ("opt_state", "extra"):  # the variables of the model come from the checkpoint
        found, wanted = getattr(state, name), getattr(outline, name)
        if jax.tree.structure(found) != jax.tree.structure(wanted):
            raise ValueError(
                f"The checkpoint of step {int(state.step)} does not match this loop: its `{name}` has the structure "
                f"{jax.tree.structure(found)}, expected {jax.tree.structure(wanted)}. Use the optimizer of the "
                "checkpoint."
            )


def _placed(outline: TrainState, layout: Layout | None) -> TrainState:
    """`outline` with the shardings of `layout`."""
    if layout is None:
        return outline
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        outline,
        layout.state_shardings(outline),
    )


def _layout(devices: Sequence[Any] | None) -> Layout | None:
    if devices is not None and (not isinstance(devices, Sequence) or not devices):
        raise TypeError(f"`devices` must be a list of devices, such as `jax.devices()[:2]`, got {devices!r}.")
    return None if devices is None else Layout(mesh=Mesh(np.array(devices), ("data",)))


def _check_function(name: str, function: Any, of_module: str = "") -> None:
    if of_module and isinstance(function, nn.Module):
        raise TypeError(f"`{name}` is the module {type(function).__name__}. Pass its method: `model.{of_module}`.")
    if isinstance(function, nnx.Module) or (isinstance(function, type) and issubclass(function, nnx.Module)):
        raise TypeError(
            f"`{name}` is an nnx module, but `TrainLoop` trains linen modules and functions. Train an nnx module with "
            "`train_fn` or `fit`."
        )
    if not callable(function):
        raise TypeError(
            f"`{name}` must be a function, such as `model.{of_module or 'apply'}`, got a {class_of(function)}."
        )
