"""What happens before the first step: states are created, mistakes found by tracing, arrays placed on devices."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_trainer.core.compile import StateFunction, copied, traced_for, without_jit
from jax_trainer.core.equations import Traced, traced_equations
from jax_trainer.core.lora import Adapted, unadapted, weights_of
from jax_trainer.core.metric_buffer import MetricBuffer, MetricBufferFormat
from jax_trainer.core.metrics import LogMode, Metrics
from jax_trainer.core.program import Program
from jax_trainer.core.state import TrainState, copy_state
from jax_trainer.diagnostics.jax_internals import body_of, inner_functions
from jax_trainer.diagnostics.leaves import Batch, PyTree
from jax_trainer.diagnostics.traced import (
    Flops,
    Use,
    check_range,
    flops_of,
    index_uses,
    matrix_flops,
    out_of_range,
    ranges_of,
)
from jax_trainer.diagnostics.user_frame import explaining
from jax_trainer.sharding.layout import Layout
from jax_trainer.sharding.placement import BatchPlacement, device_put, primary_example, put

Key = jax.Array | Callable[[], jax.Array]


class Initializer:
    """A program with its layout, before it runs: creates states, checks steps by tracing them, places arrays.

    Args:
        program: the functions.
        layout: how arrays are sharded over devices; None: one device.
        debug: never trace: user code gets values.
    """

    def __init__(self, program: Program, layout: Layout | None, *, debug: bool) -> None:
        self.layout = layout and replace(layout, partition_specs=program.info.partition_specs)
        self.info, self.debug, self._program = program.info, debug, program
        # traced once, here and in the compiled steps, into which they are inlined
        self._train_step: Any = program.train_step if debug else traced_for(self.layout, program.train_step)
        self._eval_step: Any = program.eval_step if debug else traced_for(self.layout, program.eval_step)
        # by the step, and the shapes and dtypes of state and batch: tracing takes longer than a short run or evaluation
        self._traces: dict[Any, StepTrace] = {}
        self._blanks: dict[tuple[MetricBufferFormat, int], MetricBuffer] = {}
        self._inits: dict[Any, StateFunction] = {}
        self._traced: tuple[Key, Batch, TrainState] | None = None  # key, example and shapes of the last trace

    # states

    def init(self, key: jax.Array, example: Batch) -> TrainState:
        """A new state with shapes from an example batch; with a layout, created with its final sharding.

        With several processes, all must call it; the example of process 0 is used.
        """
        if self._placement is not None:
            example = primary_example(example)
        init, variables = self._program.init, self.info.initial_variables
        if self.layout is not None and variables is not None and not self.debug:
            # the optimizer state of existing weights is created with its final sharding
            return self.init_from_params(key, *variables(key, example))
        if self.debug or not self.info.init_is_traced:
            return self._placed(init(key, example))
        example = jax.tree.map(jnp.asarray, example)
        return self._init_function(key, example)(key, example)

    def init_shapes(self) -> TrainState | None:
        """The shapes of a new state, as `shapes` traced it last, with the shardings of a layout.

        None if the state is not computed by a compiled function from a key and an example.
        """
        if self._traced is None or self.debug or self._placement is not None or not self.info.init_is_traced:
            return None
        if self.layout is not None and self.info.initial_variables is not None:
            return None
        return self._with_shardings(self._traced[2])

    def init_ahead(self, pool: Executor) -> None:
        """Has `init` compiled by `pool`, for what `shapes` traced last."""
        assert self._traced is not None
        key, example, _ = self._traced
        key = key() if callable(key) else key
        example = jax.tree.map(jnp.asarray, example)
        self._init_function(key, example).compile_ahead(pool, key, example)

    @property
    def example(self) -> Batch:
        """The example batch of the last trace by `shapes`; None if there was none."""
        return None if self._traced is None else self._traced[1]

    def _init_function(self, key: jax.Array, example: Batch) -> StateFunction:
        kind = _kinds(key, example)
        if kind not in self._inits:
            init = self._program.init
            self._inits[kind] = StateFunction(init, self._shardings(init, key, example))
        return self._inits[kind]

    def init_from_params(self, key: jax.Array, params: PyTree, model_state: PyTree) -> TrainState:
        """A new state with copies of these weights; with a layout, sharded by it."""
        init = self.info.init_from_params
        if init is None:
            raise ValueError(
                "This program cannot start from existing weights: its `init_from_params` is None, because it resumes "
                "from its own state or was created without one. Use an adapter (`linen_program`, `nnx_program`, …), or "
                "add it: `program.with_info(init_from_params=…)`."
            )
        if self.debug:
            return self._placed(init(key, params, model_state))
        shardings = self._shardings(init, key, params, model_state)
        if shardings is not None:  # the weights may be on devices outside the layout
            of_params = weights_of(shardings) if isinstance(params, Adapted) else unadapted(shardings).params
            targets = (shardings.rng, of_params, shardings.model_state)
            key, params, model_state = device_put((key, params, model_state), targets)
        # a compiled function returns new arrays, so the caller's are not donated later
        return StateFunction(init, shardings)(key, params, model_state)

    def _shardings(self, make: Callable[..., TrainState], *args: Any) -> Any:
        return None if self.layout is None else self.layout.state_shardings(jax.eval_shape(make, *args))

    def _placed(self, state: TrainState) -> TrainState:
        """A copy of `state` with its final sharding."""
        if self.layout is None:
            return copy_state(state)
        # transfer before copying: a copy first would be unsharded; copy, because some leaves may already be in place
        return copied(device_put(state, self.layout.state_shardings(state)))

    # traces

    def shapes(self, key: Key, example: Batch, examples: Batch | None = None) -> tuple[TrainState, Metrics, Metrics]:
        """The shapes of a new state, of its training metrics and of its evaluation metrics, without computing them.

        Steps traced here are not traced again for a batch of the same shapes.

        Args:
            key: of the state, or a function that returns it: then nothing here needs a device, which may be starting.
            example: a batch.
            examples: the complete data set, whose labels and token ids must be in range; None: those of `example`.
        """
        state, trained = self.train_shapes(key, example, examples=examples)
        return state, trained, self.eval_shapes(state, example)

    def train_shapes(
        self, key: Key, example: Batch, batch: Batch | None = None, *, examples: Batch | None = None
    ) -> tuple[TrainState, Metrics]:
        """`shapes` without those of an evaluation; `batch` is one to train on, if `example` is not."""
        batch = example if batch is None else batch
        with explaining(batch):
            state = jax.eval_shape(self._program.init, jax.eval_shape(key) if callable(key) else key, example)
            if self.layout is not None:
                self.layout.state_shardings(state)  # raises if the layout does not fit
            trace = self.trace_train_step(state, batch)
            trace.check_indices(batch if examples is None else examples)
        self._traced = key, example, state
        return state, trace.metrics

    @property
    def traced(self) -> tuple[Key, Batch, TrainState]:
        """The key, the example batch and the shapes of the state that `train_shapes` traced last."""
        assert self._traced is not None
        return self._traced

    def equations(self, batch: Batch) -> "ProgramEquations":
        """What the program computes on such a batch, for the key and the example that `train_shapes` traced last."""
        key, example, state = self.traced
        step = self.trace_train_step(state, batch).jaxpr or jax.make_jaxpr(self._train_step)(state, batch)
        fields = [path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        reported = [False] * (len(step.jaxpr.outvars) - len(fields))
        init = jax.make_jaxpr(self._program.init)(jax.eval_shape(key) if callable(key) else key, example)
        weights = [name in ("params", "model_state", "frozen") for name in fields]
        others = [name in ("opt_state", "extra") for name in fields]
        return ProgramEquations(
            traced_equations(step, [*(True for _ in fields), *reported]),
            traced_equations(init, weights),
            traced_equations(init, others, given=weights),
        )

    def state_shape(self, key: jax.Array, example: Batch) -> TrainState:
        """The shapes of a new state, with their final shardings."""
        return self._with_shardings(jax.eval_shape(self._program.init, key, example))

    def _with_shardings(self, state: TrainState) -> TrainState:
        return state if self.layout is None else jax.tree.map(_sharded, state, self.layout.state_shardings(state))

    def train_flops(self, state: TrainState, batch: Batch, *, again: bool = False) -> list[Flops]:
        """The FLOPs of a training step on such a batch; `state` and `batch` may be shapes.

        `again`: trace it again, for a block that adds scopes.
        """
        if self.debug or again:
            return flops_of(jax.make_jaxpr(lambda *args: self._program.train_step(*args))(state, batch))
        return flops_of(self.trace_train_step(state, batch).jaxpr)

    def eval_shapes(self, state: TrainState, batch: Batch, examples: Batch = None) -> Metrics:
        """The shapes of the metrics of an evaluation step; `state` and `batch` may be shapes.

        Labels and token ids are checked in `examples`, all data of this form; None: in the batch.
        """
        with explaining(batch):
            self.check_eval_indices(state, batch, batch if examples is None else examples)
            return self.trace_eval_step(state, batch).metrics

    def check_eval_indices(self, state: TrainState, batch: Batch, examples: Batch) -> None:
        """Raises if labels or token ids in `examples` are out of range for an evaluation of batches like `batch`."""
        self.trace_eval_step(state, batch).check_indices(examples)

    def trace_train_step(self, state: TrainState, batch: Batch) -> "StepTrace":
        """What tracing a training step on such a batch shows."""
        return self._trace(self._train_step, lambda found: train_metrics(found[1]), state, batch)

    def trace_eval_step(self, state: TrainState, batch: Batch) -> "StepTrace":
        """What tracing an evaluation step on such a batch shows."""
        return self._trace(self._eval_step, eval_metrics, state, batch)

    def _trace(self, step: Any, metrics_of: Callable[[Any], Metrics], state: TrainState, batch: Batch) -> "StepTrace":
        kind = step, _kinds(state, batch)
        if kind not in self._traces:
            if self.debug:
                # user code gets values, never tracers, so it runs instead of being traced
                is_outline = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((state, batch)))
                found = jax.eval_shape(step, state, batch) if is_outline else without_jit(step)(state, batch)
                self._traces[kind] = StepTrace(metrics_of(found))
            else:
                traced = step.trace(state, batch)
                # counted from the end: constants that the step closes over come first
                first = len(traced.jaxpr.jaxpr.invars) - len(jax.tree.leaves(batch))
                indices = index_uses(traced.jaxpr, first)
                metrics = metrics_of(traced.out_info)
                self._traces[kind] = StepTrace(metrics, traced.jaxpr, indices, ranges_of(indices, batch))
        return self._traces[kind]

    # devices

    def place(self, batch: Batch, *, stacked: bool, replicated: bool = False, prefetch: bool = False) -> Batch:
        """`batch` on the devices of the layout; without a layout, unchanged.

        Args:
            batch: with several processes, this process's part of it.
            stacked: the first axis is that of the steps of a chunk.
            replicated: every process has the complete batch.
            prefetch: without a layout, transfer now instead of in the step (not on the CPU, which uses numpy arrays).
        """
        if self.layout is not None:
            return self.layout.place(batch, stacked=stacked, replicated=replicated)
        return jax.device_put(batch) if prefetch and jax.default_backend() != "cpu" else batch

    def store(self, arrays: PyTree) -> PyTree:
        """`arrays`, which every process has, replicated on all devices: steps select their batches from them."""
        if self.layout is None:
            return jax.device_put(arrays)
        return jax.tree.map(partial(put, sharding=self.layout.replicated), arrays)

    def stored_shapes(self, arrays: PyTree) -> PyTree:
        """The shapes of what `store` returns, in one process."""
        shapes = jax.eval_shape(lambda x: x, arrays)
        return (
            shapes if self.layout is None else jax.tree.map(partial(_sharded, sharding=self.layout.replicated), shapes)
        )

    def _blank(self, fmt: MetricBufferFormat, length: int) -> MetricBuffer:
        """An empty buffer, always the same one: steps do not donate it, so it is never overwritten."""
        if (fmt, length) not in self._blanks:
            self._blanks[fmt, length] = self.store(fmt.blank(length))
        return self._blanks[fmt, length]

    @property
    def _placement(self) -> BatchPlacement | None:
        return None if self.layout is None else self.layout.batch_placement


class ProgramEquations(NamedTuple):
    """What a program computes: a step, the weights that it starts from, and all else that it starts with, from them."""

    step: Traced
    weights: Traced
    optimizer: Traced


@dataclass(frozen=True)
class StepTrace:
    """What tracing a step on batches of one kind showed.

    Args:
        metrics: with shapes instead of arrays, or values if the step ran.
        jaxpr: its equations; None: it was not traced.
        indices: entries of a batch that are used as indices.
        index_ranges: their valid ranges, as text.
    """

    metrics: Metrics
    jaxpr: Any = None
    indices: frozenset[Use] = frozenset()
    index_ranges: str = ""

    @cached_property
    def flops(self) -> float:
        """Those of the matrix products and convolutions of a step, on all devices together."""
        return 0.0 if self.jaxpr is None else matrix_flops(self.jaxpr)

    @cached_property
    def runs_one_by_one(self) -> bool:
        """Whether steps are better dispatched one by one than in a loop."""
        # there, XLA on the CPU runs convolutions on one core, 20 times slower (jax 0.12)
        is_cpu = self.jaxpr is not None and jax.default_backend() == "cpu"
        return is_cpu and uses(self.jaxpr, "conv_general_dilated")

    @property
    def format(self) -> MetricBufferFormat:
        """The format of a buffer of these metrics."""
        return MetricBufferFormat.of(self.metrics)

    def check_indices(self, batch: Batch) -> None:
        """Raises if labels or token ids in `batch`, which may be the complete data set, are out of range."""
        check_range(self.indices, batch)

    def out_of_range(self, batch: Batch) -> str:
        """The error message about indices in `batch` that are out of range; empty if none are."""
        return out_of_range(self.indices, batch)


def _sharded(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def train_metrics(report: Any) -> Metrics:
    """The metrics of a training step that are reported in training."""
    return report.metrics.only(LogMode.TRAIN)


def eval_metrics(metrics: Metrics) -> Metrics:
    """The metrics of an evaluation step that are reported in evaluations."""
    return metrics.only(LogMode.VAL, LogMode.TEST)


def uses(jaxpr: Any, primitive: str) -> bool:
    """Whether a traced function contains `primitive`, also in nested functions.

    >>> uses(jax.make_jaxpr(lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x))(1.0), "sin")
    True
    """
    found = ((one.primitive.name, inner_functions(one)) for one in body_of(jaxpr).eqns)
    return any(name == primitive or any(uses(one, primitive) for one in inner) for name, inner in found)


def _kinds(*trees: PyTree) -> tuple[Any, ...]:
    """The structure of `trees`, and the shapes and dtypes of their leaves."""
    leaves, structure = jax.tree.flatten(trees)
    return structure, *((getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
