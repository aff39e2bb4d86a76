"""Compiled code that is used again: in one process, what lowers to the same text is compiled once.

A model, a loss and an optimizer that are made anew, for another seed, fold or trial, are other functions to JAX, which
would compile them again. What XLA is given for them is the same, to the letter.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

MOST = 64  # executables that are kept for others to use
MOST_CONSTANT_BYTES = 1 << 24  # of arrays that are part of the code: more are not worth comparing
_OPTIONS = (  # of JAX that change what the compiler does, and do not show in the text
    "jax_default_device",
    "jax_disable_most_optimizations",
    "jax_optimization_level",
    "jax_memory_fitting_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
)
_kept: "OrderedDict[Hashable, Any]" = OrderedDict()  # the one that was used last is the last
_lock = threading.Lock()


class SharedExecutable:
    """A function that `jax.jit` made, compiled for each kind of its arguments unless that was done before.

    A kind is shapes and places. Arguments that differ in anything else, and what cannot be shared, are left to
    `jax.jit`: callbacks, debugging of NaNs, large constants, several processes.

    Args:
        jitted: the function, of positional arguments.
        shardings: those of what it returns, where it was told.
    """

    def __init__(self, jitted: Any, shardings: Any = None) -> None:
        self._jitted, self._shardings = jitted, tuple(jax.tree.leaves(shardings))
        self._by_kind: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._kind: list[Any] | None = None  # of the arguments that `_run` was compiled for
        self._run: Callable[..., Any] = jitted
        self.compilations = 0  # that it needed, its own and those of others

    def __call__(self, first: Any, *more: Any) -> Any:
        """Runs the function. All arrays of a list `first` must be in one place, as those of a state are."""
        head = first[0] if type(first) is list else first
        # shapes, and where arrays were put; not more, because this is asked at every step
        kind: list[Any] = [getattr(head, "committed", False) and head.sharding]
        for leaf in jax.tree.leaves(more):
            kind.append(leaf.shape if type(leaf) is np.ndarray else _kind(leaf))
        if kind != self._kind:
            self._turn_to(kind, first, *more)
        if self._run is not self._jitted:
            try:
                return self._run(first, *more)
            except (TypeError, ValueError):  # compiled code runs no Python: these are not the arguments it was made for
                pass
        results = self._jitted(first, *more)
        self._count()
        return results

    def _count(self) -> None:
        self.compilations = len(self._by_kind) + self._jitted._cache_size()

    def _turn_to(self, kind: list[Any], *args: Any) -> None:
        """Takes the code for arguments of this kind."""
        key = tuple(kind)
        if key not in self._by_kind:
            self._by_kind[key] = self._compiled(*args)
            self._count()
        self._kind, self._run = kind, self._by_kind[key]

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
        places = [leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array) and leaf.committed]
        options = (jax.default_backend(), *(getattr(config, name, None) for name in _OPTIONS))
        digest = hashlib.sha256(text.encode()).digest()
        return _shared((digest, lowered.in_tree, lowered.out_tree, *places, *self._shardings, *options), lowered)


def _kind(leaf: Any) -> Any:
    return getattr(leaf, "shape", None), getattr(leaf, "committed", False) and leaf.sharding


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
