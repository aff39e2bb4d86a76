"""`TrainLoop` and `EvalLoop`: an iterator over training that yields checkpoints, and what evaluates them."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import CollectionFilter, DenyList
from jax.sharding import Mesh

from jax_trainer.core import CompiledProgram, FlatState, TrainState, compile_program, merged, unadapted
from jax_trainer.core.random import key_data
from jax_trainer.core.state import AVERAGE
from jax_trainer.datasets import Data, DataSource, Position, common_transforms, transforms_of
from jax_trainer.datasets.data_source import peeked
from jax_trainer.diagnostics.output import OUT
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.engine import Edit, EvalEnd, Event, LoopState, Plan, eval_events
from jax_trainer.runs import CallbacksLike, Fingerprint, Recorded, assemble, named_callbacks, recorded_facts, resuming
from jax_trainer.runs.callback_list import attached_without_folder
from jax_trainer.runs.sections import layout_for
from jax_trainer.runs.vocabulary import WORDS, TrainOptions, options_of, takes_options
from jax_trainer.sharding import Layout
from jax_trainer.styles.checkpoints import Checkpoint, CheckpointFileReader, Summary, state_of, summarised
from jax_trainer.styles.loop_steps import Steps
from jax_trainer.styles.loop_tasks import (
    SOWN,
    Collections,
    EvalTask,
    TrainTask,
    check_function,
    eval_program,
    first_variables,
    train_program,
)

ALL_BUT_SOWN = DenyList(SOWN)


@takes_options
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
        devices: shard batches evenly over these devices, in place of the option `mesh`; default: one device.
        stdout: print the initialisation time and the size of the model.
        callbacks: callbacks that need neither a run folder nor validations nor the end of training, such as `Unfreeze`.
        allow_changes: parts in which this loop may differ from the one that it resumes: "program" (model, loss,
            options), "optimizer", "callbacks", "start" (initial weights, key), "data". Anything else that differs is an
            error.
        options: all other options of a training, such as `precision="bf16"`, `clip_norm=1.0`, `accumulate=4`, `ema` (in
            `extra` of a checkpoint), `on_nonfinite`, `mesh`: see `Options`.
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
        callbacks: CallbacksLike = (),
        allow_changes: Collection[str] = (),
        **options: Unpack[TrainOptions],
    ) -> None:
        began = time.perf_counter()
        if not isinstance(task, TrainTask):
            raise TypeError(f"`task` must be a TrainTask, got a {type(task).__name__}.")
        if not isinstance(init, CheckpointFileReader | Checkpoint):
            check_function("init", init, "init")
        if rnkey is not None and not hasattr(rnkey, "dtype"):
            raise TypeError(f"`rnkey` must be a key, such as `jax.random.key(0)`, got {rnkey!r}.")
        self.n_steps_per_checkpoint, self.n_steps = n_steps_per_checkpoint, n_steps
        self._stdout, self._has_printed_size = stdout, False
        data = Data.of(task.data)
        if devices is not None and "mesh" in options:
            raise TypeError("Pass either `mesh` or `devices`, which is short for a mesh of one axis, not both.")
        mesh: Any = {} if devices is None else {"mesh": _layout(devices)}
        opts = options_of("TrainLoop", {**options, **mesh}, n_steps=n_steps or None, stdout=stdout)
        names = Collections.of(collections)
        first = _first_variables(init, names.init)
        named, layout = named_callbacks(callbacks), layout_for(opts)
        key = jax.random.key(0) if rnkey is None else rnkey
        transforms = common_transforms(transforms_of(data.train), data.evals)
        batch, source = peeked(data.train)
        data, example = replace(data, train=source), batch if input_sample is None else (input_sample, ())

        def built(total_steps: int | None) -> CompiledProgram:
            """The program, traced: finds mistakes in model, loss and batch before anything is computed."""
            program = train_program(first, task, names.apply, mutable_collections, opts, total_steps)
            more: dict[str, Any] = {"transforms": transforms, "layout": layout, "donate": False, "keep_grads": True}
            compiled = assemble(program, opts, named.values(), **more)
            compiled.train_shapes(key, example, batch)
            return compiled

        compiled = built(n_steps or None)
        # the base of LoRA is not in the files
        outline = compiled.init if opts.lora is not None else lambda *_: compiled.traced[2]
        restored = self._restored(init, lambda: outline(key, example), layout)
        attached = attached_without_folder(named, "TrainLoop", (), validates=False)
        fingerprint = Fingerprint.of(
            compiled,
            data,
            Plan(max_steps=n_steps),
            example=batch,
            first={"train": batch},
            words={"n_steps": n_steps, **opts.recorded(WORDS["TrainLoop"].values())},
            callbacks=named,
            starts_from=None if isinstance(init, Checkpoint) else "",
            total_steps=n_steps or None,
            rebuild=built,
        )
        recorded = Recorded(fingerprint.facts)
        if restored is not None:
            known = fingerprint if rnkey is not None else fingerprint.with_start(key=None)
            recorded = _resumed(init, known, restored, allow_changes)
        start = restored or (compiled.init(key, example), Position())
        self._steps = Steps(compiled, data, start, attached.values(), recorded)
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

    def edit(self, edit: Edit) -> Checkpoint:
        """Changes the state of the latest checkpoint, from which training continues; returns the edited checkpoint.

        Write that one, so that a loop that resumes from it has the edit, too.
        """
        return self._steps.edit(edit)

    def close(self) -> None:
        """Ends the loop and its data threads. Its checkpoints stay valid."""
        self._steps.close()

    def _up_to(self, n_steps: int) -> Checkpoint | None:
        """The next checkpoint; None beyond `n_steps`."""
        self._steps.raise_pending()
        return self._to(self._next(n_steps), yields_partial=True) if self.step < n_steps else None

    def _to(self, step: int, *, yields_partial: bool) -> Checkpoint:
        if not self._has_printed_size:
            weights = jax.tree.leaves(self._steps.params)
            number, size = (sum(getattr(one, name) for one in weights) for name in ("size", "nbytes"))
            self._print(f"Total number of trainable weights: {number} ~ {size / 2**20:.1f} MB.")
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


def _resumed(
    init: Any,
    fingerprint: Fingerprint,
    restored: tuple[TrainState, Position | LoopState],
    allow_changes: Collection[str],
) -> Recorded:
    """What is recorded of a loop that resumes; raises for what may not differ from the loop that it resumes."""
    step, at = int(restored[0].step), restored[1]
    name, before = f"the checkpoint of step {step}", None
    if isinstance(init, CheckpointFileReader):
        name, before = init.folder, recorded_facts(init.folder)
    elif init.recorded is not None:
        before = init.recorded.facts
    return resuming(name, before, fingerprint, allow_changes, step, at.edits if isinstance(at, LoopState) else ())


def _first_variables(init: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """A function `(key, batch)` that returns the variables that the model starts from."""
    if isinstance(init, Checkpoint):
        base = unadapted(state_of(init))
        return lambda key, batch: (base.params, base.model_state)
    return first_variables(init.target if isinstance(init, CheckpointFileReader) else init, names)


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
    """`outline` with the shardings of `layout`; arrays already have them."""
    if layout is None or isinstance(outline.step, jax.Array):
        return outline
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        outline,
        layout.state_shardings(outline),
    )


def _layout(devices: Sequence[Any]) -> Layout:
    if not isinstance(devices, Sequence) or not devices:
        raise TypeError(f"`devices` must be a list of devices, such as `jax.devices()[:2]`, got {devices!r}.")
    return Layout(mesh=Mesh(np.array(devices), ("data",)))


@checks_keywords
class EvalLoop:
    """Evaluates the checkpoints that it is called with; returns them with metrics, as summaries.

    Iterator data continues where the previous evaluation stopped; a list or a loader starts over.

    Args:
        task: the metrics and the data.
        rnkey: random key of the evaluations, the same for each of them.
        n_steps: number of batches per evaluation.
        collections: names of the model's random streams, under "apply".
        group: the group of the metrics in the summary.
    """

    def __init__(
        self,
        task: EvalTask,
        rnkey: jax.Array | None = None,
        n_steps: int = 1,
        collections: Mapping[str, Sequence[str]] | None = None,
        *,
        group: str = "eval",
    ) -> None:
        if not isinstance(task.metrics, Mapping) or not all(map(callable, task.metrics.values())):
            raise TypeError(f"`EvalTask(metrics=…)` must be a dict of functions by label, got {task.metrics!r}.")
        if not task.metrics:
            raise ValueError("`EvalTask(metrics=…)` is empty. Pass at least one metric function.")
        self._key, self._group, self._rounds = rnkey, group, 0
        self._plan = Plan(max_steps=0, eval_batches=n_steps)
        self._data_source = DataSource(task.data, group)
        self._program = compile_program(eval_program(task, Collections.of(collections).apply))

    def __call__(self, checkpoint: Checkpoint) -> Summary:
        """Returns `checkpoint` with its evaluation and training metrics."""
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                f"An EvalLoop must be called with a checkpoint of a TrainLoop, got a {type(checkpoint).__name__}."
            )
        self._rounds += 1
        key = jax.random.key(0) if self._key is None else self._key
        # the parts of the state that an evaluation needs; all others are constant
        step, model_state = jnp.zeros((), jnp.int32), checkpoint.model_state
        params = checkpoint.extra.get(AVERAGE, checkpoint.model_params)
        parts = {"opt_state": (), "rng": key_data(key), "extra": {}, "frozen": checkpoint.frozen}
        state = merged(TrainState(step, params, model_state, **parts))
        at = Event(checkpoint.step, self._rounds, FlatState.of(state))
        # closed here: an exception raised while Python collects a generator, such as Ctrl-C, is lost
        with closing(eval_events(self._program, at, {self._group: self._data_source}, self._plan)) as events:  # type: ignore[type-var]
            for event in events:
                if isinstance(event, EvalEnd):
                    found = {label: float(value) for label, value in event.metrics.items()}
                    return summarised(checkpoint, self._group, found)
        raise self._data_source.exhausted_error(self._rounds)
