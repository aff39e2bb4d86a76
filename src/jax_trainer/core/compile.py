"""How functions are compiled and called: the only module that calls `jax.jit`.

Executables are shared: functions that lower to the same text are compiled once per process. A model, a loss and an
optimizer created again for another seed, fold or trial are new functions to JAX, which would compile them again,
although their lowered text is identical. A function can be compiled ahead, by a thread and from shapes; its first call
then waits for that.
"""

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core.initialisation import Split, split
from jax_trainer.core.memory import explain_oom
from jax_trainer.core.metric_buffer import MetricBuffer
from jax_trainer.core.recompile import OnRecompile, RecompileGuard
from jax_trainer.core.state import FlatState, TrainState
from jax_trainer.core.tracing import tracing
from jax_trainer.diagnostics.jax_internals import takes_constants
from jax_trainer.diagnostics.leaves import Batch, PyTree
from jax_trainer.diagnostics.ledger import COMPILE, phase
from jax_trainer.sharding.layout import Layout

MOST = 256  # executables in the cache
THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))  # that compile
MOST_CONSTANT_BYTES = 1 << 24  # of constants in the code: larger ones are not worth comparing
_OPTIONS = (  # of JAX that change compilation without showing in the lowered text
    "jax_default_device",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)
# least recently used first; a future, because a thread may be compiling it
_kept: "OrderedDict[Hashable, Future[Callable[..., Any]]]" = OrderedDict()
_lock = threading.Lock()

# (state, metric buffer, batch, number) -> (new state or None, new buffer, anything else). The number is that of the
# steps of a chunk, or of the batch.
StepFunction = Callable[[TrainState, MetricBuffer, Batch, Any], tuple[TrainState | None, MetricBuffer, Any]]


def compiled_function(function: Callable[..., Any], *, static: tuple[str, ...] = ()) -> Any:
    """`function` compiled with `jax.jit`, once per shape of its arrays and value of the arguments named in `static`.

    For computations outside training, such as sampling: pass the module as an argument, so that new weights do not
    recompile.
    """
    return jax.jit(function, static_argnames=static)


def shared_function(function: Callable[..., Any], *, donate: bool) -> "SharedFunction":
    """`function` compiled, with executables shared by equal functions; `donate`: its first argument is reused."""
    return SharedFunction(jax.jit(function, donate_argnums=(0,) if donate else ()))


@jax.jit
def copied(arrays: PyTree) -> PyTree:
    """Copies of `arrays` in one dispatch; `copy_state` takes one per array, but compiles nothing."""
    return jax.tree.map(jnp.copy, arrays)


def without_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, in which nothing is compiled: breakpoints and prints in the user's code see values."""

    def run(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    return run


class StateFunction:
    """A function that returns a new state, compiled in pieces by several threads; see `initialisation`.

    Args:
        make: the function, always called with arguments of the same kind.
        shardings: of its result.
    """

    def __init__(self, make: Callable[..., TrainState], shardings: Any = None) -> None:
        self._make, self._shardings = make, shardings
        self._whole = SharedFunction(jax.jit(make, out_shardings=shardings), shardings)
        self._pieces: list[tuple[SharedFunction, tuple[int, ...]]] | None = None
        self._split: Split | None = None

    def __call__(self, *args: Any) -> TrainState:
        """The state, after waiting for it: running out of memory shows only then."""
        try:
            return jax.block_until_ready(self._computed(*args))
        except jax.errors.JaxRuntimeError as error:
            shapes = jax.eval_shape(self._make, *args)
            raise explain_oom(error, "init", shapes, None)  # noqa: B904 - the same error, or one from it

    def _computed(self, *args: Any) -> TrainState:
        with ThreadPoolExecutor(THREADS) as pool:
            values = self.compile_ahead(pool, *args)
            if self._split is None:
                return self._whole(*args)
            leaves = [program(*(values[number] for number in inputs))[0] for program, inputs in self._pieces or ()]
            return self._split.structure.unflatten(leaves)

    def compile_ahead(self, pool: Executor, *args: Any) -> Sequence[Any]:
        """Traces the function, and has `pool` compile its pieces; returns the values that they are computed from."""
        if self._pieces is None:
            self._split, self._pieces = self._traced(*args)
        if self._split is None:
            self._whole.compile_ahead(pool, *args)
            return ()
        values = self._split.keys(*args)
        for program, inputs in self._pieces:
            program.compile_ahead(pool, *(values[number] for number in inputs))
        return values

    def _traced(self, *args: Any) -> tuple[Split | None, list[tuple["SharedFunction", tuple[int, ...]]]]:
        is_local = all(sharding.is_fully_addressable for sharding in jax.tree.leaves(self._shardings))
        found = split(self._make, *args) if is_local else None
        if found is None:
            return None, []
        shardings = [None] * len(found.pieces) if self._shardings is None else jax.tree.leaves(self._shardings)
        programs: dict[Any, SharedFunction] = {}
        for piece, sharding in zip(found.pieces, shardings, strict=True):
            if (piece.kind, sharding) not in programs:
                results = None if sharding is None else [sharding]
                programs[piece.kind, sharding] = SharedFunction(jax.jit(piece.init, out_shardings=results), results)
        pairs = zip(found.pieces, shardings, strict=True)
        return found, [(programs[piece.kind, sharding], piece.inputs) for piece, sharding in pairs]


def traced_for(layout: Layout | None, step: Callable[[TrainState, Batch], Any]) -> Any:
    """`step` with the sharding constraints of `layout`; traced once, and inlined into functions that call it."""
    if layout is None:
        return jax.jit(step, inline=True)

    def traced(state: TrainState, batch: Batch) -> Any:
        # a new function: JAX caches traces by function, whatever the layout
        with tracing(placer=layout):
            return step(state, batch)

    return jax.jit(traced, inline=True)


class CompiledStep:
    """A compiled `StepFunction` that takes and returns a `FlatState`; one executable for every kind of arguments.

    Recompilations are reported, out-of-memory errors explained. The format of the metric buffer and the structure of
    the state are static. Without a new state it returns (new buffer, anything else).

    Args:
        name: of the step, for messages.
        function: the step.
        donate: delete the input state and reuse its memory.
        on_recompile, lenient, describe_batch: see `RecompileGuard`.
    """

    def __init__(
        self,
        name: str,
        function: StepFunction,
        *,
        donate: bool = False,
        on_recompile: OnRecompile = "warn",
        lenient: bool = False,
        describe_batch: Callable[[], str] = str,
    ) -> None:
        self._name, self._function, self._donated = name, function, (0,) if donate else ()
        self._guard = RecompileGuard(name, on_recompile, lenient=lenient, describe_batch=describe_batch)
        self._by_static: dict[Any, SharedFunction] = {}
        self._structure: Any = None  # these three are of the last call
        self._format: Any = None
        self._shared: Any = None
        self._steady: Callable[..., Any] | None = None  # the executable if there is one only and nothing to check

    def __call__(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any = None) -> Any:
        """Runs the step; compiles it first for a new kind of arguments."""
        structure, fmt, results = flat.structure, buffer.format, None
        try:
            if self._steady is not None and structure is self._structure and fmt is self._format:
                try:
                    results = self._steady(flat.leaves, buffer.rows, batch, number)
                except (TypeError, ValueError):  # executables run no Python: these are arguments of another kind
                    self._steady = None
            if results is None:
                results = self._run(flat, buffer, batch, number)
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, self._name, flat.state, batch)  # noqa: B904 - the same error, or one from it
        leaves, rows, more = results
        if leaves is None:
            return MetricBuffer(rows, fmt), more
        return FlatState(leaves, structure), MetricBuffer(rows, fmt), more

    def compile_ahead(
        self, pool: Executor, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any = None
    ) -> None:
        """Traces the step for such arguments, and has it compiled by `pool`; a call with them waits for that.

        The leaves of `flat` may be shapes, with a sharding if those of the call will be committed.
        """
        shared = self._select(flat.structure, buffer.format)
        shared.compile_ahead(pool, flat.leaves, buffer.rows, batch, number)

    def start_data(self, *, compiles: bool = False) -> None:
        """Starts a new data set, whose batches may differ in kind from those before; see `RecompileGuard`."""
        self._guard.start_data(compiles=compiles)
        self._steady = None

    def lowered(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any = None) -> Any:
        """What a call with such arguments, arrays or shapes, would compile; the step itself stays as it is."""
        jitted = self._jitted(flat.structure, buffer.format)
        return jitted.lower(flat.leaves, buffer.rows, batch, number)

    @property
    def compilations(self) -> int:
        """The number of signatures compiled so far."""
        return self._guard.compilations

    def _select(self, structure: Any, fmt: Any) -> "SharedFunction":
        if (structure, fmt) not in self._by_static:
            self._by_static[structure, fmt] = SharedFunction(self._jitted(structure, fmt))
        return self._by_static[structure, fmt]

    def _run(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any) -> Any:
        """Selects the executable for these arguments, runs it, and reports if it had to be compiled."""
        if flat.structure is not self._structure or buffer.format is not self._format:
            self._structure, self._format = flat.structure, buffer.format
            self._shared = self._select(flat.structure, buffer.format)
        shared, compilations = self._shared, self._shared.compilations
        with self._guard.watching(flat, buffer, batch, number):
            started = time.perf_counter()
            results = shared(flat.leaves, buffer.rows, batch, number)
            if shared.compilations != compilations:
                self._guard.record(time.perf_counter() - started)
                # the CPU allocates after the call has returned: without waiting, the error shows at a later batch
                jax.block_until_ready(results)
        self._steady = None if self._guard.is_strict else shared.only_one
        return results

    def _jitted(self, structure: Any, fmt: Any) -> Any:
        def traced(leaves: list[jax.Array], rows: jax.Array, batch: Batch, number: Any) -> Any:
            self._guard.check()
            state, buffer, more = self._function(structure.unflatten(leaves), MetricBuffer(rows, fmt), batch, number)
            return None if state is None else _leaves(state, structure), buffer.rows, more

        traced.__name__ = self._name  # in profiles and messages of JAX
        return jax.jit(traced, donate_argnums=self._donated)  # a new one: JAX caches traces by function


class SharedFunction:
    """A `jax.jit` function whose executables, one for each kind of arguments, are shared with equal functions."""

    def __init__(self, jitted: Any, out_shardings: Any = None) -> None:
        self._jitted, self._outputs, self._is_shared = jitted, out_shardings, True
        self._by_kind: dict[Any, Callable[..., Any]] = {}
        self._ahead: dict[Any, Future[Callable[..., Any]]] = {}

    @property
    def compilations(self) -> int:
        """The number of executables used, compiled here or elsewhere."""
        return len(self._by_kind) + self._jitted._cache_size()

    @property
    def only_one(self) -> Callable[..., Any] | None:
        """The executable if there is exactly one, which compares its arguments itself, faster than `kind_of`."""
        return next(iter(self._by_kind.values())) if self._is_shared and len(self._by_kind) == 1 else None

    def __call__(self, *args: Any) -> Any:
        """Runs the function with positional arguments; compiles it first for a new kind of them."""
        only = self.only_one
        if only is not None:
            try:
                return only(*args)
            except (TypeError, ValueError):  # executables run no Python: the arguments do not fit
                pass
        if self._is_shared:
            kind = kind_of(*args)
            executable = self._by_kind.get(kind)
            if executable is None:
                executable = self._by_kind[kind] = self._compiled(kind, *args)
                self._is_shared = executable is not self._jitted
            if self._is_shared and executable is not only:
                try:
                    return executable(*args)
                except (TypeError, ValueError):
                    pass
        return self._jitted(*args)

    def compile_ahead(self, pool: Executor, *args: Any) -> None:
        """Traces the function for such arguments, or their shapes, and has it compiled by `pool`."""
        kind = kind_of(*args)
        if not self._is_shared or kind in self._by_kind or kind in self._ahead:
            return
        found = shared_executable(self._jitted, *args, out_shardings=self._outputs, pool=pool)
        if found is not None:
            self._ahead[kind] = found

    def _compiled(self, kind: Any, *args: Any) -> Callable[..., Any]:
        if kind in self._ahead:
            try:
                with phase(COMPILE):
                    return self._ahead.pop(kind).result()
            except (CancelledError, Exception):
                pass  # compiled again below, where it fails as without a thread
        found = shared_executable(self._jitted, *args, out_shardings=self._outputs)
        return self._jitted if found is None else found.result()


def shared_executable(
    jitted: Any, *args: Any, out_shardings: Any = None, pool: Executor | None = None
) -> "Future[Callable[..., Any]] | None":
    """The executable of a `jax.jit` function for such arguments, shared with functions of the same lowered text.

    It raises a TypeError or ValueError for other arguments than those of the function that was compiled first. Returns
    None for what cannot be shared: callbacks, NaN debugging, large constants, devices of other processes.

    Args:
        jitted: the function.
        args: its arguments, or their shapes, with a sharding if the arguments will be committed.
        out_shardings: of the results.
        pool: compiles it in another thread; None: it is compiled when this returns.
    """
    config: Any = jax.config
    debugs = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
    shardings = [sharding for leaf in jax.tree.leaves(args) if (sharding := _committed(leaf))]
    outputs = jax.tree.leaves(out_shardings)
    if debugs or not all(sharding.is_fully_addressable for sharding in (*shardings, *outputs)):
        return None
    traced = jitted.trace(*args)
    constants = sum(getattr(const, "nbytes", 0) for const in traced.jaxpr.consts)
    if traced.jaxpr.effects or constants > MOST_CONSTANT_BYTES:
        return None
    lowered = traced.lower()
    text = lowered.as_text()
    # constants that JAX passes as arguments are not in the text; callbacks are in it as addresses
    if takes_constants(lowered) or "callback" in text:
        return None
    options = (jax.default_backend(), *(getattr(config, name, None) for name in _OPTIONS))
    digest = hashlib.sha256(text.encode()).digest()
    return _shared((digest, lowered.in_tree, lowered.out_tree, *shardings, *outputs, *options), lowered, pool)


def kind_of(first: Any = None, *more: Any) -> tuple[Any, ...]:
    """The shapes and shardings of arguments. All arrays of a list `first`, a state, are on the same devices."""
    kind: list[Any] = [_committed(first[0] if type(first) is list else first)]
    for leaf in jax.tree.leaves(more):
        is_numpy = type(leaf) is np.ndarray
        kind.append(leaf.shape if is_numpy else (getattr(leaf, "shape", None), _committed(leaf)))
    return tuple(kind)


def _committed(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):  # of an array that will be committed, if it has a sharding
        return leaf.sharding or False
    return getattr(leaf, "committed", False) and leaf.sharding


def _shared(key: Hashable, lowered: Any, pool: Executor | None) -> "Future[Callable[..., Any]]":
    with _lock:
        found = _kept.get(key)
        has_failed = found is not None and (found.cancelled() or (found.done() and found.exception() is not None))
        if found is None or has_failed:
            # inside the lock, so that another thread waits for this one instead of compiling the same
            found = own = _kept[key] = Future() if pool is None else pool.submit(lowered.compile)
            while len(_kept) > MOST:
                _kept.popitem(last=False)
        else:
            own = None
        _kept.move_to_end(key)
    if own is not None and pool is None:
        try:
            own.set_result(lowered.compile())
        except BaseException as error:
            own.set_exception(error)
            raise
    return found


class DebugStep:
    """A `CompiledStep` that is not compiled."""

    def __init__(self, name: str, function: StepFunction, **_: Any) -> None:
        self._name, self._function = name, without_jit(function)

    def __call__(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any = None) -> Any:
        """Runs the step."""
        try:
            state, buffer, more = jax.block_until_ready(self._function(flat.state, buffer, batch, number))
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, self._name, flat.state, batch)  # noqa: B904 - the same error, or one from it
        return (buffer, more) if state is None else (FlatState.of(state), buffer, more)

    def start_data(self, *, compiles: bool = False) -> None:
        """Does nothing: batches may differ."""


def _leaves(state: TrainState, structure: Any) -> list[jax.Array]:
    leaves, returned = jax.tree.flatten(state)
    if returned != structure:
        raise ValueError(
            f"The step returned a state of another structure.\nInput: {structure}\nReturned: {returned}\n"
            "Keep the keys and types of `model_state` and `extra` from step to step."
        )
    return leaves
