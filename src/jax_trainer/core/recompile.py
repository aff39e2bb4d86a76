"""The recompile guard: reports which leaf caused a recompilation, its duration and the fix."""

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

from jax_trainer.core.signature import Change, Signature, changes, signature_of
from jax_trainer.core.state import FlatState, TrainState

OnRecompile = Literal["warn", "error", "ignore"]
WARNINGS_PER_FUNCTION = 3
LENIENCY = 3  # recompilations of a lenient function that are not reported

_FIXES = {
    "length": "The last batch of an epoch is often smaller: drop it (`drop_last=True`) or pad it to the full size.",
    "shape": "Pad to one shape, or sort the data into a few sizes (buckets).",
    "rank": "Give every batch arrays of the same rank.",
    "dtype": "Cast the arrays to one dtype in the loader.",
    "weak type": "Wrap Python numbers: `jnp.asarray(x, dtype)`.",
    "sharding": "Place all batches and the state the same way, or pass a `layout`.",
    "static value": "Keep static fields constant, or make this one an array.",
    "structure": "Give every batch the same keys and types.",
}


class RecompileWarning(UserWarning):
    """A step was recompiled."""


class RecompileError(RuntimeError):
    """A step would be recompiled, which `on_recompile="error"` forbids."""


class BatchChangedError(ValueError):
    """A batch has other keys, dtypes or ranks than the ones before it."""


class RecompileGuard:
    """A compiled function of a `FlatState` and more that detects recompilation.

    A `lenient` one ignores the first ones: evaluation sets have smaller last batches and may differ from each other.
    `batch` describes the current batch. If `function` returns a state first, this returns a `FlatState`.
    """

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        function: Callable[..., Any],
        *,
        compile: Callable[[Callable[..., Any]], Any],
        on_recompile: OnRecompile,
        lenient: bool = False,
        batch: Callable[[], str] = lambda: "",
    ) -> None:
        self.name, self._arguments, self._function, self._compile = name, arguments, function, compile
        self._on_recompile, self._lenient, self._batch = on_recompile, lenient, batch
        self._seen: list[Signature] = []
        self._args: tuple[Any, ...] = ()
        self._structure: Any = None
        self._by_structure: dict[Any, Any] = {}
        self._entries = self._warned = 0
        self._placement: list[Any] | None = None
        self._reference: Signature | None = None  # of the batch of the first call since `start_data`

    def __call__(self, flat: FlatState, *more: Any) -> Any:
        """Runs the function; compiles it first for new kinds of arguments."""
        if flat.structure is not self._structure:
            self._select(flat.structure)
        self._args = (flat, *more)
        try:
            if self._reference is None:
                self._reference = self._batch_signature()
            if self._on_recompile == "error":
                self._check_placement()
            started = time.perf_counter()
            results = self._compiled(flat.leaves, *more)
            if self._compiled.compilations != self._entries:
                self._record(time.perf_counter() - started)
        finally:
            self._args = ()  # keeps neither batch nor state alive
        first = results[0]
        return (FlatState(first, flat.structure), *results[1:]) if type(first) is list else results

    def start_data(self) -> None:
        """Starts a new data set, whose batches may differ in kind from those before."""
        self._reference = None

    def _select(self, structure: Any) -> None:
        """Selects the compiled function for states of this structure."""
        if structure not in self._by_structure:
            self._by_structure[structure] = self._compile(self._flat(structure))
        self._structure, self._compiled = structure, self._by_structure[structure]
        self._entries = self._compiled.compilations

    def _flat(self, structure: Any) -> Callable[..., Any]:
        """The function on the leaves of a state; a new one per structure, because JAX caches traces by function."""

        def traced(leaves: list[jax.Array], *more: Any) -> Any:
            self._check_changes()
            first, *rest = self._function(structure.unflatten(leaves), *more)
            return (_leaves(first, structure) if isinstance(first, TrainState) else first, *rest)

        return traced

    @property
    def compilations(self) -> int:
        """The number of signatures compiled so far."""
        return len(self._seen)

    def _check_placement(self) -> None:
        """Detects recompilation without tracing: arrays with other shardings."""
        placement = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self._args[1:])]
        if placement != self._placement:
            self._check_changes()
            self._placement = placement

    def _check_changes(self) -> None:
        # raised while tracing: nothing was compiled or donated yet, so the caller's state is intact
        signature = self._signature()
        found = self._difference(signature)
        batch = self._batch_signature()
        changed = changes(self._reference or batch, batch)
        mixed = [c for c in changed if c.kind in ("structure", "dtype", "rank")]
        if mixed:
            raise BatchChangedError(_message(mixed))
        if found and self._on_recompile == "error":
            raise RecompileError(f"`{self.name}` would be compiled again: {_message(found)}")

    def _record(self, seconds: float) -> None:
        self._entries = self._compiled.compilations
        signature = self._signature()
        found = self._difference(signature)
        if signature not in self._seen:
            self._seen.append(signature)
        if not found or self._on_recompile == "ignore":
            return
        if self._on_recompile == "error":
            raise RecompileError(f"`{self.name}` was compiled again, which took {seconds:.1f} s: {_message(found)}")
        self._warned += 1
        if self._warned <= WARNINGS_PER_FUNCTION:
            last = (
                " Further recompilations of this function are not reported."
                if self._warned == WARNINGS_PER_FUNCTION
                else ""
            )
            count = f"{seconds:.1f} s, compilation {self.compilations}"
            where = f" on {self._batch()}" if self._batch() else ""
            text = f"`{self.name}` was compiled again{where} ({count}): {_message(found)}{last}"
            warnings.warn(text, RecompileWarning, stacklevel=4)

    def _signature(self) -> Signature:
        flat, *more = self._args
        return signature_of(dict(zip(self._arguments, (flat.state, *more), strict=True)))

    def _batch_signature(self) -> Signature:
        return signature_of({"batch": self._args[self._arguments.index("batch")]})

    def _difference(self, signature: Signature) -> list[Change]:
        """The changes from the most similar signature seen; empty if recompilation is expected."""
        if not self._seen or signature in self._seen:
            return []
        found = min((changes(old, signature) for old in reversed(self._seen)), key=len)
        return [] if self._lenient and self.compilations <= LENIENCY else found


def _leaves(state: TrainState, structure: Any) -> list[jax.Array]:
    leaves, returned = jax.tree.flatten(state)
    if returned != structure:
        raise ValueError(
            f"The step returned a state of another structure.\nInput: {structure}\nReturned: {returned}\n"
            "Keep the keys and types of `model_state` and `extra` from step to step."
        )
    return leaves


def _message(found: list[Change]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}. {_FIXES[found[0].kind]}"
