"""The recompile guard: reports which leaf caused a recompilation, its duration and the fix.

It compares signatures: all properties of arguments that compiled code depends on.
"""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax
from jax.core import Tracer

from jax_trainer.core.memory import ResidentBatch
from jax_trainer.core.metric_buffer import MetricBuffer
from jax_trainer.core.state import FlatState
from jax_trainer.diagnostics.leaves import Batch, PyTree, leaves_by_path

OnRecompile = Literal["warn", "error", "ignore"]
LOG = logging.getLogger("jax_trainer")
WARNINGS_PER_FUNCTION, RECORDS_PER_FUNCTION = 3, 100
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


class Leaf(NamedTuple):
    """The properties of an array that compiled code depends on."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    sharding: Any  # None: not committed to devices

    def __str__(self) -> str:
        weak = " (weak type)" if self.weak_type else ""
        where = "" if self.sharding is None else f" on {_where(self.sharding)}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{weak}{where}"


class Signature(NamedTuple):
    """All properties of arguments that compiled code depends on: arrays and static values."""

    leaves: dict[str, Leaf]
    structure: Any


class Change(NamedTuple):
    """One difference between two signatures; `kind` selects the fix."""

    path: str
    old: str
    new: str
    kind: str  # "length", "shape", "rank", "dtype", "weak type", "sharding", "static value" or "structure"

    def __str__(self) -> str:
        return f"{self.path} changed from {self.old} to {self.new}"


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
        self._found = 0
        self._placement: list[Any] | None = None
        self._reference: Signature | None = None  # of the batch of the first call since `start_data`
        self._data = 0  # how often compiling the first batches of new data was expected

    @property
    def compilations(self) -> int:
        """The number of signatures compiled so far."""
        return len(self._seen)

    def start_data(self, *, compiles: bool = False) -> None:
        """Starts a new data set, whose batches may differ in kind from those before.

        `compiles`: compiling its first batches is expected.
        """
        self._reference = None
        self._data += compiles

    @contextmanager
    def watching(self, flat: FlatState, buffer: MetricBuffer, batch: Batch, number: Any) -> Iterator[None]:
        """Watches a call with these arguments in the block."""
        self._args = flat, buffer, batch, number
        if self._reference is None:
            self._reference = self._batch_signature()
        try:
            if self.is_strict:
                self._check_placement()
            yield
        finally:
            self._args = ()  # keeps neither batch nor state alive

    def check(self) -> None:
        """Raises for arguments that must not be compiled; called while they are traced.

        Nothing was compiled or donated yet, so the caller's state is intact.
        """
        if not self._args:  # compiled ahead of the first call
            return
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
        if not found:
            return
        if self.is_strict:
            raise RecompileError(f"`{self._name}` was compiled again, which took {seconds:.1f} s: {_message(found)}")
        self._found += 1
        count = f"{seconds:.1f} s, compilation {self.compilations}"
        where = f" on {self._describe_batch()}" if self._describe_batch() else ""
        text = f"`{self._name}` was compiled again{where} ({count}): {_message(found)}"
        if self._found <= RECORDS_PER_FUNCTION:
            LOG.info(text)  # the log of a run has it, and a report shows it
        if self._on_recompile == "warn" and self._found <= WARNINGS_PER_FUNCTION:
            is_last = self._found == WARNINGS_PER_FUNCTION
            more = " Further recompilations of this function are in the log." if is_last else ""
            warnings.warn(text + more, RecompileWarning, stacklevel=4)

    def _check_placement(self) -> None:
        """Detects recompilation without tracing: arrays with other shardings."""
        placement = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self._args[1:])]
        if placement != self._placement:
            self.check()
            self._placement = placement

    def _signature(self) -> tuple[Any, Signature]:
        flat, buffer, batch, number = self._args
        # complete and partial chunks, and batches of resident data, are compiled separately: that is no recompilation
        form = isinstance(batch, ResidentBatch), number is None, self._data
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


def signature_of(args: Mapping[str, PyTree]) -> Signature:
    """The signature of named arguments."""
    leaves = {path: _leaf(value) for path, value in leaves_by_path(dict(args)).items()}
    return Signature(leaves, jax.tree.structure(dict(args)))


def changes(old: Signature, new: Signature) -> list[Change]:
    """How `new` differs from `old`, leaf by leaf."""
    found = [
        Change(path, str(old.leaves[path]), str(leaf), _kind(old.leaves[path], leaf))
        for path, leaf in new.leaves.items()
        if path in old.leaves and old.leaves[path] != leaf
    ]
    found += [Change(p, "absent", str(leaf), "structure") for p, leaf in new.leaves.items() if p not in old.leaves]
    found += [Change(p, str(leaf), "absent", "structure") for p, leaf in old.leaves.items() if p not in new.leaves]
    if old.structure != new.structure and not any(c.kind == "structure" for c in found):
        found += _static_changes(old.structure, new.structure, "")
    return found


def _leaf(value: Any) -> Leaf:
    aval = jax.typeof(value)
    committed = isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.committed
    sharding = value.sharding if committed else None
    return Leaf(tuple(aval.shape), str(aval.dtype), bool(getattr(aval, "weak_type", False)), sharding)


def _kind(old: Leaf, new: Leaf) -> str:
    if old.dtype != new.dtype:
        return "dtype"
    if old.shape != new.shape:
        if len(old.shape) != len(new.shape):
            return "rank"
        return "length" if old.shape[1:] == new.shape[1:] else "shape"
    return "weak type" if old.weak_type != new.weak_type else "sharding"


def _where(sharding: Any) -> str:
    spec = getattr(sharding, "spec", None)
    devices = len(sharding.device_set)
    return f"{devices} device{'s' * (devices > 1)}" + (f" as {spec}" if spec is not None else "")


def _static_changes(old: Any, new: Any, path: str) -> list[Change]:
    """The static values that differ between two tree structures."""
    old_node, new_node = old.node_data(), new.node_data()
    if old_node is None or new_node is None:
        return []
    (old_type, old_static), (new_type, new_static) = old_node, new_node
    if old_type is not new_type:
        return [Change(path or "the arguments", old_type.__name__, new_type.__name__, "structure")]
    names = _child_names(old_type, old_static, len(old.children()))
    found = []
    if old_static != new_static and not isinstance(old_static, list):
        found += [Change(path, repr(old_static), repr(new_static), "static value")]
    for name, a, b in zip(names, old.children(), new.children(), strict=False):
        found += _static_changes(a, b, f"{path}.{name}" if path else name)
    return found


def _child_names(kind: type, static: Any, count: int) -> list[str]:
    if isinstance(static, list):  # of a dict: its sorted keys
        return [str(key) for key in static]
    if dataclasses.is_dataclass(kind):
        data = [f.name for f in dataclasses.fields(kind) if f.metadata.get("pytree_node", True)]
        return data if len(data) == count else [str(i) for i in range(count)]
    return [*getattr(kind, "_fields", map(str, range(count)))]
