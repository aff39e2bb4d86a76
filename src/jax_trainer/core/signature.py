"""Signatures of compiled functions, and how two of them differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jax_trainer.core.metrics import PyTree
from jax_trainer.core.paths import leaf_path


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


def signature_of(args: Mapping[str, PyTree]) -> Signature:
    """The signature of named arguments."""
    leaves = {leaf_path(path): _leaf(value) for path, value in jax.tree_util.tree_leaves_with_path(dict(args))}
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
    committed = isinstance(value, jax.Array) and getattr(value, "committed", False)
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
        found += _static_fields(old_type, old_static, new_static, path)
    for name, a, b in zip(names, old.children(), new.children(), strict=False):
        found += _static_changes(a, b, f"{path}.{name}" if path else name)
    return found


def _static_fields(kind: type, old: Any, new: Any, path: str) -> list[Change]:
    fields = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    static = [name for name in fields if not kind.__dataclass_fields__[name].metadata.get("pytree_node", True)]
    if isinstance(old, tuple) and len(old) == len(static):
        return [
            Change(f"{path}.{name}", repr(a), repr(b), "static value")
            for name, a, b in zip(static, old, new, strict=True)
            if a != b
        ]
    return [Change(path, repr(old), repr(new), "static value")]


def _child_names(kind: type, static: Any, count: int) -> list[str]:
    if isinstance(static, list):  # of a dict: its sorted keys
        return [str(key) for key in static]
    if dataclasses.is_dataclass(kind):
        data = [f.name for f in dataclasses.fields(kind) if f.metadata.get("pytree_node", True)]
        return data if len(data) == count else [str(i) for i in range(count)]
    return [*getattr(kind, "_fields", map(str, range(count)))]
