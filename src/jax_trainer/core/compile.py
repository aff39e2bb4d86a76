"""`compile_program` and `compiled_function`: the only module that calls `jax.jit`."""

from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.core.device_put import device_put
from jax_trainer.core.executables import SharedExecutable
from jax_trainer.core.indices import Use, check_range, index_uses, out_of_range, ranges_of
from jax_trainer.core.layout import Layout
from jax_trainer.core.memory import OomReporter, explain_oom
from jax_trainer.core.metric_buffer import MetricBufferFormat, rows_written
from jax_trainer.core.metrics import Batch, LogMode, Metrics, PyTree, resized
from jax_trainer.core.placement import primary_example
from jax_trainer.core.program import Program
from jax_trainer.core.recompile import OnRecompile, RecompileGuard
from jax_trainer.core.rng import key_data
from jax_trainer.core.state import FlatState, TrainState, copy_state
from jax_trainer.core.steps import StepReport
from jax_trainer.core.tracing import tracing_for
from jax_trainer.core.user_frame import explaining

MOST_EDITS = 16  # compiled functions of `edit` that are kept

Loose = dict[str, jax.Array]  # metrics too large for the metric buffer
Stepped = tuple[TrainState, jax.Array, tuple[Loose, PyTree]]
FlatStepped = tuple[FlatState, jax.Array, tuple[Loose, PyTree]]


def compiled_function(function: Callable[..., Any], *, static: tuple[str, ...] = ()) -> Any:
    """`function` compiled with `jax.jit`, once per shape of its arrays and value of the arguments named in `static`.

    For computations outside training, such as sampling: pass the module as an argument, so that new weights do not
    recompile.
    """
    return jax.jit(function, static_argnames=static)


class CompiledProgram:
    """A compiled `Program`. Steps take the metric buffer and return it.

    `train_step`, `train_chunk` and `eval_step` take a `TrainState`; the loop calls `flat_train_step`,
    `flat_train_chunk` and `flat_eval_step`, which take a `FlatState`.
    """

    def __init__(
        self,
        program: Program,
        *,
        layout: Layout | None,
        donate: bool,
        debug: bool,
        keep_grads: bool,
        on_recompile: OnRecompile,
        eval_seed: int | None,
    ) -> None:
        if on_recompile not in get_args(OnRecompile):
            raise ValueError(f"`on_recompile` must be one of {', '.join(get_args(OnRecompile))}, got {on_recompile!r}.")
        self.layout = None if layout is None else layout.with_partition_specs(program.partition_specs)
        self.debug, self.checks = debug, program.checks
        self.keeps_batches, self.transforms = program.keeps_batches, program.transforms
        self._options = {"donate": donate, "debug": debug, "keep_grads": keep_grads, "on_recompile": on_recompile}
        self._requested_layout, self._derived = layout, {}
        self._edits: dict[Any, tuple[Any, Callable[..., Any]]] = {}  # functions of `edit`, by identity and structure
        self._program, self._keep_grads, self._eval_seed = program, keep_grads, eval_seed
        self._train_format: MetricBufferFormat | None = None  # as last returned by `train_buffer` and `eval_buffer`
        self._eval_format: MetricBufferFormat | None = None
        self._indices: frozenset[Use] = frozenset()  # entries of a batch that training steps use as indices
        self.index_ranges = ""  # their valid ranges, as text
        # by the shapes and dtypes of state and batch: tracing takes longer than a short run or evaluation. Buffers are
        # never overwritten: steps do not donate them
        self._train_buffers: dict[Any, tuple[tuple[MetricBufferFormat, jax.Array], tuple[Any, str, bool]]] = {}
        self._eval_buffers: dict[Any, tuple[MetricBufferFormat, jax.Array]] = {}
        self._on_recompile: OnRecompile = on_recompile
        # inside a loop, XLA on the CPU runs convolutions on one core, 20 times slower (jax 0.12)
        self.steps_one_by_one = False
        self.describe_batch: Callable[[], str] = lambda: ""  # the current batch of the loop, for warnings
        # inner functions are traced once, for the buffer format and for the step, and inlined into the outer ones
        self._train_inner: Any = program.train_step if debug else self._for_layout(program.train_step)
        self._eval_inner = program.eval_step if debug else self._for_layout(program.eval_step)
        donated = (0,) if donate else ()
        self.flat_train_step: Callable[..., FlatStepped] = self._compile("train_step", self._step, donated)
        self._full_chunk = self._compile("train_chunk", self._complete_chunk, donated)
        self._part_chunk = self._compile("train_chunk", self._chunk, donated, "steps")
        # the same on rows of resident data; separate, so that each counts its own compilations
        self.flat_train_step_from: Callable[..., FlatStepped] = self._compile(
            "train_step", self._step, donated, "store"
        )
        self._full_chunk_from = self._compile("train_chunk", self._complete_chunk, donated, "store")
        self._part_chunk_from = self._compile("train_chunk", self._chunk, donated, "steps", "store")
        self.flat_eval_step: Callable[..., tuple[jax.Array, Loose]] = self._compile("eval_step", self._evaluate, ())
        self._compiled_predict = self._compile("predict_step", self._predict, ())

    def transformed(self, by: Any, change: Callable[[Program], Program]) -> "CompiledProgram":
        """`change(program)` compiled with the same options; cached by the identity of `by`."""
        if id(by) not in self._derived:
            derived = CompiledProgram(
                change(self._program), layout=self._requested_layout, eval_seed=self._eval_seed, **self._options
            )
            self._derived[id(by)] = by, derived  # a reference to `by`, so that its id is not reused
        return self._derived[id(by)][1]

    def init(self, key: jax.Array, example: Batch) -> TrainState:
        """A new state with shapes from an example batch; with a layout, created with its final sharding.

        With several processes, all must call it; the example of process 0 is used.
        """
        if self._is_shared:
            example = primary_example(example)
        init, variables = self._program.init, self._program.initial_variables
        if self.layout is not None and variables is not None and not self.debug:
            # the optimizer state of existing weights is created with its final sharding
            return self.init_from_params(key, *variables(key, example))
        if self.debug or not self._program.init_is_traced:
            return self._placed(init(key, example))
        example = jax.tree.map(jnp.asarray, example)
        return _materialized("init", init, self._shardings(init, key, example), key, example)

    def init_from_params(self, key: jax.Array, params: PyTree, model_state: PyTree) -> TrainState:
        """A new state with copies of these weights; with a layout, sharded by it."""
        init = self._program.init_from_params
        if init is None:
            raise ValueError(
                "This program cannot start from existing weights: its `init_from_params` is None, because it resumes "
                "from its own state or was created without one. Use an adapter (`linen_program`, `nnx_program`, …), or "
                "add it: `program._replace(init_from_params=…)`."
            )
        if self.debug:
            return self._placed(init(key, params, model_state))
        shardings = self._shardings(init, key, params, model_state)
        if shardings is not None:  # the weights may be on devices outside the layout
            targets = (shardings.rng, shardings.params, shardings.model_state)
            key, params, model_state = device_put((key, params, model_state), targets)
        # a compiled function returns new arrays, so the caller's are not donated later
        return _materialized("init_from_params", init, shardings, key, params, model_state)

    def shapes(self, key: jax.Array, example: Batch) -> tuple[TrainState, Metrics, Metrics]:
        """The shapes of a new state, of its training metrics and of its evaluation metrics, without computing them.

        Steps traced here are not traced again for a batch of the same shapes.
        """
        with explaining(example):
            state = jax.eval_shape(self._program.init, key, example)
            if self.layout is not None:
                self.layout.state_shardings(state)  # raises if the layout does not fit
            trained = _reported(jax.eval_shape(self._train_inner, state, example)[1])
            self._find_indices(state, example)
            return state, trained, self.eval_shapes(state, example)

    def eval_shapes(self, state: TrainState, batch: Batch) -> Metrics:
        """The shapes of the metrics of an evaluation step; `state` and `batch` may be shapes."""
        with explaining(batch):
            self.check_eval_indices(state, batch, batch)
            return _evaluated(jax.eval_shape(self._eval_inner, state, batch))

    def predict(self, state: TrainState, batch: Batch, number: int = 0) -> PyTree:
        """The model's outputs for a batch; random numbers depend on the batch's `number`, as in an evaluation."""
        return self.flat_predict_step(FlatState.of(state), batch, number)

    def flat_predict_step(self, flat: FlatState, batch: Batch, number: int) -> PyTree:
        """`predict` on a `FlatState`."""
        if self._program.predict_step is None:
            raise ValueError(
                "This program cannot predict: its `predict_step` is None. Use `linen_program` or `nnx_program`, or add "
                "it: `program._replace(predict_step=lambda state, batch: …)`."
            )
        if not number:
            _start_data(self._compiled_predict)
        return self._compiled_predict(flat, np.uint32(number), batch)[1]

    def report(self, state: TrainState, batch: Batch) -> StepReport:
        """The metrics and gradients of a step on the complete batch; `state` is not changed."""
        if self.debug:
            return _without_jit(self._report)(state, batch)
        return jax.jit(self._report)(state, self.place(batch, stacked=False, replicated=True))

    def edit(self, flat: FlatState, fn: Callable[..., TrainState], *values: PyTree) -> FlatState:
        """`fn(state, *values)`: a change of the state between steps, compiled once per function.

        `fn` must keep the structure, shapes and dtypes of the state, its step and its key.
        """
        if self.debug:
            return FlatState.of(_without_jit(lambda: _edited(flat.state, fn, values))())
        key = (id(fn), flat.structure)
        if key not in self._edits:

            def traced(leaves: list[jax.Array], *values: PyTree) -> list[jax.Array]:
                return jax.tree.leaves(self._pinned(_edited(flat.structure.unflatten(leaves), fn, values)))

            donated = (0,) if self._options["donate"] else ()
            # a reference to `fn`, so that its id is not reused
            self._edits[key] = fn, SharedExecutable(jax.jit(traced, donate_argnums=donated))
            if len(self._edits) > MOST_EDITS:
                del self._edits[next(iter(self._edits))]
        return FlatState(self._edits[key][1](flat.leaves, *values), flat.structure)

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
        if self.layout is not None and self.layout.batch_placement is not None:
            return self.layout.batch_placement.replicate(arrays)
        return jax.device_put(arrays, None if self.layout is None else self.layout.replicated)

    def train_buffer(self, state: TrainState, batch: Batch, length: int) -> tuple[MetricBufferFormat, jax.Array]:
        """The format of the training metrics, and an empty buffer for `length` steps."""
        _start_data(self.flat_train_step, self._full_chunk, self._part_chunk)
        _start_data(self.flat_train_step_from, self._full_chunk_from, self._part_chunk_from)
        kind = (length, *_kinds(state, batch))
        if kind not in self._train_buffers:
            convolves = False
            if not self.debug:
                self._find_indices(state, batch)
                convolves = uses(self._train_inner.trace(state, batch).jaxpr, "conv_general_dilated")
            fmt = MetricBufferFormat.of(_reported(self._result_shapes(self._train_inner, state, batch)[1]))
            one_by_one = convolves and jax.default_backend() == "cpu"
            self._train_buffers[kind] = (fmt, self._blank(fmt, length)), (self._indices, self.index_ranges, one_by_one)
        found, (self._indices, self.index_ranges, self.steps_one_by_one) = self._train_buffers[kind]
        self.check_indices(batch)
        self._train_format = found[0]
        return found

    def eval_buffer(self, state: TrainState, batch: Batch, length: int) -> tuple[MetricBufferFormat, jax.Array]:
        """The format of the evaluation metrics, and an empty buffer for `length` batches."""
        _start_data(self.flat_eval_step)
        kind = (length, *_kinds(state, batch))
        if kind not in self._eval_buffers:
            self.check_eval_indices(state, batch, batch)
            fmt = MetricBufferFormat.of(_evaluated(self._result_shapes(self._eval_inner, state, batch)))
            self._eval_buffers[kind] = (fmt, self._blank(fmt, length))
        self._eval_format = self._eval_buffers[kind][0]
        return self._eval_buffers[kind]

    def train_step(self, state: TrainState, buffer: jax.Array, batch: Batch) -> Stepped:
        """One step. Returns the new state, the new buffer, and (metrics that do not fit, gradients if kept)."""
        flat, buffer, kept = self.flat_train_step(FlatState.of(state), buffer, batch)
        return flat.state, buffer, kept

    def train_chunk(self, state: TrainState, buffer: jax.Array, batches: Batch, steps: int) -> Stepped:
        """`steps` steps in one dispatch; `batches` are stacked, and those after `steps` are ignored."""
        flat, buffer, kept = self.flat_train_chunk(FlatState.of(state), buffer, batches, steps)
        return flat.state, buffer, kept

    def eval_step(self, state: TrainState, buffer: jax.Array, batch: Batch) -> tuple[jax.Array, Loose]:
        """Evaluates `state` on one batch. Returns the new buffer, and the metrics that do not fit into it."""
        return self.flat_eval_step(FlatState.of(state), buffer, batch)

    def flat_train_chunk(
        self, flat: FlatState, buffer: jax.Array, batches: Batch, steps: int, *store: PyTree
    ) -> FlatStepped:
        """`train_chunk` on a `FlatState`; with a `store`, `batches` are row indices into it."""
        if self.steps_one_by_one:
            return _one_by_one(
                self.flat_train_step_from if store else self.flat_train_step, flat, buffer, batches, steps, *store
            )
        # an accelerator syncs with the host after every iteration of a loop of unknown length, which costs as much
        # as a small step; the CPU does not, and one loop for all lengths makes partial chunks bit-identical
        if steps == _length(batches) and jax.default_backend() != "cpu":
            return (self._full_chunk_from if store else self._full_chunk)(flat, buffer, batches, *store)
        return (self._part_chunk_from if store else self._part_chunk)(flat, buffer, batches, np.int32(steps), *store)

    def check_indices(self, batch: Batch) -> None:
        """Raises if labels or token ids in `batch`, which may be the complete data set, are out of range."""
        check_range(self._indices, batch)

    def check_eval_indices(self, state: TrainState, batch: Batch, examples: Batch) -> None:
        """Raises if labels or token ids in `examples` are out of range for an evaluation of batches like `batch`."""
        if not self.debug:
            check_range(_uses(self._eval_inner, state, batch), examples)

    def out_of_range(self, batch: Batch) -> str:
        """The error message about indices in `batch` that are out of range; empty if none are."""
        return out_of_range(self._indices, batch)

    def _find_indices(self, state: TrainState, batch: Batch) -> None:
        if not self.debug:
            self._indices = _uses(self._train_inner, state, batch)
            self.index_ranges = ranges_of(self._indices, batch)
            self.check_indices(batch)

    def _result_shapes(self, function: Callable[..., Any], *args: Any) -> Any:
        # in debug mode user code gets values, never tracers, so it runs instead of being traced
        return _without_jit(function)(*args) if self.debug else jax.eval_shape(function, *args)

    def _blank(self, fmt: MetricBufferFormat, length: int) -> jax.Array:
        if self._is_shared:
            return self.store(np.zeros((length, fmt.width), np.uint32))
        return fmt.blank(length, None if self.layout is None else self.layout.replicated)

    def _step(self, state: TrainState, buffer: jax.Array, batch: Batch, store: PyTree = None) -> Stepped:
        batch = self._resharded(batch) if store is None else _select_rows(batch, store)
        state, report = self._train_inner(state, batch)
        metrics = _reported(report)
        buffer, loose = self._replicated((self._train_format or MetricBufferFormat.of(metrics)).append(buffer, metrics))
        return self._pinned(state), buffer, (loose, report.grads if self._keep_grads else None)

    def _complete_chunk(self, state: TrainState, buffer: jax.Array, batches: Batch, store: PyTree = None) -> Stepped:
        return self._chunk(state, buffer, batches, _length(batches), store)

    def _chunk(
        self, state: TrainState, buffer: jax.Array, batches: Batch, steps: jax.Array | int, store: PyTree = None
    ) -> Stepped:
        def at(index: Any) -> Batch:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), batches)

        def body(index: jax.Array, carry: Stepped) -> Stepped:
            state, buffer, kept = carry
            state, buffer, new = self._step(state, buffer, at(index), store)
            kept = jax.tree.map(lambda all, one: lax.dynamic_update_index_in_dim(all, one, index, 0), kept, new)
            return state, buffer, kept

        shapes = jax.eval_shape(lambda s, t, b: self._step(s, t, b, store)[2], state, buffer, jax.eval_shape(at, 0))
        kept = jax.tree.map(lambda x: jnp.zeros((_length(batches), *x.shape), x.dtype), shapes)
        return lax.fori_loop(0, steps, body, (state, buffer, kept))

    def _evaluate(self, state: TrainState, buffer: jax.Array, batch: Batch) -> tuple[jax.Array, Loose]:
        metrics = _evaluated(self._eval_inner(self._keyed(state, rows_written(buffer)), self._resharded(batch)))
        return self._replicated((self._eval_format or MetricBufferFormat.of(metrics)).append(buffer, metrics))

    def _predict(self, state: TrainState, number: jax.Array, batch: Batch) -> tuple[tuple[()], PyTree]:
        assert self._program.predict_step is not None
        # other compiled functions return a state first; outputs may have any structure, so an empty tuple is returned
        return (), self._replicated(self._program.predict_step(self._keyed(state, number), self._resharded(batch)))

    def _report(self, state: TrainState, batch: Batch) -> StepReport:
        report = self._train_inner(state, batch)[1]
        return report._replace(metrics=_reported(report))

    def _keyed(self, state: TrainState, number: jax.Array) -> TrainState:
        # each batch of an evaluation has its own key, the same in every evaluation
        root = state.key
        if self._eval_seed is not None:
            root = jax.random.key(self._eval_seed, impl=jax.random.key_impl(root))
        return state.replace(rng=key_data(jax.random.fold_in(root, number)))

    def _shardings(self, make: Callable[..., TrainState], *args: Any) -> Any:
        return None if self.layout is None else self.layout.state_shardings(jax.eval_shape(make, *args))

    def _placed(self, state: TrainState) -> TrainState:
        """A copy of `state` with its final sharding."""
        if self.layout is None:
            return copy_state(state)
        # transfer before copying: a copy first would be unsharded; copy, because some leaves may already be in place
        return copied(device_put(state, self.layout.state_shardings(state)))

    def _for_layout(self, step: Callable[..., Any]) -> Any:
        if self.layout is None:
            return jax.jit(step, inline=True)

        def traced(state: TrainState, batch: Batch) -> Any:
            # a new function: JAX caches traces by function, whatever the layout
            with tracing_for(self.layout):
                return step(state, batch)

        return jax.jit(traced, inline=True)

    @property
    def _is_shared(self) -> bool:
        return self.layout is not None and self.layout.batch_placement is not None

    def _resharded(self, batch: Batch) -> Batch:
        # processes that need the same rows each supplied some of them; they are gathered here
        placement = None if self.layout is None else self.layout.batch_placement
        if self.layout is None or placement is None or not placement.reshards:
            return batch
        return self.layout.constrain_rows(batch, 0)

    def _replicated(self, results: Any) -> Any:
        # every process reads all of it
        if self.layout is None or self.layout.batch_placement is None or self.debug:
            return results
        return lax.with_sharding_constraint(results, self.layout.replicated)

    def _pinned(self, state: TrainState) -> TrainState:
        # without a constraint the compiler may return a sharded parameter replicated
        if self.layout is None or self.debug:
            return state
        return lax.with_sharding_constraint(state, self.layout.state_shardings(state))

    def _compile(
        self, name: str, function: Callable[..., Any], donated: tuple[int, ...], *more: str
    ) -> Callable[..., Any]:
        if self.debug:
            return _flat_debug(name, _without_jit(function))
        return OomReporter(
            name,
            ("state", "number" if name == "predict_step" else "buffer", "batch", *more),
            function,
            compile=lambda traced: SharedExecutable(jax.jit(traced, donate_argnums=donated)),
            on_recompile=self._on_recompile,
            lenient=name in ("eval_step", "predict_step"),
            batch=lambda: self.describe_batch(),
        )


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
    return CompiledProgram(
        program,
        layout=layout,
        donate=donate,
        debug=debug,
        keep_grads=keep_grads,
        on_recompile=on_recompile,
        eval_seed=eval_seed,
    )


@jax.jit
def copied(arrays: PyTree) -> PyTree:
    """Copies of `arrays` in one dispatch; `copy_state` takes one per array, but compiles nothing."""
    return jax.tree.map(jnp.copy, arrays)


def _length(batches: Batch) -> int:
    return jax.tree.leaves(batches)[0].shape[0]


def _one_by_one(
    train_step: Callable[..., FlatStepped],
    flat: FlatState,
    buffer: jax.Array,
    batches: Batch,
    steps: int,
    *store: PyTree,
) -> FlatStepped:
    """A chunk with one dispatch per step."""
    kept = []
    for index in range(steps):
        batch = jax.tree.map(lambda x, index=index: x[index], batches)
        flat, buffer, each = train_step(flat, buffer, batch, *store)
        kept.append(each)
    return flat, buffer, jax.tree.map(lambda *each: jnp.stack(each), *kept)


def uses(jaxpr: Any, primitive: str) -> bool:
    """Whether a traced function contains `primitive`, also in nested functions.

    >>> uses(jax.make_jaxpr(jax.jit(jnp.sin))(1.0), "sin"), uses(jax.make_jaxpr(jnp.sin)(1.0), "cos")
    (True, False)
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if any(equation.primitive.name == primitive for equation in jaxpr.eqns):
        return True
    params = [value for equation in jaxpr.eqns for value in equation.params.values()]
    parts = [part for value in params for part in (value if isinstance(value, tuple) else (value,))]
    return any(uses(part, primitive) for part in parts if hasattr(getattr(part, "jaxpr", part), "eqns"))


def _select_rows(rows: jax.Array, store: PyTree) -> Batch:
    """The batch of these rows of `store`; the host computed the indices, so none is out of bounds."""
    batch = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), store)
    return resized(batch, len(rows))


def _uses(inner: Any, state: TrainState, batch: Batch) -> frozenset[Use]:
    """The entries of a batch that a step uses as indices."""
    jaxpr = inner.trace(state, batch).jaxpr
    # counted from the end: constants that the step closes over come first
    return index_uses(jaxpr, len(jaxpr.jaxpr.invars) - len(jax.tree.leaves(batch)))


def _kinds(*trees: PyTree) -> tuple[Any, ...]:
    """The structure of `trees`, and the shapes and dtypes of their leaves."""
    leaves, structure = jax.tree.flatten(trees)
    return structure, *((getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def _reported(report: StepReport) -> Metrics:
    return report.metrics.only(LogMode.TRAIN)


def _evaluated(metrics: Metrics) -> Metrics:
    return metrics.only(LogMode.VAL, LogMode.TEST)


def _start_data(*functions: Any) -> None:
    for function in functions:
        if isinstance(function, RecompileGuard):  # not in debug mode
            function.start_data()


def _edited(state: TrainState, fn: Callable[..., TrainState], values: tuple[PyTree, ...]) -> TrainState:
    """`fn(state, *values)`, checked to be a state of the same kind."""
    new = fn(state, *values)
    if not isinstance(new, TrainState):
        raise TypeError(f"An edit must return a `TrainState`, got a {type(new).__name__}. Return `state.replace(…)`.")
    before, after = (jax.tree_util.tree_flatten_with_path(one) for one in (state, new))
    if before[1] != after[1]:
        old_paths, new_paths = ([jax.tree_util.keystr(path) for path, _ in one[0]] for one in (before, after))
        odd = [f"lacks state{path}" for path in old_paths if path not in new_paths]
        odd += [f"has a new state{path}" for path in new_paths if path not in old_paths]
        raise ValueError(f"An edit must keep the structure of the state, but its result {(odd or ['differs'])[0]}.")
    leaves = []
    for (path, old), (_, leaf) in zip(before[0], after[0], strict=True):
        array = jnp.asarray(leaf)
        if (array.shape, array.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"An edit must keep shapes and dtypes, but changes state{jax.tree_util.keystr(path)} from "
                f"{old.dtype}{list(old.shape)} to {array.dtype}{list(array.shape)}. Cast it: `x.astype({old.dtype})`."
            )
        leaves.append(jnp.asarray(array, old.dtype))  # a weak type would compile the step again
    for name in ("step", "rng"):
        if getattr(new, name) is not getattr(state, name):
            raise ValueError(
                f"An edit must not change `state.{name}`, which the loop counts on. Change other fields only, as in "
                "`state.replace(params=…)`."
            )
    return jax.tree.unflatten(before[1], leaves)


def _materialized(name: str, make: Callable[..., TrainState], shardings: Any, *args: Any) -> TrainState:
    """A new state, after waiting for it: running out of memory shows only then."""
    try:
        return jax.block_until_ready(SharedExecutable(jax.jit(make, out_shardings=shardings), shardings)(*args))
    except jax.errors.JaxRuntimeError as error:
        raise explain_oom(error, name, jax.eval_shape(make, *args), None)  # noqa: B904 - the same error, or one from it


def _flat_debug(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(flat: FlatState, *more: Any) -> Any:
        try:
            first, *rest = jax.block_until_ready(function(flat.state, *more))
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, name, flat.state, more[1])  # noqa: B904 - the same error, or one from it
        return (FlatState.of(first) if isinstance(first, TrainState) else first, *rest)

    return run


def _without_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run
