"""How functions are compiled and called: the only module that calls `jax.jit`."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_trainer.core.executables import kind_of, shared_executable
from jax_trainer.core.layout import Layout
from jax_trainer.core.memory import explain_oom
from jax_trainer.core.metric_buffer import MetricBuffer
from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.recompile import OnRecompile, RecompileGuard
from jax_trainer.core.state import FlatState, TrainState
from jax_trainer.core.tracing import tracing_for

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


def computed_state(name: str, make: Callable[..., TrainState], *args: Any, shardings: Any = None) -> TrainState:
    """The result of `make`, compiled, after waiting for it: running out of memory shows only then."""
    try:
        shared = SharedFunction(jax.jit(make, out_shardings=shardings), shardings)
        return jax.block_until_ready(shared(*args))
    except jax.errors.JaxRuntimeError as error:
        raise explain_oom(error, name, jax.eval_shape(make, *args), None)  # noqa: B904 - the same error, or one from it


def traced_for(layout: Layout | None, step: Callable[[TrainState, Batch], Any]) -> Any:
    """`step` with the sharding constraints of `layout`; traced once, and inlined into functions that call it."""
    if layout is None:
        return jax.jit(step, inline=True)

    def traced(state: TrainState, batch: Batch) -> Any:
        # a new function: JAX caches traces by function, whatever the layout
        with tracing_for(layout):
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

    def start_data(self) -> None:
        """Starts a new data set, whose batches may differ in kind from those before."""
        self._guard.start_data()
        self._steady = None

    @property
    def compilations(self) -> int:
        """The number of signatures compiled so far."""
        return self._guard.compilations

    def _run(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any) -> Any:
        """Selects the executable for these arguments, runs it, and reports if it had to be compiled."""
        if flat.structure is not self._structure or buffer.format is not self._format:
            self._structure, self._format = static = flat.structure, buffer.format
            if static not in self._by_static:
                # a function for each: JAX caches traces by function
                jitted = jax.jit(self._on_leaves(*static), donate_argnums=self._donated)
                self._by_static[static] = SharedFunction(jitted)
            self._shared = self._by_static[static]
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

    def _on_leaves(self, structure: Any, fmt: Any) -> Callable[..., Any]:
        def traced(leaves: list[jax.Array], rows: jax.Array, batch: Batch, number: Any) -> Any:
            self._guard.check()
            state, buffer, more = self._function(structure.unflatten(leaves), MetricBuffer(rows, fmt), batch, number)
            return None if state is None else _leaves(state, structure), buffer.rows, more

        return traced


class SharedFunction:
    """A `jax.jit` function whose executables, one for each kind of arguments, are shared with equal functions."""

    def __init__(self, jitted: Any, out_shardings: Any = None) -> None:
        self._jitted, self._out_shardings, self._is_shared = jitted, out_shardings, True
        self._by_kind: dict[Any, Callable[..., Any]] = {}

    @property
    def compilations(self) -> int:
        """The number of executables used, compiled here or elsewhere."""
        return len(self._by_kind) + self._jitted._cache_size()

    @property
    def only_one(self) -> Callable[..., Any] | None:
        """The executable if there is exactly one, which compares its arguments itself, faster than `kind_of`."""
        return next(iter(self._by_kind.values())) if self._is_shared and len(self._by_kind) == 1 else None

    def __call__(self, *args: Any) -> Any:
        """Runs the function with positional arguments."""
        tried = None
        for find in (lambda: self.only_one, lambda: self._selected(*args)):
            executable = find() if self._is_shared else None
            if executable is not tried and executable is not None:
                try:
                    return executable(*args)
                except (TypeError, ValueError):  # executables run no Python: the arguments do not fit
                    tried = executable
        return self._jitted(*args)

    def _selected(self, *args: Any) -> Callable[..., Any] | None:
        """The executable for such arguments, compiled if there is none; None: it cannot be shared."""
        kind = kind_of(*args)
        if kind not in self._by_kind:
            self._by_kind[kind] = shared_executable(self._jitted, *args, out_shardings=self._out_shardings)
            self._is_shared = self._by_kind[kind] is not self._jitted
        return self._by_kind[kind] if self._is_shared else None


class DebugStep:
    """A `CompiledStep` that is not compiled: breakpoints and prints in the user's code see values."""

    def __init__(self, name: str, function: StepFunction, **_: Any) -> None:
        self._name, self._function = name, function

    def __call__(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any = None) -> Any:
        """Runs the step."""
        try:
            with jax.disable_jit():
                results = self._function(flat.state, buffer, batch, number)
            state, buffer, more = jax.block_until_ready(results)
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, self._name, flat.state, batch)  # noqa: B904 - the same error, or one from it
        return (buffer, more) if state is None else (FlatState.of(state), buffer, more)

    def start_data(self) -> None:
        """Does nothing: batches may differ."""


def _leaves(state: TrainState, structure: Any) -> list[jax.Array]:
    leaves, returned = jax.tree.flatten(state)
    if returned != structure:
        raise ValueError(
            f"The step returned a state of another structure.\nInput: {structure}\nReturned: {returned}\n"
            "Keep the keys and types of `model_state` and `extra` from step to step."
        )
    return leaves
