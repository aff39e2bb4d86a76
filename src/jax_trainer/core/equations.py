"""The equations of a traced function, with digests that are the same in every process and on every machine.

Two functions that compute the same have the same digest, whatever they are called and wherever they are defined: it is
of their operations, with all constants. What does not change a value does not count: names, shardings, and everything
that the chosen results do not depend on.
"""

import hashlib
import re
import traceback
import zlib
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import cache, lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_trainer.core.compile import compiled_function
from jax_trainer.core.extra_args import UPDATE
from jax_trainer.diagnostics.jax_internals import (
    body_of,
    constants_of,
    inner_functions,
    is_function,
    is_literal,
    needed_equations,
    scopes_of,
    traceback_of,
)
from jax_trainer.diagnostics.leaves import PyTree, leaf_path
from jax_trainer.diagnostics.user_frame import user_frame

_MOST_COMPARED = 20_000  # equations, of which the exact number of differences is found
_CONSTRAINTS = ("sharding_constraint", "mesh_cast", "reshard", "layout_constraint")  # which keep the values
_PRINTS = ("debug_callback", "debug_print")  # of `jax.debug`
_NOT_COMPUTED = re.compile(r"sharding|layout|mesh|donated|^name$|^inline$|^keep_unused$|compiler_options|_fun$|_thunk$")
_LITERAL = "="  # in front of the text of a constant in an equation
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Equation(NamedTuple):
    """One operation: `digest` is of its parameters, shapes and constants, but not of the values that it takes."""

    digest: str
    is_update: bool  # of the optimizer
    trace: Any  # of the code that it comes from


class Traced(NamedTuple):
    """What a function computes: a digest of all of it, and its equations in order, with those of inner functions.

    `constants` is a digest of the arrays that it uses and does not compute; "" if it uses none. `results` are the names
    of its results, "in0" for its first argument.
    """

    digest: str
    equations: tuple[Equation, ...]
    constants: str
    results: tuple[str, ...]

    def text(self, *, update: bool) -> str:
        """The digests of the equations of the optimizer's update, or of all others."""
        return "".join(one.digest for one in self.equations if one.is_update == update)

    def difference(self, text: str, *, update: bool) -> str:
        """How many equations differ from those of a `text`, and where the first one is; "" if none differs."""
        own = [one for one in self.equations if one.is_update == update]
        before, now = [text[at : at + 4] for at in range(0, len(text), 4)], [one.digest for one in own]
        if before == now:
            return ""
        first = next((at for at, pair in enumerate(zip(before, now, strict=False)) if pair[0] != pair[1]), len(now) - 1)
        count = str(abs(len(before) - len(now)) or "several")
        if max(len(before), len(now)) <= _MOST_COMPARED:
            blocks = SequenceMatcher(None, before, now, autojunk=False).get_opcodes()
            count = str(sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal"))
        places = (_place(one.trace) for one in own[max(first, 0) :])
        place = next(filter(None, places), "")
        return f"{count} of {len(now)} equations{f', first at {place}' if place else ''}"


def traced_equations(closed: Any, wanted: Sequence[bool], given: Sequence[bool] = ()) -> Traced:
    """What the `wanted` results of a traced function (a `ClosedJaxpr`) compute, from those that are `given`, if any.

    >>> import jax.numpy as jnp
    >>> functions = (lambda x: (2 * jnp.sin(x), x), lambda y: (2 * jnp.sin(y), -y), lambda x: (3 * jnp.sin(x), x))
    >>> one, same, other = (traced_equations(jax.make_jaxpr(each)(1.0), [True, False]) for each in functions)
    >>> len(one.equations), one.digest == same.digest, one.digest == other.digest
    (2, True, False)
    """
    jaxpr, pairs = closed.jaxpr, zip(closed.jaxpr.outvars, given, strict=False)
    jaxpr = jaxpr.replace(eqns=[one for one in jaxpr.eqns if one.primitive.name not in _PRINTS])
    if known := dict.fromkeys(one for one, is_given in pairs if is_given and not is_literal(one)):
        equations = [one for one in jaxpr.eqns if len(one.outvars) > 1 or one.outvars[0] not in known]
        computed = {one for equation in equations for one in equation.outvars} | {*jaxpr.invars, *jaxpr.constvars}
        inputs = [*jaxpr.invars, *(one for one in known if one not in computed)]
        jaxpr = jaxpr.replace(eqns=equations, invars=inputs)
    return _Reader().read(needed_equations(jaxpr, wanted), constants_of(closed))


def array_digest(array: Any) -> str:
    """A digest of the dtype, the shape and the bits of an array, at several GB/s.

    The words of the array are added up in columns of two lengths: it tells arrays apart, also those with the same
    values in another order, but does not protect from manipulation.

    >>> a, b = np.arange(4), np.array([1, 0, 2, 3])
    >>> array_digest(a) == array_digest(a.copy()) != array_digest(b)
    True
    """
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    host = np.asarray(array)
    found = hashlib.sha256(f"{host.dtype} {host.shape}".encode())
    content = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    words = content[: content.size // 8 * 8].view(np.uint64)
    found.update(content[words.nbytes :].tobytes())
    for length in (1021, 1031):  # primes: what cancels out in one of them does not in the other
        whole = words.size // length * length
        found.update(np.add.reduce(words[:whole].reshape(-1, length), axis=0).tobytes())
        found.update(words[whole:].tobytes())
    return found.hexdigest()[:32]


class _Reader:
    """Reads jaxprs; each inner one once, because most are shared by many equations."""

    def __init__(self) -> None:
        self._known: dict[int, Traced] = {}

    def read(self, jaxpr: Any, constants: dict[Any, Any]) -> Traced:
        """The equations of `jaxpr`, with the values of its constants."""
        names: dict[Any, str] = dict(zip(jaxpr.invars, _arguments(len(jaxpr.invars)), strict=True))
        whole, found = hashlib.sha256(), list[Equation]()

        def operand(variable: Any) -> str:
            if is_literal(variable):
                return _literal(variable)
            if variable not in names:
                names[variable] = array_digest(constants[variable])
            return names[variable]

        for equation in jaxpr.eqns:
            name, outputs = equation.primitive.name, equation.outvars
            if name in _PRINTS:
                continue
            operands = [operand(one) for one in equation.invars]
            if name in _CONSTRAINTS:
                names[outputs[0]] = operands[0]
                continue
            inner = [self._inner(one) for one in inner_functions(equation)]
            if len(inner) == 1 and not inner[0].equations and {*inner[0].results} <= {*_arguments(len(operands))}:
                # a function of constraints only
                passed = dict(zip(_arguments(len(operands)), operands, strict=True))
                names.update({one: passed[name] for one, name in zip(outputs, inner[0].results, strict=True)})
                continue
            is_update = UPDATE in scopes_of(equation)[0]
            for one in inner:
                found += [part._replace(is_update=True) for part in one.equations] if is_update else one.equations
            shapes = [_kind(one.aval) for one in (*equation.invars, *outputs)]
            literals = [text for text in operands if text.startswith(_LITERAL)]
            words = " ".join((name, _parameters(equation.params), *literals, *shapes))
            digest = f"{zlib.crc32(words.encode()) & 0xFFFF:04x}"
            found.append(Equation(digest, is_update, traceback_of(equation)))
            names.update({variable: f"{len(found)}.{at}" for at, variable in enumerate(outputs)})
            whole.update(" ".join((words, *operands, *(one.digest for one in inner), "\n")).encode())
        results = tuple(operand(one) for one in jaxpr.outvars)
        whole.update(" ".join(results).encode())
        used = "".join(names[one] for one in constants if one in names)
        constant = hashlib.sha256(used.encode()).hexdigest()[:32] if used else ""
        return Traced(whole.hexdigest()[:32], tuple(found), constant, results)

    def _inner(self, function: Any) -> Traced:
        jaxpr = body_of(function)
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = self.read(jaxpr, constants_of(function))
        return self._known[id(jaxpr)]


@cache
def _arguments(count: int) -> tuple[str, ...]:
    return tuple(f"in{at}" for at in range(count))


def _parameters(params: dict[str, Any]) -> str:
    computed = {name: value for name, value in sorted(params.items()) if not _NOT_COMPUTED.search(name)}
    return " ".join(f"{name}={_text(value)}" for name, value in computed.items())


def _text(value: Any) -> str:
    """A value as text, the same in every process; functions are read apart."""
    if isinstance(value, tuple | list):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, frozenset | set):
        return f"{{{','.join(sorted(map(_text, value)))}}}"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_text(one)}' for name, one in sorted(value.items()))}}}"
    if isinstance(value, np.ndarray | jax.Array):
        return array_digest(value)
    if isinstance(value, np.generic):
        return str(value.item())
    if is_function(value):
        return ""
    if callable(value) and not isinstance(value, type):
        return getattr(value, "__qualname__", type(value).__name__)
    return _ADDRESS.sub("", str(value))


def _literal(literal: Any) -> str:
    value = literal.val
    if isinstance(value, int | float | np.generic) or (np.ndim(value) == 0 and isinstance(value, np.ndarray)):
        return f"{_LITERAL}{_kind(literal.aval)} {value!s}"
    return f"{_LITERAL}{array_digest(value)}"


def _kind(aval: Any) -> str:
    return _shape(getattr(aval, "dtype", None), getattr(aval, "shape", ()))


@lru_cache(4096)
def _shape(dtype: Any, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"


def _place(trace: Any) -> str:
    """Where a traced operation is written: "`loss`, line 12 of train.py"; "" outside of the user's code."""
    frame = None if trace is None else user_frame(traceback.extract_tb(trace.as_python_traceback()))
    return "" if frame is None else f"`{frame.name}`, line {frame.lineno} of {frame.filename.rpartition('/')[2]}"


# digests of arrays, computed where they are

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}  # by bytes of an element
_ODD = (0x9E3779B1, 0x85EBCA77)  # multipliers of two independent sums


def digest_of(tree: PyTree) -> str:
    """A digest of the paths, dtypes, shapes and bits of arrays, the same for every sharding; "" without arrays.

    It is a sum of integers, which is exact in any order. It tells arrays apart, but does not protect from manipulation.

    >>> digest_of({"a": jnp.ones(3)}) == digest_of({"a": jnp.ones(3)}) != digest_of({"a": jnp.zeros(3)})
    True
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return ""
    sums = jax.device_get(_checksums([leaf for _, leaf in leaves]))
    named = [(leaf_path(path), leaf, one.tolist()) for (path, leaf), one in zip(leaves, sums, strict=True)]
    lines = [f"{path} {leaf.dtype} {list(leaf.shape)} {one}" for path, leaf, one in named]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _sum(leaf: Any, odd: int) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        leaf = jax.random.key_data(leaf)
    elif jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    elif leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    elif jax.dtypes.itemsize_bits(leaf.dtype) < 8:
        leaf = leaf.astype(jnp.float32)  # which has all of their values
    words = lax.bitcast_convert_type(leaf, _WORDS[leaf.dtype.itemsize]).astype(jnp.uint32)  # 8 bytes: one more axis
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):  # not flattened, which would gather a sharded array
        place = place * jnp.uint32(size) + lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mixed(words ^ _mixed(place * jnp.uint32(odd) + jnp.uint32(1))), dtype=jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)
    return words ^ (words >> 16)


_checksums = compiled_function(lambda leaves: [jnp.stack([_sum(leaf, odd) for odd in _ODD]) for leaf in leaves])
