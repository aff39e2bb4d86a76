"""The recompile guard: says which leaf made a compiled step compile again, what it cost, and the cure."""

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

from jax_trainer.core.signature import Change, Signature, changes, signature_of
from jax_trainer.core.state import FlatState, TrainState

OnRecompile = Literal["warn", "error", "ignore"]
WARNINGS_PER_FUNCTION = 3
LENIENCY = 3  # so many more compilations are normal for a lenient function

_CURES = {
    "length": "The last batch of an epoch is often smaller: drop it (`drop_last=True`) or pad it to the full size.",
    "shape": "Pad to one shape, or sort the data into a few sizes (buckets).",
    "rank": "Give every batch arrays of the same rank.",
    "dtype": "Let the loader cast its arrays to one dtype.",
    "weak type": "Wrap Python numbers: `jnp.asarray(x, dtype)`.",
    "sharding": "Place every batch and the state the same way; pass a `layout` to do that for you.",
    "static value": "Keep static fields constant, or make this one an array.",
    "structure": "Give every batch the same keys and types.",
}


class RecompileWarning(UserWarning):
    """A compiled step was compiled again."""


class RecompileError(RuntimeError):
    """A compiled step would be compiled again, and `on_recompile="error"` forbids it."""


class BatchChangedError(ValueError):
    """A batch has other keys, dtypes or ranks than those before it: data that was not meant to be fed together."""


class RecompileGuard:
    """A compiled function of a held state and more, that notices when it compiles again.

    A `lenient` one is silent at first: evaluation sets have ragged ends and may differ from each other. `batch` tells
    which one it is called on. Where `function` returns a state first, so does this, held.
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
        self._reference: Signature | None = None  # of the batch of the first call since `begin`

    def __call__(self, held: FlatState, *more: Any) -> Any:
        """Runs the function, compiling it first where its arguments are new."""
        if held.structure is not self._structure:
            self._take(held.structure)
        self._args = (held, *more)
        if self._reference is None:
            self._reference = self._batch_signature()
        try:
            if self._on_recompile == "error":
                self._check_placement()
            started = time.perf_counter()
            first, *rest = self._compiled(held.leaves, *more)
            if self._compiled.compilations != self._entries:
                self._note(time.perf_counter() - started)
            return (FlatState(first, held.structure) if type(first) is list else first, *rest)
        finally:
            self._args = ()  # or the batch and the state would live on

    def begin(self) -> None:
        """A new set of data begins: its batches need be like each other, not like those before."""
        self._reference = None

    def _take(self, structure: Any) -> None:
        """Turns to states of this structure, each of which is compiled for on its own."""
        if structure not in self._by_structure:
            self._by_structure[structure] = self._compile(self._flat(structure))
        self._structure, self._compiled = structure, self._by_structure[structure]
        self._entries = self._compiled.compilations

    def _flat(self, structure: Any) -> Callable[..., Any]:
        """The function on the leaves of states of `structure`. A new one each time: JAX caches traces by function."""

        def traced(leaves: list[jax.Array], *more: Any) -> Any:
            self._refuse()
            first, *rest = self._function(structure.unflatten(leaves), *more)
            return (_leaves(first, structure) if isinstance(first, TrainState) else first, *rest)

        return traced

    @property
    def compilations(self) -> int:
        """How many different signatures were compiled so far."""
        return len(self._seen)

    def _check_placement(self) -> None:
        """Looks for what is compiled again without being traced again: arrays that live elsewhere."""
        placement = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self._args[1:])]
        if placement != self._placement:
            self._refuse()
            self._placement = placement

    def _refuse(self) -> None:
        # raised while tracing: nothing was compiled or donated yet, so the caller's state is still whole
        signature = self._signature()
        found = self._difference(signature)
        batch = self._batch_signature()
        changed = changes(self._reference or batch, batch)
        mixed = [c for c in changed if c.kind in ("structure", "dtype", "rank")]
        if mixed:
            raise BatchChangedError(_told(mixed))
        if found and self._on_recompile == "error":
            raise RecompileError(f"`{self.name}` would be compiled again: {_told(found)}")

    def _note(self, seconds: float) -> None:
        self._entries = self._compiled.compilations
        signature = self._signature()
        found = self._difference(signature)
        if signature not in self._seen:
            self._seen.append(signature)
        if not found or self._on_recompile == "ignore":
            return
        if self._on_recompile == "error":
            raise RecompileError(f"`{self.name}` was compiled again, which took {seconds:.1f} s: {_told(found)}")
        self._warned += 1
        if self._warned <= WARNINGS_PER_FUNCTION:
            last = " Further recompilations of it are not reported." if self._warned == WARNINGS_PER_FUNCTION else ""
            count = f"{seconds:.1f} s, compilation {self.compilations}"
            where = f" on {self._batch()}" if self._batch() else ""
            text = f"`{self.name}` was compiled again{where} ({count}): {_told(found)}{last}"
            warnings.warn(text, RecompileWarning, stacklevel=4)

    def _signature(self) -> Signature:
        held, *more = self._args
        return signature_of(dict(zip(self._arguments, (held.state, *more), strict=True)))

    def _batch_signature(self) -> Signature:
        return signature_of({"batch": self._args[self._arguments.index("batch")]})

    def _difference(self, signature: Signature) -> list[Change]:
        """What is new about `signature`, against the most similar one seen; nothing if it is expected."""
        if not self._seen or signature in self._seen:
            return []
        found = min((changes(old, signature) for old in reversed(self._seen)), key=len)
        return [] if self._lenient and self.compilations <= LENIENCY else found


def _leaves(state: TrainState, structure: Any) -> list[jax.Array]:
    leaves, returned = jax.tree.flatten(state)
    if returned != structure:
        raise ValueError(
            f"The step returned a state of another structure.\nGiven: {structure}\nReturned: {returned}\n"
            "Model state and `extra` must keep their keys and types from step to step."
        )
    return leaves


def _told(found: list[Change]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}. {_CURES[found[0].kind]}"
