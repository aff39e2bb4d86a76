"""Recomputes the activations of modules in the backward pass, by path: `Remat` for linen and nnx.

Parameters and their paths stay as they are: modules are wrapped while a training step calls them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax import nnx

from jax_trainer.core.remat import Remat
from jax_trainer.core.tracing import current, tracing

RECOMPUTED = "recomputed"  # the name of the method that linen names in scopes


def linen_remat(apply_fn: Callable[..., Any], remat: Remat | None) -> Callable[..., Any]:
    """The `apply` of a linen module, whose matching modules are computed again in the backward pass."""
    if remat is None:
        return apply_fn
    seen: set[str] = set()

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, path = context.module, ".".join(context.module.path)
        if context.method_name != "__call__" or current().is_recomputed:
            return call(*args, **kwargs)
        seen.add(path)
        if not remat.matches(path):
            return call(*args, **kwargs)
        method, (arrays, rebuilt) = context.orig_method.func, _split((args, kwargs))  # type: ignore[attr-defined]

        def recomputed(module: nn.Module, arrays: list[Any]) -> Any:
            args, kwargs = rebuilt(arrays)
            return method(module, *args, **kwargs)

        recomputed.__name__ = RECOMPUTED
        with tracing(is_recomputed=True):
            return nn.remat(recomputed, policy=remat.saveable)(module, arrays)

    @functools.wraps(apply_fn)
    def apply(*args: Any, **kwargs: Any) -> Any:
        with nn.intercept_methods(intercept):
            outputs = apply_fn(*args, **kwargs)
        if not any(map(remat.matches, seen)):
            raise remat.no_match(seen)
        return outputs

    if hasattr(apply_fn, "__self__"):  # the module, whose parameters say how it takes the mode
        apply.__self__ = apply_fn.__self__  # type: ignore[attr-defined]
    return apply


def nnx_remat(model: nnx.Module, remat: Remat | None) -> None:
    """Makes the matching modules of `model`, which is not the user's own, compute again in the backward pass."""
    if remat is None:
        return
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if callable(module)}
    matching = [module for path, module in modules.items() if remat.matches(path)]
    if not matching:
        raise remat.no_match(modules)
    for module in matching:
        object.__setattr__(module, "__class__", _recomputing(type(module), remat))


@functools.cache
def _recomputing(kind: type[Any], remat: Remat) -> type[Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current().is_recomputed:
            return kind.__call__(self, *args, **kwargs)
        arrays, rebuilt = _split((args, kwargs))

        def recomputed(module: Any, arrays: list[Any]) -> Any:
            args, kwargs = rebuilt(arrays)
            return kind.__call__(module, *args, **kwargs)

        with tracing(is_recomputed=True):
            return nnx.remat(recomputed, policy=remat.saveable)(self, arrays)

    return with_call(kind, call)


def with_call(kind: type[Any], call: Callable[..., Any]) -> type[Any]:
    """A class of modules like `kind`, but for its call; Python looks up `__call__` in the class."""
    functools.update_wrapper(call, kind.__call__)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    meta: Any = type(kind)
    return meta(kind.__name__, (kind,), {**names, "__call__": call})


def _split(arguments: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The arrays and nnx objects in the arguments of a call, and a function that makes the arguments of such."""
    is_node = lambda leaf: isinstance(leaf, nnx.Module | nnx.Variable | nnx.Rngs)
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_node)
    is_traced = [is_node(leaf) or isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

    def rebuilt(traced: list[Any]) -> Any:
        found = iter(traced)
        return structure.unflatten(next(found) if one else leaf for one, leaf in zip(is_traced, leaves, strict=True))

    return [leaf for one, leaf in zip(is_traced, leaves, strict=True) if one], rebuilt
