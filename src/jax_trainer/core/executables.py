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


def shared_executable(jitted: Any, *args: Any, out_shardings: Any = None) -> Callable[..., Any]:
    """The executable of a `jax.jit` function for such arguments, shared with functions of the same lowered text.

    It raises a TypeError or ValueError for other arguments than those of the function that was compiled first. Returns
    `jitted` itself for what cannot be shared: callbacks, NaN debugging, large constants, several processes.
    """
    config: Any = jax.config
    debugs = config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs
    if debugs or jax.process_count() > 1:
        return jitted
    traced = jitted.trace(*args)
    constants = sum(getattr(const, "nbytes", 0) for const in traced.jaxpr.consts)
    if traced.jaxpr.effects or constants > MOST_CONSTANT_BYTES:
        return jitted
    lowered = traced.lower()
    text = lowered.as_text()
    # constants that JAX passes as arguments are not in the text; callbacks are in it as addresses
    if getattr(lowered._lowering, "const_args", None) != [] or "callback" in text:
        return jitted
    shardings = [leaf.sharding for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array) and leaf.committed]
    options = (jax.default_backend(), *(getattr(config, name, None) for name in _OPTIONS))
    digest = hashlib.sha256(text.encode()).digest()
    outputs = jax.tree.leaves(out_shardings)
    return _shared((digest, lowered.in_tree, lowered.out_tree, *shardings, *outputs, *options), lowered)


def kind_of(first: Any, *more: Any) -> tuple[Any, ...]:
    """The shapes and shardings of arguments. All arrays of a list `first`, a state, are on the same devices."""
    kind: list[Any] = [_committed(first[0] if type(first) is list else first)]
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
