"""`compile_program`: a `Program` as compiled steps that take and return a metric buffer."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from functools import cached_property, partial
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.config.compilation_cache import use_compilation_cache
from jax_trainer.core.by_epoch import value_in
from jax_trainer.core.compile import CompiledStep, DebugStep, compiled_function, shared_function, without_jit
from jax_trainer.core.memory import ResidentBatch, map_stacked
from jax_trainer.core.metric_buffer import MetricBuffer
from jax_trainer.core.program import Program
from jax_trainer.core.random import key_data
from jax_trainer.core.recompile import OnRecompile, changes, signature_of
from jax_trainer.core.setup import Initializer, eval_metrics, train_metrics
from jax_trainer.core.state import FlatState, TrainState, evaluated, strong
from jax_trainer.core.steps import PredictStep, StepReport, TrainStep
from jax_trainer.core.tracing import tracing
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaf_path, leaves_by_path
from jax_trainer.sharding.layout import Layout
from jax_trainer.sharding.placement import is_alone

MOST_MADE = 32  # compiled functions of `edit` and changed programs that are kept
Loose = dict[str, jax.Array]  # metrics too large for the metric buffer
Stepped = tuple[TrainState, MetricBuffer, tuple[Loose, PyTree]]
FlatStepped = tuple[FlatState, MetricBuffer, tuple[Loose, PyTree]]
NO_METRICS: Any = MetricBuffer(None, None)  # type: ignore[arg-type] - of predictions


class CompiledProgram(Initializer):
    """A compiled `Program`. Steps take the metric buffer and return it.

    `train_step`, `train_chunk` and `eval_step` take a `TrainState`; the loop calls `flat_train_step`,
    `flat_train_chunk` and `flat_eval_step`, which take a `FlatState`.
    """

    def __init__(self, program: Program, options: "CompileOptions") -> None:
        super().__init__(program, options.layout, debug=options.debug)
        self._options, self._made = options, OrderedDict[Any, tuple[Any, Any]]()
        self.describe_batch: Callable[[], str] = str  # the current batch of the loop, for warnings
        compiled: Any = partial(
            DebugStep if options.debug else CompiledStep,
            on_recompile=options.on_recompile,
            describe_batch=lambda: self.describe_batch(),
        )
        donate = options.donate
        self.flat_train_step: Callable[..., FlatStepped] = compiled("train_step", self._train, donate=donate)
        self._train_chunk = compiled("train_chunk", self._train_on_all, donate=donate)
        self.flat_eval_step: Callable[..., tuple[MetricBuffer, Loose]] = compiled(
            "eval_step", self._evaluate, lenient=True
        )
        self._predict_step = compiled("predict_step", self._predict, lenient=True)

    def transformed(self, by: Any, change: Callable[[Program], Program]) -> "CompiledProgram":
        """`change(program)` compiled with the same options; cached by the identity of `by`."""
        return self._once(id(by), lambda: CompiledProgram(change(self._program), self._options), by)

    def evaluating(self, name: str) -> "CompiledProgram":
        """The program that evaluates the set of this name: itself, unless the set has an evaluation step of its own."""
        change = self.info.eval_steps.get(name)
        if change is None:
            return self
        return self.transformed(change, lambda program: program._replace(eval_step=change(program.eval_step)))

    def in_epoch(self, epoch: int) -> "CompiledProgram":
        """The program of epoch `epoch` (from 1): with another number of micro-batches, if that changes."""
        schedule = self.info.micro_batches
        count = None if schedule is None else value_in(schedule, epoch)
        if schedule is None or count is None or count == schedule[0]:
            return self

        def counted(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
            with tracing(micro_batches=count):
                return self._program.train_step(state, batch)

        return self.transformed(count, lambda program: program._replace(train_step=counted))

    def expect_batches(self) -> None:
        """Batches of another size follow: compiling a training step for them is no recompilation."""
        for step in (self.flat_train_step, self._train_chunk):
            step.start_data(compiles=True)  # type: ignore[attr-defined]

    def train_buffer(self, state: TrainState, batch: Batch, length: int) -> MetricBuffer:
        """An empty buffer for the metrics of `length` training steps on batches like `batch`."""
        self.flat_train_step.start_data()  # type: ignore[attr-defined]
        self._train_chunk.start_data()
        trace = self.trace_train_step(state, batch)
        trace.check_indices(batch)
        return self._blank(trace.format, length)

    def eval_buffer(self, state: TrainState, batch: Batch, length: int) -> MetricBuffer:
        """An empty buffer for the metrics of evaluating `length` batches like `batch`."""
        self.flat_eval_step.start_data()  # type: ignore[attr-defined]
        trace = self.trace_eval_step(state, batch)
        trace.check_indices(batch)
        return self._blank(trace.format, length)

    # steps on a state

    def train_step(self, state: TrainState, buffer: MetricBuffer, batch: Batch) -> Stepped:
        """One step. Returns the new state, the new buffer, and (metrics that do not fit, gradients if kept)."""
        flat, buffer, kept = self.flat_train_step(FlatState.of(state), buffer, batch)
        return flat.state, buffer, kept

    def train_chunk(self, state: TrainState, buffer: MetricBuffer, batches: Batch, steps: int) -> Stepped:
        """`steps` steps in one dispatch; `batches` are stacked, and those after `steps` are ignored."""
        flat, buffer, kept = self.flat_train_chunk(FlatState.of(state), buffer, batches, steps)
        return flat.state, buffer, kept

    def eval_step(self, state: TrainState, buffer: MetricBuffer, batch: Batch) -> tuple[MetricBuffer, Loose]:
        """Evaluates `state` on one batch. Returns the new buffer, and the metrics that do not fit into it."""
        return self.flat_eval_step(FlatState.of(state), buffer, batch)

    def predict(self, state: TrainState, batch: Batch, number: int = 0) -> PyTree:
        """The model's outputs for a batch; random numbers depend on the batch's `number`, as in an evaluation."""
        return self.flat_predict_step(FlatState.of(state), batch, number)

    def traced_predict(self, state: TrainState, batch: Batch) -> PyTree:
        """`predict` neither compiled nor sharded, to be traced as a part of another program, such as an export."""
        return self._checked_predict_step()(self._keyed(state, jnp.uint32(0)), batch)

    def report(self, state: TrainState, batch: Batch) -> StepReport:
        """The metrics and gradients of a step on the complete batch; `state` is not changed."""
        return self._reported(state, self.place(batch, stacked=False, replicated=True))

    def gradients(self, flat: FlatState, batch: Batch) -> PyTree:
        """The gradients of a step on a batch, placed as for `flat_train_step`; None if the step does not report them.

        They are computed apart from the step, so that steps whose gradients nobody needs cost nothing more.
        """
        return self._reported(flat.state, batch).grads

    def edit(self, flat: FlatState, fn: Callable[..., TrainState], *values: PyTree) -> FlatState:
        """`fn(state, *values)`: a change of the state between steps, compiled once per function.

        `fn` must keep the structure, shapes and dtypes of the state, its step and its key.
        """
        structure = flat.structure  # `flat` itself would be kept with the function

        def traced(leaves: list[jax.Array], *values: PyTree) -> list[jax.Array]:
            return jax.tree.leaves(self._pinned(edited(structure.unflatten(leaves), fn, values)))

        changed = self._once((id(fn), structure), lambda: self._shared(traced, donate=self._options.donate), fn)
        return FlatState(changed(flat.leaves, *values), structure)

    def _once(self, key: Any, make: Callable[[], Any], by: Any = None) -> Any:
        """What `make()` returned the first time; `by`: what has an id in the key, which is not reused meanwhile."""
        if key not in self._made:
            self._made[key] = by, make()
        self._made.move_to_end(key)
        if len(self._made) > MOST_MADE:
            self._made.popitem(last=False)
        return self._made[key][1]

    def _shared(self, function: Callable[..., Any], *, donate: bool) -> Callable[..., Any]:
        return without_jit(function) if self.debug else shared_function(function, donate=donate)

    # BatchNorm statistics, recomputed by a pass over data

    def batch_stats_in(self, state: TrainState) -> "BatchStats":
        """The BatchNorm statistics of a state, as the mean over no batch."""
        return BatchStats.of(state.model_state, self.info.is_batch_stat)

    def add_batch_stats(self, flat: FlatState, stats: "BatchStats", batch: Batch) -> "BatchStats":
        """The mean of BatchNorm statistics over one more batch."""
        structure = flat.structure  # `flat` itself would be kept with the function

        def traced(leaves: list[jax.Array], stats: BatchStats, batch: Batch) -> BatchStats:
            return self._replicated(stats.adding(self._train_step, structure.unflatten(leaves), self._batch(batch)))

        adding = self._once(("batch stats", structure), lambda: self._shared(traced, donate=False))
        return adding(flat.leaves, stats, batch)

    def with_batch_stats(self, flat: FlatState, stats: "BatchStats") -> FlatState:
        """The state with these BatchNorm statistics."""
        return FlatState.of(written(flat.state, stats.means))

    # compiled ahead of the first call, from the shapes of a state

    def compile_train_ahead(
        self, pool: Executor, state: TrainState, buffer: MetricBuffer, batch: Batch, steps: int | None
    ) -> None:
        """Has a step, or a chunk with `steps` steps, compiled by `pool`."""
        step, number = self._step_for(batch, steps)
        step.compile_ahead(pool, FlatState.of(state), buffer, batch, number)

    def compile_eval_ahead(self, pool: Executor, state: TrainState, buffer: MetricBuffer, batch: Batch) -> None:
        """Has an evaluation step compiled by `pool`."""
        step: Any = self.flat_eval_step
        step.compile_ahead(pool, FlatState.of(state), buffer, batch)

    def lowered_train(self, state: TrainState, buffer: MetricBuffer, batch: Batch, steps: int | None = None) -> Any:
        """The training step (of a chunk of `steps`, if it is not None) as XLA gets it; arguments may be shapes."""
        step, number = self._step_for(batch, steps)
        return step.lowered(FlatState.of(state), buffer, batch, number)

    def _step_for(self, batch: Batch, steps: int | None) -> tuple[Any, Any]:
        """The compiled step, or chunk of `steps`, and the number that it takes."""
        return (self.flat_train_step, None) if steps is None else (self._train_chunk, _chunk_number(batch, steps))

    # steps on a flat state, besides `flat_train_step` and `flat_eval_step`

    def flat_train_chunk(self, flat: FlatState, buffer: MetricBuffer, batches: Batch, steps: int) -> FlatStepped:
        """`train_chunk` on a `FlatState`."""
        return self._train_chunk(flat, buffer, batches, _chunk_number(batches, steps))

    def flat_train_one_by_one(self, flat: FlatState, buffer: MetricBuffer, batches: Batch, steps: int) -> FlatStepped:
        """`flat_train_chunk` with one dispatch per step."""
        kept = []
        for index in range(steps):
            batch = map_stacked(lambda x, index=index: x[index], batches)
            flat, buffer, each = self.flat_train_step(flat, buffer, batch)
            kept.append(each)
        return flat, buffer, jax.tree.map(lambda *each: jnp.stack(each), *kept)

    def flat_predict_step(self, flat: FlatState, batch: Batch, number: int) -> PyTree:
        """`predict` on a `FlatState`."""
        self._checked_predict_step()
        if not number:
            self._predict_step.start_data()
        return self._predict_step(flat, NO_METRICS, batch, np.uint32(number))[1]

    def _checked_predict_step(self) -> PredictStep:
        if self._program.predict_step is None:
            raise ValueError(
                "This program cannot predict: its `predict_step` is None. Use `linen_program` or `nnx_program`, or add "
                "it: `program._replace(predict_step=lambda state, batch: …)`."
            )
        return self._program.predict_step

    # what is compiled

    def _train(self, state: TrainState, buffer: MetricBuffer, batch: Batch, number: None = None) -> Stepped:
        return self._train_into(MetricBuffer.append, state, buffer, batch)

    def _train_into(
        self, write: Callable[..., tuple[MetricBuffer, Loose]], state: TrainState, buffer: MetricBuffer, batch: Batch
    ) -> Stepped:
        """One step, whose metrics `write(buffer, metrics)` writes."""
        state, report = self._train_step(state, self._batch(batch))
        buffer, loose = self._replicated(write(buffer, train_metrics(report)))
        return self._pinned(state), buffer, (loose, report.grads if self._options.keep_grads else None)

    def _train_on_all(self, state: TrainState, buffer: MetricBuffer, batches: Batch, steps: Any) -> Stepped:
        """A chunk of `steps` steps; None: as many as there are batches, which is static."""

        def at(index: Any) -> Batch:
            return map_stacked(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), batches)

        def body(index: jax.Array, carry: Stepped) -> Stepped:
            state, buffer, kept = carry
            write = partial(MetricBuffer.write, at=first + index, number=number + index.astype(number.dtype) + 1)
            state, buffer, new = self._train_into(write, state, buffer, at(index))
            kept = jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, index, 0), kept, new)
            return state, buffer, kept

        length, number = _length(batches), buffer.rows_written
        steps = length if steps is None else steps
        first = len(buffer.rows) - steps
        shapes = jax.eval_shape(lambda state, buffer: self._train(state, buffer, at(0))[2], state, buffer)
        kept = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes)
        return lax.fori_loop(0, steps, body, (state, buffer.shifted(steps), kept))

    def _evaluate(
        self, state: TrainState, buffer: MetricBuffer, batch: Batch, number: None
    ) -> tuple[None, MetricBuffer, Loose]:
        metrics = eval_metrics(self._eval_step(self._keyed(state, buffer.rows_written), self._batch(batch)))
        return None, *self._replicated(buffer.append(metrics))

    def _predict(
        self, state: TrainState, buffer: MetricBuffer, batch: Batch, number: jax.Array
    ) -> tuple[None, MetricBuffer, PyTree]:
        outputs = self._checked_predict_step()(self._keyed(state, number), self._batch(batch))
        return None, buffer, self._replicated(outputs)

    @cached_property
    def _reported(self) -> Callable[[TrainState, Batch], StepReport]:
        def reported(state: TrainState, batch: Batch) -> StepReport:
            report = self._train_step(state, self._batch(batch))[1]
            return report._replace(metrics=train_metrics(report))

        return without_jit(reported) if self.debug else compiled_function(reported)

    def _batch(self, batch: Batch) -> Batch:
        """The batch that a step computes with."""
        if isinstance(batch, ResidentBatch):
            return batch.gather()
        # processes that need the same rows each supplied some of them; they are gathered here
        if self.layout is None or self._placement is None or not self._placement.reshards:
            return batch
        return self.layout.constrain_rows(batch, 0)

    def _keyed(self, state: TrainState, number: jax.Array) -> TrainState:
        # each batch of an evaluation has its own key, the same in every evaluation
        root = state.key
        if (seed := self._options.eval_seed) is not None:
            root = jax.random.key(seed, impl=jax.random.key_impl(root))
        return evaluated(state).replace(rng=key_data(jax.random.fold_in(root, number)))

    def _replicated(self, results: Any) -> Any:
        # every process reads all of it
        if self.layout is None or self._placement is None or self.debug:
            return results
        return lax.with_sharding_constraint(results, self.layout.replicated)

    def _pinned(self, state: TrainState) -> TrainState:
        # without a constraint the compiler may return a sharded parameter replicated
        if self.layout is None or self.debug:
            return state
        return lax.with_sharding_constraint(state, self.layout.state_shardings(state))


class CompileOptions(NamedTuple):
    """The options of `compile_program`."""

    layout: Layout | None
    donate: bool
    debug: bool
    keep_grads: bool
    on_recompile: OnRecompile
    eval_seed: int | None


def compile_program(
    program: Program,
    *,
    layout: Layout | None = None,
    donate: bool = True,
    debug: bool = False,
    keep_grads: bool = False,
    on_recompile: OnRecompile = "warn",
    eval_seed: int | None = None,
) -> CompiledProgram:
    """Compiles `program`.

    Args:
        layout: how arrays are sharded over devices; None: one device.
        donate: let a step reuse the memory of its input state, which is deleted.
        debug: run without `jax.jit`, so that breakpoints and prints work.
        keep_grads: return the gradients of every step.
        on_recompile: "warn", "error" or "ignore" when a step is recompiled.
        eval_seed: seed of the random numbers of evaluations, with the number of the batch; None: the root key of the
            state, and so the seed of training.
    """
    if on_recompile not in get_args(OnRecompile):
        raise ValueError(f"`on_recompile` must be one of {', '.join(get_args(OnRecompile))}, got {on_recompile!r}.")
    # of several processes, one that loads a program and one that compiles it can wait for each other, if they do not
    # share the folder: it must be named
    use_compilation_cache(by_default=is_alone)
    return CompiledProgram(program, CompileOptions(layout, donate, debug, keep_grads, on_recompile, eval_seed))


def _chunk_number(batches: Batch, steps: int) -> np.int32 | None:
    # an accelerator syncs with the host after every iteration of a loop of unknown length, which costs as much as a
    # small step; the CPU does not, and one loop for all lengths makes partial chunks bit-identical
    is_static = steps == _length(batches) and jax.default_backend() != "cpu"
    return None if is_static else np.int32(steps)


def _length(batches: Batch) -> int:
    return jax.tree.leaves(batches)[0].shape[0]


def edited(state: TrainState, fn: Callable[..., TrainState], values: tuple[PyTree, ...]) -> TrainState:
    """`fn(state, *values)`, checked to be a state of the same kind."""
    new = fn(state, *values)
    if not isinstance(new, TrainState):
        raise TypeError(f"An edit must return a `TrainState`, got a {type(new).__name__}. Return `state.replace(…)`.")
    found = changes(*(signature_of({"state": one}) for one in (state, new)))
    if kept := [one for one in found if one.kind not in ("weak type", "sharding")]:
        text = f"An edit must keep the structure, shapes and dtypes of the state, but {kept[0]}."
        raise ValueError(f"{text} Give it the old form, as by `x.astype(old.dtype)`.")
    for name in ("step", "rng"):
        if getattr(new, name) is not getattr(state, name):
            raise ValueError(
                f"An edit must not change `state.{name}`, which the loop counts on. Change other fields only, as in "
                "`state.replace(params=…)`."
            )
    return strong(new)


# BatchNorm statistics of given weights, from a pass over the training data. A training step returns running averages:
# m × before + (1 − m) × those of the batch. They are linear in what was before, so two evaluations, from 0 and from 1,
# tell the statistics of the batch, whatever library and momentum the model has. XLA computes what both have in common,
# the forward pass, once, and nothing of the gradients.

Means = dict[str, jax.Array]  # by path


class BatchStats(NamedTuple):
    """The mean of the statistics of so many batches."""

    means: Means
    batches: jax.Array

    @classmethod
    def of(cls, model_state: PyTree, is_batch_stat: Callable[[str], bool]) -> "BatchStats":
        """Those of no batch yet: as they are in `model_state`."""
        chosen = {path: leaf for path, leaf in leaves_by_path(model_state).items() if is_batch_stat(path)}
        return cls(chosen, jnp.zeros((), jnp.int32))

    def adding(self, step: TrainStep, state: TrainState, batch: Batch) -> "BatchStats":
        """The mean over one more batch.

        Statistics that the step does not update, of layers that are not in training mode, stay as they are, and so do
        all if those of the batch are not finite.
        """

        def after(before: Means) -> Means:
            """The statistics after a step, from these; no other random numbers than in a step with this number."""
            moved = written(state, before).replace(step=state.step + self.batches)
            return BatchStats.of(step(moved, batch)[0].model_state, self.means.__contains__).means

        known = BatchStats.of(state.model_state, self.means.__contains__).means
        is_new = jax.tree.map(lambda new, old: (new != old).any(), after(known), known)
        start = lambda at: jax.tree.map(lambda new, old: jnp.where(new, jnp.full_like(old, at), old), is_new, known)
        # from the results after 0 and after 1, whose difference is the momentum
        of_batch = lambda zero, one: zero / (1 - jnp.mean(one - zero))
        found = jax.tree.map(of_batch, after(start(0)), after(start(1)))
        fine = jax.tree.map(lambda new, one: ~new | jnp.isfinite(one).all(), is_new, found)
        all_fine = jnp.stack([jnp.array(True), *jax.tree.leaves(fine)]).all()
        count = self.batches + all_fine

        def mean(old: jax.Array, one: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(all_fine & new, old + (one - old) / jnp.maximum(count, 1), old).astype(old.dtype)

        return BatchStats(jax.tree.map(mean, self.means, found, is_new), count)


def written(state: TrainState, means: Means) -> TrainState:
    """`state` with these statistics."""
    of_leaf = lambda path, leaf: means.get(leaf_path(path), leaf)
    return state.replace(model_state=jax.tree_util.tree_map_with_path(of_leaf, state.model_state))
