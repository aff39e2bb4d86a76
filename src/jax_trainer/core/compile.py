"""`compile_program` and `compiled_function`: the one place that calls `jax.jit`."""

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

Loose = dict[str, jax.Array]  # metrics that are too large for the tape
Stepped = tuple[TrainState, jax.Array, tuple[Loose, PyTree]]
FlatStepped = tuple[FlatState, jax.Array, tuple[Loose, PyTree]]


def compiled_function(function: Callable[..., Any], *, static: tuple[str, ...] = ()) -> Any:
    """`function` compiled, once for every shape of its arrays and every value of the arguments called `static`.

    For what is computed beside training, such as drawing samples: a module is passed as an argument, so that new
    weights do not compile again.
    """
    return jax.jit(function, static_argnames=static)


class CompiledProgram:
    """A program ready to run. Steps take the tape and return it; everything else is as in `Program`.

    `train_step`, `train_chunk` and `eval_step` are for people; the loop passes held states to `advance`,
    `advance_chunk` and `judge`, which do the same.
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
        self._given_layout, self._changed = layout, {}
        self._program, self._keep_grads, self._eval_seed = program, keep_grads, eval_seed
        self._train_format: MetricBufferFormat | None = None  # as `train_buffer` and `eval_buffer` handed them out last
        self._eval_format: MetricBufferFormat | None = None
        self._indices: frozenset[Use] = frozenset()  # what of a batch training steps use as indices
        self.index_ranges = ""  # the same, in words
        self._eval_buffers: dict[
            Any, tuple[MetricBufferFormat, jax.Array]
        ] = {}  # by shapes and dtypes of what is evaluated
        self._on_recompile: OnRecompile = on_recompile
        # XLA on the CPU runs a convolution in a loop on one core, without its fast library: 20 times slower (jax 0.12)
        self.steps_one_by_one = False
        self.describe_batch: Callable[[], str] = lambda: ""  # tells which batch the loop is at, for warnings
        # inner functions are traced once, for the tape's format and for the step; they vanish in the outer ones
        self._train_inner: Any = program.train_step if debug else self._for_layout(program.train_step)
        self._eval_inner = program.eval_step if debug else self._for_layout(program.eval_step)
        donated = (0,) if donate else ()
        self.flat_train_step: Callable[..., FlatStepped] = self._compile("train_step", self._step, donated)
        self._full_chunk = self._compile("train_chunk", self._whole_chunk, donated)
        self._part_chunk = self._compile("train_chunk", self._chunk, donated, "steps")
        # the same on rows of stored data; apart, so that each kind of feeding counts its own compilations
        self.flat_train_step_from: Callable[..., FlatStepped] = self._compile(
            "train_step", self._step, donated, "store"
        )
        self._full_chunk_from = self._compile("train_chunk", self._whole_chunk, donated, "store")
        self._part_chunk_from = self._compile("train_chunk", self._chunk, donated, "steps", "store")
        self.flat_eval_step: Callable[..., tuple[jax.Array, Loose]] = self._compile("eval_step", self._evaluate, ())
        self._ask = self._compile("predict_step", self._predict, ())

    def transformed(self, by: Any, change: Callable[[Program], Program]) -> "CompiledProgram":
        """The program that `change` makes of this one, compiled in the same way; made once for every object `by`."""
        if id(by) not in self._changed:
            made = CompiledProgram(
                change(self._program), layout=self._given_layout, eval_seed=self._eval_seed, **self._options
            )
            self._changed[id(by)] = by, made  # held, so that its id stays its own
        return self._changed[id(by)][1]

    def init(self, key: jax.Array, example: Batch) -> TrainState:
        """A fresh state, its shapes taken from an example batch; with a layout, made where it will live.

        Where several processes share its devices, all must ask, and the example of the first one counts.
        """
        if self._is_shared:
            example = primary_example(example)
        init, given = self._program.init, self._program.initial_variables
        if self.layout is not None and given is not None and not self.debug:
            return self.init_from_params(
                key, *given(key, example)
            )  # what is made around these weights is made where it will live
        if self.debug or not self._program.init_is_traced:
            return self._placed(init(key, example))
        example = jax.tree.map(jnp.asarray, example)
        return _made("init", init, self._shardings(init, key, example), key, example)

    def init_from_params(self, key: jax.Array, params: PyTree, model_state: PyTree) -> TrainState:
        """A fresh state around these weights, which stay the caller's; with a layout, placed as it says."""
        begin = self._program.init_from_params
        if begin is None:
            raise ValueError(
                "This program cannot begin from given weights: it has no `begin`, because it goes on from a state of "
                "its own or was made without one. Make it with an adapter (`linen_program`, `nnx_program`, …), or add "
                "one: `program._replace(init_from_params=…)`."
            )
        if self.debug:
            return self._placed(begin(key, params, model_state))
        shardings = self._shardings(begin, key, params, model_state)
        if shardings is not None:  # they may come from other devices than those of the layout
            there = (shardings.rng, shardings.params, shardings.model_state)
            key, params, model_state = device_put((key, params, model_state), there)
        return _made("begin", begin, shardings, key, params, model_state)  # which returns nothing it was given

    def shapes(self, key: jax.Array, example: Batch) -> tuple[TrainState, Metrics, Metrics]:
        """The shapes of a fresh state, and of what training and evaluating it report; nothing is computed.

        Steps that are traced here are not traced again when they run on a batch of the same shapes.
        """
        with explaining(example):
            state = jax.eval_shape(self._program.init, key, example)
            if self.layout is not None:
                self.layout.state_shardings(state)  # what cannot be laid out shows here
            trained = _reported(jax.eval_shape(self._train_inner, state, example)[1])
            self._find_indices(state, example)
            return state, trained, self.eval_shapes(state, example)

    def eval_shapes(self, state: TrainState, batch: Batch) -> Metrics:
        """The shapes of what evaluating `state` on `batch` reports; both may be shapes themselves."""
        with explaining(batch):
            self.check_eval_indices(state, batch, batch)
            return _evaluated(jax.eval_shape(self._eval_inner, state, batch))

    def predict(self, state: TrainState, batch: Batch, number: int = 0) -> PyTree:
        """What the model of `state` makes of a batch; what is random belongs to its `number`, as in an evaluation."""
        return self.flat_predict_step(FlatState.of(state), batch, number)

    def flat_predict_step(self, held: FlatState, batch: Batch, number: int) -> PyTree:
        """As `predict`, on a held state."""
        if self._program.predict_step is None:
            raise ValueError(
                "This program cannot predict: it knows a loss, not a model. Make it with `linen_program` or "
                "`nnx_program`, or say how: `program._replace(predict_step=lambda state, batch: …)`."
            )
        if not number:
            _begin(self._ask)
        return self._ask(held, np.uint32(number), batch)[1]

    def report(self, state: TrainState, batch: Batch) -> StepReport:
        """What a step on this batch, all of it, would tell, gradients and all; `state` stays as it is."""
        if self.debug:
            return _without_jit(self._told)(state, batch)
        return jax.jit(self._told)(state, self.place(batch, stacked=False, whole=True))

    def place(self, batch: Batch, *, stacked: bool, whole: bool = False, ahead: bool = False) -> Batch:
        """`batch` where the step wants it: as it is, or spread over the layout's devices.

        Where several processes share them, `batch` is this process's part, or, if `whole`, all of it. Without a layout
        the step itself would fetch it; `ahead` of the step that is done here, except on the CPU, where a numpy array
        can be used as it is.
        """
        if self.layout is not None:
            return self.layout.place(batch, stacked=stacked, whole=whole)
        return jax.device_put(batch) if ahead and jax.default_backend() != "cpu" else batch

    def store(self, arrays: PyTree) -> PyTree:
        """`arrays`, which every process has, on every device, for steps that pick their batches out of them."""
        if self.layout is not None and self.layout.batch_placement is not None:
            return self.layout.batch_placement.everywhere(arrays)
        return jax.device_put(arrays, None if self.layout is None else self.layout.replicated)

    def train_buffer(self, state: TrainState, batch: Batch, length: int) -> tuple[MetricBufferFormat, jax.Array]:
        """The format of what training steps report, and a blank tape for the last `length` of them."""
        _begin(self.flat_train_step, self._full_chunk, self._part_chunk)
        _begin(self.flat_train_step_from, self._full_chunk_from, self._part_chunk_from)
        if not self.debug:
            self._find_indices(state, batch)
            convolves = uses(self._train_inner.trace(state, batch).jaxpr, "conv_general_dilated")
            self.steps_one_by_one = convolves and jax.default_backend() == "cpu"
        self._train_format = MetricBufferFormat.of(_reported(self._outline(self._train_inner, state, batch)[1]))
        return self._train_format, self._blank(self._train_format, length)

    def eval_buffer(self, state: TrainState, batch: Batch, length: int) -> tuple[MetricBufferFormat, jax.Array]:
        """The same for evaluation."""
        _begin(self.flat_eval_step)
        leaves, structure = jax.tree.flatten((state, batch))
        shapes = [(getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
        kind = (length, structure, *shapes)
        if kind not in self._eval_buffers:  # small sets are evaluated often, and tracing takes longer than they do
            self.check_eval_indices(state, batch, batch)
            fmt = MetricBufferFormat.of(_evaluated(self._outline(self._eval_inner, state, batch)))
            self._eval_buffers[kind] = fmt, self._blank(fmt, length)  # nobody writes to it: evaluations donate nothing
        self._eval_format = self._eval_buffers[kind][0]
        return self._eval_buffers[kind]

    def train_step(self, state: TrainState, buffer: jax.Array, batch: Batch) -> Stepped:
        """One step: the state and the tape after it, and (large metrics, gradients) if there are any."""
        held, buffer, kept = self.flat_train_step(FlatState.of(state), buffer, batch)
        return held.state, buffer, kept

    def train_chunk(self, state: TrainState, buffer: jax.Array, batches: Batch, steps: int) -> Stepped:
        """`steps` steps in one dispatch; `batches` are stacked, and those after `steps` are not looked at."""
        held, buffer, kept = self.flat_train_chunk(FlatState.of(state), buffer, batches, steps)
        return held.state, buffer, kept

    def eval_step(self, state: TrainState, buffer: jax.Array, batch: Batch) -> tuple[jax.Array, Loose]:
        """Judges `state` on one batch: the tape after it, and large metrics if there are any."""
        return self.flat_eval_step(FlatState.of(state), buffer, batch)

    def flat_train_chunk(
        self, held: FlatState, buffer: jax.Array, batches: Batch, steps: int, *store: PyTree
    ) -> FlatStepped:
        """As `train_chunk`, on a held state; with a `store`, `batches` are the rows of it that make them."""
        if self.steps_one_by_one:
            return _one_by_one(
                self.flat_train_step_from if store else self.flat_train_step, held, buffer, batches, steps, *store
            )
        # an accelerator asks the host after every turn of a loop whose length it does not know, which costs as much
        # as a small step; the CPU does not, and one loop for all lengths makes cut chunks equal bit for bit
        if steps == _length(batches) and jax.default_backend() != "cpu":
            return (self._full_chunk_from if store else self._full_chunk)(held, buffer, batches, *store)
        return (self._part_chunk_from if store else self._part_chunk)(held, buffer, batches, np.int32(steps), *store)

    def check_indices(self, batch: Batch) -> None:
        """Refuses labels and token ids that are out of range in `batch`, or in all examples at once."""
        check_range(self._indices, batch)

    def check_eval_indices(self, state: TrainState, batch: Batch, examples: Batch) -> None:
        """Refuses labels and token ids in `examples` that an evaluation of batches like `batch` cannot use."""
        if not self.debug:
            check_range(_uses(self._eval_inner, state, batch), examples)

    def out_of_range(self, batch: Batch) -> str:
        """What is wrong with the integers of a batch that training steps use as indices; empty if nothing is."""
        return out_of_range(self._indices, batch)

    def _find_indices(self, state: TrainState, batch: Batch) -> None:
        if not self.debug:
            self._indices = _uses(self._train_inner, state, batch)
            self.index_ranges = ranges_of(self._indices, batch)
            self.check_indices(batch)

    def _outline(self, function: Callable[..., Any], *args: Any) -> Any:
        # in debug mode user code sees values, never tracers, so it is run instead of traced
        return _without_jit(function)(*args) if self.debug else jax.eval_shape(function, *args)

    def _blank(self, fmt: MetricBufferFormat, length: int) -> jax.Array:
        if self._is_shared:
            return self.store(np.zeros((length, fmt.width), np.uint32))
        return fmt.blank(length, None if self.layout is None else self.layout.replicated)

    def _step(self, state: TrainState, buffer: jax.Array, batch: Batch, store: PyTree = None) -> Stepped:
        batch = self._spread(batch) if store is None else _picked(batch, store)
        state, report = self._train_inner(state, batch)
        metrics = _reported(report)
        buffer, loose = self._everywhere((self._train_format or MetricBufferFormat.of(metrics)).append(buffer, metrics))
        return self._pinned(state), buffer, (loose, report.grads if self._keep_grads else None)

    def _whole_chunk(self, state: TrainState, buffer: jax.Array, batches: Batch, store: PyTree = None) -> Stepped:
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
        metrics = _evaluated(self._eval_inner(self._keyed(state, rows_written(buffer)), self._spread(batch)))
        return self._everywhere((self._eval_format or MetricBufferFormat.of(metrics)).append(buffer, metrics))

    def _predict(self, state: TrainState, number: jax.Array, batch: Batch) -> tuple[tuple[()], PyTree]:
        assert self._program.predict_step is not None
        # the empty tuple stands where other compiled functions return a state: outputs may look like anything
        return (), self._everywhere(self._program.predict_step(self._keyed(state, number), self._spread(batch)))

    def _told(self, state: TrainState, batch: Batch) -> StepReport:
        report = self._train_inner(state, batch)[1]
        return report._replace(metrics=_reported(report))

    def _keyed(self, state: TrainState, number: jax.Array) -> TrainState:
        # each batch of an evaluation has a key of its own, the same in every evaluation
        root = state.key
        if self._eval_seed is not None:
            root = jax.random.key(self._eval_seed, impl=jax.random.key_impl(root))
        return state.replace(rng=key_data(jax.random.fold_in(root, number)))

    def _shardings(self, make: Callable[..., TrainState], *args: Any) -> Any:
        return None if self.layout is None else self.layout.state_shardings(jax.eval_shape(make, *args))

    def _placed(self, state: TrainState) -> TrainState:
        """The values of `state`, which stays as it is, where they will live."""
        if self.layout is None:
            return copy_state(state)
        # first to its place: a copy beforehand would be whole; afterwards, because some of it may have been there
        return copied(device_put(state, self.layout.state_shardings(state)))

    def _for_layout(self, step: Callable[..., Any]) -> Any:
        if self.layout is None:
            return jax.jit(step, inline=True)

        def traced(state: TrainState, batch: Batch) -> Any:
            # a function of its own: JAX traces a function once for all who compile it, whatever their layouts
            with tracing_for(self.layout):
                return step(state, batch)

        return jax.jit(traced, inline=True)

    @property
    def _is_shared(self) -> bool:
        return self.layout is not None and self.layout.batch_placement is not None

    def _spread(self, batch: Batch) -> Batch:
        # where several processes need the same rows, each fed some of them only, and they are brought together here
        feeding = None if self.layout is None else self.layout.batch_placement
        if self.layout is None or feeding is None or not feeding.reshards:
            return batch
        return self.layout.constrain_rows(batch, 0)

    def _everywhere(self, results: Any) -> Any:
        # every process is to read all of it
        if self.layout is None or self.layout.batch_placement is None or self.debug:
            return results
        return lax.with_sharding_constraint(results, self.layout.replicated)

    def _pinned(self, state: TrainState) -> TrainState:
        # left to itself the compiler may hand back a sharded parameter replicated
        if self.layout is None or self.debug:
            return state
        return lax.with_sharding_constraint(state, self.layout.state_shardings(state))

    def _compile(
        self, name: str, function: Callable[..., Any], donated: tuple[int, ...], *more: str
    ) -> Callable[..., Any]:
        if self.debug:
            return _held(name, _without_jit(function))
        return OomReporter(
            name,
            ("state", "number" if name == "predict_step" else "tape", "batch", *more),
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
    """Makes `program` ready to run.

    Args:
        layout: which devices hold what; None is one device.
        donate: let a step reuse the memory of the state it is given, which is gone afterwards.
        debug: run step by step in Python, without `jax.jit`, so that breakpoints and prints work.
        keep_grads: hand out the gradients of every step.
        on_recompile: "warn", "error" or "ignore" when a step has to be compiled again.
        eval_seed: what is random in evaluations belongs to this seed and the number of the batch; None takes the
            root key of the state, and so the seed of training.
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
    """The same values in new arrays, all in one dispatch; `copy_state` takes one for each, and compiles nothing."""
    return jax.tree.map(jnp.copy, arrays)


def _length(batches: Batch) -> int:
    return jax.tree.leaves(batches)[0].shape[0]


def _one_by_one(
    advance: Callable[..., FlatStepped], held: FlatState, buffer: jax.Array, batches: Batch, steps: int, *store: PyTree
) -> FlatStepped:
    """A chunk as so many dispatches."""
    kept = []
    for index in range(steps):
        batch = jax.tree.map(lambda x, index=index: x[index], batches)
        held, buffer, each = advance(held, buffer, batch, *store)
        kept.append(each)
    return held, buffer, jax.tree.map(lambda *each: jnp.stack(each), *kept)


def uses(jaxpr: Any, primitive: str) -> bool:
    """Whether a traced function, or one inside it, does this.

    >>> uses(jax.make_jaxpr(jax.jit(jnp.sin))(1.0), "sin"), uses(jax.make_jaxpr(jnp.sin)(1.0), "cos")
    (True, False)
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if any(equation.primitive.name == primitive for equation in jaxpr.eqns):
        return True
    params = [value for equation in jaxpr.eqns for value in equation.params.values()]
    parts = [part for value in params for part in (value if isinstance(value, tuple) else (value,))]
    return any(uses(part, primitive) for part in parts if hasattr(getattr(part, "jaxpr", part), "eqns"))


def _picked(rows: jax.Array, store: PyTree) -> Batch:
    """The batch of these rows; the host made them, so none is out of bounds."""
    batch = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), store)
    return resized(batch, len(rows))


def _uses(inner: Any, state: TrainState, batch: Batch) -> frozenset[Use]:
    """What of a batch a step uses as indices."""
    jaxpr = inner.trace(state, batch).jaxpr
    # from the end: constants that the step closes over come first
    return index_uses(jaxpr, len(jaxpr.jaxpr.invars) - len(jax.tree.leaves(batch)))


def _reported(report: StepReport) -> Metrics:
    return report.metrics.only(LogMode.TRAIN)


def _evaluated(metrics: Metrics) -> Metrics:
    return metrics.only(LogMode.VAL, LogMode.TEST)


def _begin(*functions: Any) -> None:
    for function in functions:
        if isinstance(function, RecompileGuard):  # not in debug mode
            function.begin()


def _made(name: str, make: Callable[..., TrainState], shardings: Any, *args: Any) -> TrainState:
    """A fresh state, once it is there: whether it fits into the memory shows only then."""
    try:
        return jax.block_until_ready(SharedExecutable(jax.jit(make, out_shardings=shardings), shardings)(*args))
    except jax.errors.JaxRuntimeError as error:
        raise explain_oom(error, name, jax.eval_shape(make, *args), None)  # noqa: B904 - the same error, or one from it


def _held(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(held: FlatState, *more: Any) -> Any:
        try:
            first, *rest = jax.block_until_ready(function(held.state, *more))
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, name, held.state, more[1])  # noqa: B904 - the same error, or one from it
        return (FlatState.of(first) if isinstance(first, TrainState) else first, *rest)

    return run


def _without_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run
