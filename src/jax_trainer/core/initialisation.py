"""Initialising a state with small programs, one for each kind of array, instead of one large program for all arrays.

The time to compile one program for all arrays grows with their number: 19 s for GPT-2 on a GPU, more than for a
training step. But the arrays of a state are few kinds of computations: each layer has the same weights with other
random keys, and the optimizer state is zeros. So `init` is traced, and computed in two stages. First the random keys,
operation by operation: small integers, which are exact in any program. Then each array from its keys, by a program
that arrays of the same shape, distribution and sharding share. The operations of an array are compiled together, as in
one large program, so it has the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.diagnostics.jax_internals import constants_of, function_of, is_literal

MOST_KEYS = 64  # elements of a small integer array
MOST_KINDS = 1 / 4  # of the arrays: with more, compiling each kind takes longer than compiling all arrays together
MOST_REPEATED = 3  # the operations of all arrays, relative to those of one program; an average repeats the parameters


class Piece(NamedTuple):
    """The computation of one array: `init` of the values at the positions `inputs`. Equal kinds share programs."""

    kind: Any
    init: Callable[..., Sequence[jax.Array]]
    inputs: tuple[int, ...]


class Split(NamedTuple):
    """A traced function in two stages: `keys(*args)` are values, and each result is a piece of these."""

    keys: Callable[..., Sequence[Any]]
    pieces: tuple[Piece, ...]
    structure: Any


def split(make: Callable[..., Any], *args: Any) -> Split | None:
    """`make` in two stages, for such arguments; None if one program is better: arrays differ, or share computations."""
    closed, shapes = jax.make_jaxpr(make, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    if jaxpr.effects:
        return None
    results = {variable for variable in jaxpr.outvars if not is_literal(variable)}
    known = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars])  # in order; without a value
    producers: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        operands = [variable for variable in equation.invars if not is_literal(variable)]
        is_exact = all(_is_small_integer(variable.aval) for variable in equation.outvars)
        # a result may be donated later, which must not delete a key
        if is_exact and all(one in known for one in operands) and results.isdisjoint(equation.outvars):
            known.update(dict.fromkeys(equation.outvars))
            continue
        producers.update(dict.fromkeys(equation.outvars, equation))
    early = [one for one in jaxpr.eqns if one.outvars[0] in known]
    numbers = {variable: number for number, variable in enumerate(known)}
    pieces = [_piece(variable, producers, numbers, jaxpr) for variable in jaxpr.outvars]
    kinds, operations = {piece.kind for piece, _ in pieces}, sum(length for _, length in pieces)
    late = len({id(equation) for equation in producers.values()})
    if len(kinds) > MOST_KINDS * len(pieces) or operations > MOST_REPEATED * late + len(pieces):
        return None
    evaluate = function_of(jaxpr, early, jaxpr.invars, [*known], constants_of(closed))
    return Split(
        lambda *args: evaluate(*jax.tree.leaves(args)), tuple(piece for piece, _ in pieces), jax.tree.structure(shapes)
    )


def _piece(result: Any, producers: dict[Any, Any], numbers: dict[Any, int], jaxpr: Any) -> tuple[Piece, int]:
    """The computation of one result, and its number of operations."""
    needed: dict[int, Any] = {}
    waiting = [result]
    while waiting:
        variable = waiting.pop()
        equation = None if is_literal(variable) else producers.get(variable)
        if equation is not None and id(equation) not in needed:
            needed[id(equation)] = equation
            waiting += equation.invars
    equations = [one for one in jaxpr.eqns if id(one) in needed]
    names: dict[Any, int] = {}  # in the order of their first use, which is the same for equal computations
    inputs: list[Any] = []
    kind: list[Any] = []
    for equation in equations:
        operands = [_operand(variable, names, inputs, numbers) for variable in equation.invars]
        outputs = [names.setdefault(variable, len(names)) for variable in equation.outvars]
        kind.append((equation.primitive, *operands, *outputs, _parameters(equation.params)))
    kind.append(_operand(result, names, inputs, numbers))
    kind += [str(variable.aval) for variable in inputs]
    evaluate = function_of(jaxpr, equations, inputs, [result], {})

    def init(*values: Any) -> Sequence[jax.Array]:  # its name is that of the program
        return evaluate(*values)

    return Piece(tuple(kind), init, tuple(numbers[one] for one in inputs)), len(equations)


def _operand(variable: Any, names: dict[Any, int], inputs: list[Any], numbers: dict[Any, int]) -> Any:
    if is_literal(variable):
        value = np.asarray(variable.val)
        return value.tobytes(), str(variable.aval)
    if variable not in names:
        names[variable] = len(names)
        if variable in numbers:
            inputs.append(variable)
    return names[variable]


def _parameters(params: dict[str, Any]) -> Any:
    """The parameters of an operation as a key; functions of the same trace are the same objects."""
    return tuple((name, value if _is_hashable(value) else id(value)) for name, value in sorted(params.items()))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_small_integer(aval: Any) -> bool:
    is_exact = jnp.issubdtype(aval.dtype, jnp.integer) or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return is_exact and aval.size <= MOST_KEYS
