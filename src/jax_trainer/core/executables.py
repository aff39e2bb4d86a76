"""Shared executables: functions that lower to the same text are compiled once per process.

A model, a loss and an optimizer created again for another seed, fold or trial are new functions to JAX, which would
compile them again, although their lowered text is identical.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

MOST = 64  # executables in the cache
MOST_CONSTANT_BYTES = 1 << 24  # of constants in the code: larger ones are not worth comparing
_OPTIONS = (  # of JAX that change compilation without showing in the lowered text
    "jax_default_device",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)
_kept: "OrderedDict[Hashable, Any]" = OrderedDict()  # least recently used first
_lock = threading.Lock()


class SharedExecutable:
    """A `jax.jit` function whose executables are shared with functions of the same lowered text.

    An executable belongs to the shapes and shardings of its arguments. Arguments that differ otherwise, and what cannot
    be shared (callbacks, NaN debugging, large constants, several processes), fall through to `jax.jit`.

    Args:
        jitted: the function, of positional arguments.
        shardings: its `out_shardings`, if any.
    """

    def __init__(self, jitted: Any, shardings: Any = None) -> None:
        self._jitted, self._shardings = jitted, tuple(jax.tree.leaves(shardings))
        self._by_kind: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._kind: tuple[Any, ...] = ()  # of the arguments of `_run`
        self._run: Callable[..., Any] | None = None
        self.compilations = 0  # used, compiled here or elsewhere

    def __call__(self, first: Any, *more: Any) -> Any:
        """Runs the function. All arrays of a list `first` must be on the same devices, as those of a state are."""
        # most functions see one kind of arguments: an executable compares them itself, in less time than `_kind_of`
        if self._run is None or len(self._by_kind) > 1:
            self._select(first, *more)
        if self._run is not self._jitted:
            try:
                return self._run(first, *more)  # type: ignore[misc]
            except (TypeError, ValueError):  # executables run no Python: the arguments do not fit
                if self._select(first, *more):
                    return self(first, *more)
        results = self._jitted(first, *more)
        self._count()
        return results

    def _count(self) -> None:
        self.compilations = len(self._by_kind) + self._jitted._cache_size()

    def _select(self, *args: Any) -> bool:
        """Selects the executable for such arguments; returns whether it is another one than before."""
        kind = _kind_of(*args)
        if kind == self._kind:
            return False
        if kind not in self._by_kind:
            self._by_kind[kind] = self._compiled(*args)
            self._count()
        self._kind, self._run = kind, self._by_kind[kind]
        return True

    def _compiled(self, *args: Any) -> Callable[..., Any]:
        config: Any = jax.config
        debugs = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
        if debugs or jax.process_count() > 1:
            return self._jitted
        traced = self._jitted.trace(*args)
        constants = sum(getattr(const, "nbytes", 0) for const in traced.jaxpr.consts)
        if traced.jaxpr.effects or constants > MOST_CONSTANT_BYTES:
            return self._jitted
        lowered = traced.lower()
        text = lowered.as_text()
        # constants that JAX passes as arguments are not in the text; callbacks are in it as addresses
        if getattr(lowered._lowering, "const_args", None) != [] or "callback" in text:
            return self._jitted
        shardings = [leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array) and leaf.committed]
        options = (jax.default_backend(), *(getattr(config, name, None) for name in _OPTIONS))
        digest = hashlib.sha256(text.encode()).digest()
        return _shared((digest, lowered.in_tree, lowered.out_tree, *shardings, *self._shardings, *options), lowered)


def _kind_of(first: Any, *more: Any) -> tuple[Any, ...]:
    """The shapes and shardings of the arguments. All arrays of a state are on the same devices."""
    head = first[0] if type(first) is list else first
    kind: list[Any] = [getattr(head, "committed", False) and head.sharding]
    for leaf in jax.tree.leaves(more):
        is_numpy = type(leaf) is np.ndarray
        kind.append(leaf.shape if is_numpy else (getattr(leaf, "shape", None), _committed(leaf)))
    return tuple(kind)


def _committed(leaf: Any) -> Any:
    return getattr(leaf, "committed", False) and leaf.sharding


def _shared(key: Hashable, lowered: Any) -> Callable[..., Any]:
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    compiled = lowered.compile()
    with _lock:
        _kept[key] = compiled
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return compiled
