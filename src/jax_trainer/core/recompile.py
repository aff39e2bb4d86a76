"""The recompile guard: reports which leaf caused a recompilation, its duration and the fix."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, Self

import jax

from jax_trainer.core.metric_buffer import MetricBuffer
from jax_trainer.core.metrics import Batch
from jax_trainer.core.resident import ResidentBatch
from jax_trainer.core.signature import Change, Signature, changes, signature_of
from jax_trainer.core.state import FlatState

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
    """Detects recompilations of a step, and reports their cause, duration and fix.

    Args:
        name: of the step, for messages.
        on_recompile: "warn", "error" or "ignore".
        lenient: ignore the first ones: evaluation sets have smaller last batches and may differ from each other.
        describe_batch: describes the current batch.
    """

    def __init__(
        self, name: str, on_recompile: OnRecompile, *, lenient: bool = False, describe_batch: Callable[[], str] = str
    ) -> None:
        self._name, self._on_recompile, self._lenient = name, on_recompile, lenient
        self._describe_batch = describe_batch
        self.is_strict = on_recompile == "error"
        self._seen: list[tuple[Any, Signature]] = []  # with the form of the arguments
        self._args: tuple[Any, ...] = ()
        self._warned = 0
        self._placement: list[Any] | None = None
        self._reference: Signature | None = None  # of the batch of the first call since `start_data`

    @property
    def compilations(self) -> int:
        """The number of signatures compiled so far."""
        return len(self._seen)

    def start_data(self) -> None:
        """Starts a new data set, whose batches may differ in kind from those before."""
        self._reference = None

    def watching(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any) -> Self:
        """Watches a call with these arguments inside of a `with` block."""
        self._args = flat, buffer, batch, number
        return self

    def __enter__(self) -> None:
        if self._reference is None:
            self._reference = self._batch_signature()
        if self.is_strict:
            self._check_placement()

    def __exit__(self, *error: object) -> None:
        self._args = ()  # keeps neither batch nor state alive

    def check(self) -> None:
        """Raises for arguments that must not be compiled; called while they are traced.

        Nothing was compiled or donated yet, so the caller's state is intact.
        """
        found = self._difference(self._signature())
        batch = self._batch_signature()
        changed = changes(self._reference or batch, batch)
        mixed = [c for c in changed if c.kind in ("structure", "dtype", "rank")]
        if mixed:
            raise BatchChangedError(_message(mixed))
        if found and self.is_strict:
            raise RecompileError(f"`{self._name}` would be compiled again: {_message(found)}")

    def record(self, seconds: float) -> None:
        """Records that the arguments were compiled, and reports it if they had been compiled in another form before."""
        signature = self._signature()
        found = self._difference(signature)
        if signature not in self._seen:
            self._seen.append(signature)
        if not found or self._on_recompile == "ignore":
            return
        if self.is_strict:
            raise RecompileError(f"`{self._name}` was compiled again, which took {seconds:.1f} s: {_message(found)}")
        self._warned += 1
        if self._warned <= WARNINGS_PER_FUNCTION:
            last = (
                " Further recompilations of this function are not reported."
                if self._warned == WARNINGS_PER_FUNCTION
                else ""
            )
            count = f"{seconds:.1f} s, compilation {self.compilations}"
            where = f" on {self._describe_batch()}" if self._describe_batch() else ""
            text = f"`{self._name}` was compiled again{where} ({count}): {_message(found)}{last}"
            warnings.warn(text, RecompileWarning, stacklevel=4)

    def _check_placement(self) -> None:
        """Detects recompilation without tracing: arrays with other shardings."""
        placement = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self._args[1:])]
        if placement != self._placement:
            self.check()
            self._placement = placement

    def _signature(self) -> tuple[Any, Signature]:
        flat, buffer, batch, number = self._args
        # complete and partial chunks, and batches of resident data, are compiled separately: that is no recompilation
        form = isinstance(batch, ResidentBatch), number is None
        named = {"state": flat.state, "buffer": buffer.rows, "batch": batch, "number": number}
        return form, signature_of(named)

    def _batch_signature(self) -> Signature:
        return signature_of({"batch": self._args[2]})

    def _difference(self, signature: tuple[Any, Signature]) -> list[Change]:
        """The changes from the most similar signature seen; empty if compiling it is expected."""
        alike = [old for form, old in reversed(self._seen) if form == signature[0]]
        if not alike or signature in self._seen:
            return []
        found = min((changes(old, signature[1]) for old in alike), key=len)
        return [] if self._lenient and self.compilations <= LENIENCY else found


def _message(found: list[Change]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}. {_FIXES[found[0].kind]}"
