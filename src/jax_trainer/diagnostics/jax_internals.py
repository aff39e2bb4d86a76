"""What is read of the inside of JAX, which any version may change: private modules, and how traced functions are kept.

Tried with jax 0.10.2, 0.11.2 and 0.12.0. Nothing else here knows these parts. A parameter of an operation that is an
argument of a public function, such as `dimension_numbers` of `jax.lax.dot_general`, is read where it is needed.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jax._src import compilation_cache, distributed
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

# traced functions: equations, and the functions that these call


def body_of(function: Any) -> Any:
    """The equations of a traced function, without the values of its constants; since jax 0.12, both are one object."""
    return getattr(function, "jaxpr", function)


def constants_of(function: Any) -> dict[Any, Any]:
    """The variables of a traced function that are constants, with their values."""
    return dict(zip(body_of(function).constvars, getattr(function, "consts", ()), strict=False))


def inner_functions(equation: Any) -> Iterator[Any]:
    """The traced functions among the parameters of an equation, by the names of the parameters."""
    for _, value in sorted(equation.params.items()):
        yield from (one for one in (value if isinstance(value, tuple | list) else (value,)) if is_function(one))


def is_function(value: Any) -> bool:
    """Whether a parameter of an equation is a traced function."""
    return hasattr(body_of(value), "eqns")


def is_literal(variable: Any) -> bool:
    """Whether an operand is a constant in the equation, with its value in `val`, and not the result of another one."""
    return hasattr(variable, "val")


def forwarded(function: Any) -> list[int | None]:
    """For each result of a traced function, which of its arguments it is, also through inner functions; or None.

    >>> import jax
    >>> forwarded(jax.make_jaxpr(lambda x, y: jax.jit(lambda a, b: (b, a + b))(x, y))(1.0, 2.0))
    [1, None]
    """
    body = body_of(function)
    same = {variable: variable for variable in body.invars}
    for equation in body.eqns:
        inner = list(inner_functions(equation))
        if len(inner) == 1 and len(body_of(inner[0]).invars) == len(equation.invars):
            if equation.primitive.name in ("scan", "while"):
                continue  # whose results are those of the last turn
            for variable, source in zip(equation.outvars, forwarded(inner[0]), strict=False):
                operand = None if source is None else equation.invars[source]
                if operand is not None and not is_literal(operand):
                    same[variable] = same.get(operand, operand)
    numbers = {variable: number for number, variable in enumerate(body.invars)}
    return [None if is_literal(one) else numbers.get(same.get(one, one)) for one in body.outvars]


def scan_counts(equation: Any) -> tuple[int, int]:
    """How many of the operands of a `scan` are constants, and how many after them are carried."""
    params = equation.params
    if "num_consts" in params:  # jax 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scopes_of(equation: Any) -> tuple[tuple[str, ...], set[str]]:
    """The names of the scopes (`jax.named_scope`) around an equation, and of the transformations that it comes from."""
    stack = equation.source_info.name_stack.stack
    scopes = tuple(one.name for one in stack if type(one).__name__ == "Scope")
    return scopes, {one.name for one in stack if type(one).__name__ == "Transform"}


def traceback_of(equation: Any) -> Any:
    """Where an equation is written, or None; `as_python_traceback()`, which takes longer, is Python's form of it."""
    return equation.source_info.traceback


@contextmanager
def context_of(equation: Any) -> Iterator[None]:
    """Operations inside have the scopes, the traceback and the settings of an equation."""
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    with source_info_util.user_context(traceback_of(equation), name_stack=names), equation.ctx.manager:
        yield


def evaluated(equation: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation for other operands."""
    results = equation.primitive.bind(*values, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


def function_of(
    jaxpr: Any, equations: list[Any], inputs: Sequence[Any], outputs: Sequence[Any], constants: dict[Any, Any]
) -> Callable[..., Sequence[Any]]:
    """A function that evaluates some equations of `jaxpr`, from some of its variables to others."""
    part = jaxpr.replace(eqns=equations, constvars=[*constants], invars=[*inputs], outvars=[*outputs])
    return jaxpr_as_fun(ClosedJaxpr(part, [*constants.values()]))


def needed_inputs(jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which inputs the `wanted` results depend on."""
    return dce_jaxpr(jaxpr, [*wanted])[1]


def needed_equations(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    """`jaxpr` with all of its inputs, and without what its `wanted` results do not depend on."""
    return dce_jaxpr(jaxpr, [*wanted], instantiate=True)[0]


# compiling, keys and processes


def takes_constants(lowered: Any) -> bool:
    """Whether a lowered function gets constants as arguments, which are not in its text; True if that is not known."""
    return getattr(lowered._lowering, "const_args", None) != []


def is_compiling() -> bool:
    """Whether a thread is in the compiler of JAX, which says nothing before it has ended."""
    compiler = str(Path(compilation_cache.__file__).with_name("compiler.py"))
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code.co_filename == compiler:
                return True
            frame = frame.f_back
    return False


def persistent_cache() -> Any:
    """The cache in which JAX looks for compiled programs, or None."""
    return compilation_cache._cache


def set_persistent_cache(cache: Any) -> None:
    """Lets JAX look for compiled programs in a cache with `get` and `put`; None: in none."""
    compilation_cache._cache = cache


def key_impl(dtype: Any) -> str:
    """The name of the implementation of typed keys; `jax.random.key_impl` takes no `ShapeDtypeStruct`."""
    return str(dtype._impl.name)


def key_value_client() -> Any:
    """The client of the key-value store of `jax.distributed`, which Orbax uses in the same way; None before joining."""
    return distributed.global_state.client
