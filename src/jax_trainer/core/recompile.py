"""The recompile guard: says which leaf made a compiled step compile again, what it cost, and the cure."""

import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

from jax_trainer.core.signature import Change, Signature, changes, signature_of

OnRecompile = Literal["warn", "error", "ignore"]
WARNINGS_PER_FUNCTION = 3

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


class Guarded:
    """A compiled function that notices when it compiles again."""

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        function: Callable[..., Any],
        *,
        compile: Callable[[Callable[..., Any]], Any],
        on_recompile: OnRecompile,
        ragged_is_normal: bool = False,
    ) -> None:
        self.name, self._arguments = name, arguments
        self._on_recompile, self._ragged_is_normal = on_recompile, ragged_is_normal
        self._seen: list[Signature] = []
        self._args: tuple[Any, ...] = ()
        self._entries = 0

        def traced(*args: Any) -> Any:
            self._refuse()
            return function(*args)

        self._compiled = compile(traced)

    def __call__(self, *args: Any) -> Any:
        """Runs the function, compiling it first where its arguments are new."""
        self._args = args
        started = time.perf_counter()
        out = self._compiled(*args)
        if self._compiled._cache_size() != self._entries:
            self._entries = self._compiled._cache_size()
            self._note(time.perf_counter() - started)
        self._args = ()
        return out

    @property
    def compilations(self) -> int:
        """How many different signatures were compiled so far."""
        return len(self._seen)

    def _refuse(self) -> None:
        # raised while tracing: nothing was compiled or donated yet, so the caller's state is still whole
        found = self._difference(self._signature())
        mixed = [c for c in found if c.path.startswith("batch") and c.kind in ("structure", "dtype", "rank")]
        if mixed:
            raise BatchChangedError(_told(mixed))
        if found and self._on_recompile == "error":
            raise RecompileError(f"`{self.name}` would be compiled again: {_told(found)}")

    def _note(self, seconds: float) -> None:
        signature = self._signature()
        found = self._difference(signature)
        if signature not in self._seen:
            self._seen.append(signature)
        if not found or self._on_recompile == "ignore":
            return
        if self._on_recompile == "error":
            raise RecompileError(f"`{self.name}` was compiled again, which took {seconds:.1f} s: {_told(found)}")
        nth = self.compilations - 1
        if nth <= WARNINGS_PER_FUNCTION:
            last = " Further recompilations of it are not reported." if nth == WARNINGS_PER_FUNCTION else ""
            text = f"`{self.name}` was compiled again ({seconds:.1f} s, compilation {nth + 1}): {_told(found)}{last}"
            warnings.warn(text, RecompileWarning, stacklevel=3)

    def _signature(self) -> Signature:
        return signature_of(dict(zip(self._arguments, self._args, strict=True)))

    def _difference(self, signature: Signature) -> list[Change]:
        """What is new about `signature`, against the most similar one seen; nothing if it is expected."""
        if not self._seen or signature in self._seen:
            return []
        found = min((changes(old, signature) for old in reversed(self._seen)), key=len)
        expected = self._ragged_is_normal and all(c.kind in ("length", "static value") for c in found)
        return [] if expected and self.compilations <= WARNINGS_PER_FUNCTION else found


def _told(found: list[Change]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}. {_CURES[found[0].kind]}"
