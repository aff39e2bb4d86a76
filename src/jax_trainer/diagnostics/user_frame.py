"""Notes for errors in the user's code: its line, the shapes of the batch, and the likely fix."""

import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax

from jax_trainer.diagnostics.leaves import Batch

Error = TypeVar("Error", bound=BaseException)
Function = TypeVar("Function", bound=Callable[..., Any])

_IN_YOUR_CODE, _USER_FUNCTION = "In your code", "user_function"
MOST_LEAVES = 12  # of a batch that a message lists
_paths = sysconfig.get_paths()
# installed packages are not the user's code
_INSTALLED = tuple({str(Path(path)) for path in (_paths["stdlib"], _paths["purelib"], _paths["platlib"])})
_OURS = str(Path(__file__).parent.parent)

IN_UPDATE = "This happened in the optimizer's update."
_OF_UPDATE = (
    "Check the optimizer's arguments: numbers or schedules, such as `optax.adam(1e-3)`, not strings; and, if it "
    "already has a state, that it was created for the parameters of this model."
)
_COMPILED = "A step is compiled: while it is traced, arrays have shapes and dtypes but no values."
_RANK = "Integer labels have the shape of the logits without the last axis:"
_REAL = "The loss to differentiate must be a real floating point number:"
# fixes of frequent errors of JAX, Flax and Optax, by type and text; the first match is used
_FIXES = {
    "TracerArrayConversionError": f"{_COMPILED} Compute with `jax.numpy` (`jnp.…`) instead of numpy.",
    "TracerBoolConversionError": (
        f"{_COMPILED} Write `jnp.where(condition, a, b)` or `jax.lax.cond` instead of `if`, `and`, `or`, `not`."
    ),
    "ConcretizationTypeError": (
        f"{_COMPILED} Leave out `float(…)`, `int(…)`, `.item()` and `.tolist()`: return the array itself."
    ),
    r"subdtype of .*numpy\.integer.*got (?:float|bool)": (
        "Integer labels are expected here: use `labels.astype(int)`, and `labels.argmax(-1)` for one-hot labels."
    ),
    r"ScopeParamShapeError|dot_general requires contracting dimensions": (
        "The layer expects inputs of another width. Set its number of input features, or flatten the inputs: "
        "`x.reshape(len(x), -1)`."
    ),
    r"conv_general_dilated lhs feature dimension size.*but (\d+) // \d+ != (\d+)": (
        "The channels are the last axis of the inputs, {0} here, and the convolution has {1}: images are [batch, "
        "height, width, channels]. Add a missing axis, `x[..., None]`, or move it, `x.transpose(0, 2, 3, 1)`."
    ),
    r"has no attribute '?detach": "An array has no `detach`: `jax.lax.stop_gradient(x)` keeps gradients from flowing.",
    r"(?:Tracer|Array\w*)'?(?: object)? has no attribute '?(float|long|double)": (
        "An array has no `{0}`: convert it with `x.astype(jnp.float32)` or `x.astype(jnp.int32)`."
    ),
    r"(?<![.\w])\w+\(\) got an unexpected keyword argument '(?:dim|keepdim)'": (
        "Functions of JAX and numpy take `axis=` and `keepdims=`, where torch takes `dim=` and `keepdim=`."
    ),
    r"indices and arr must have the same number of dimensions|with_integer_labels": (
        f"{_RANK} use `labels.squeeze(-1)` for one axis too many, and `labels.argmax(-1)` for one-hot labels."
    ),
    r"axis \d+ is out": (
        f"{_RANK} flatten or pool (`x.reshape(len(x), -1)`, `x.mean((1, 2))`) where the model returns more axes than "
        "[n, classes]."
    ),
    r"[Ii]ncompatible shapes.*\((\d+),\), \(\1, \d+\)|[Ii]ncompatible shapes.*\((\d+), \d+\), \(\2,\)": (
        "Outputs [n, k] are incompatible with targets [n]. For integer labels use "
        "`optax.softmax_cross_entropy_with_integer_labels`, or `jax.nn.one_hot(labels, k)`; for one number per example "
        "give the model one output, and squeeze it."
    ),
    r"[Ii]ncompatible shapes|must have the same shape|shapes must be equal|[Ss]hape mismatch": (
        "The arrays in this line have incompatible shapes: compare the outputs of the model with the targets. For "
        "predictions [n, 1] and targets [n] use `predictions.squeeze(-1)`."
    ),
    r"'\w*Tracer' object is not callable": (
        "`loss_fn(logits, labels)` gets the outputs of the model. To call the model, name the parameters "
        "`loss_fn(model, batch)`, or `loss_fn(params, batch)` for linen."
    ),
    r"NoneType' object (has no attribute|is not)|unsupported operand.*NoneType": (
        "Something here is None: does the model's call, or a function, lack its `return`?"
    ),
    r"'(tuple|list|dict)' object has no attribute '(?:input|target)'": (
        "Batches of this trainer must have `input` and `target`, like `SupervisedBatch`; this one is a {0}. Use such "
        "batches, or override `batch_to_input` and the loss."
    ),
    r"'(?:tuple|list|dict)' object has no attribute '(?:apply_fn|params|batch_stats)'": (
        "A batch was passed where a state is expected. The order of the arguments is `(state, batch)`."
    ),
    r"'(tuple|list|dict)' object has no attribute": (
        "A {0} is used as an array: select the part of the model's outputs, or of the targets, that is needed."
    ),
    r"Gradient only defined for scalar-output functions": (
        "The loss to differentiate must be a scalar: take its mean; with metrics, pass `has_aux=True`."
    ),
    r"grad requires real-valued outputs|grad requires real- or complex-valued|is not a valid JAX type": (
        f"{_REAL} counts, `argmax`, comparisons and strings have no gradient."
    ),
    r"(use_running_average|deterministic)\" must be passed": (
        "Give the model's `__call__` a parameter `train: bool`, and pass `{0}=not train` to the layer."
    ),
    r"no `rngs` argument was provided": "Create the layer with random streams: `nnx.Dropout(0.5, rngs=rngs)`.",
    r"unsupported format string passed to \w*Tracer": (
        f"{_COMPILED} Print with `jax.debug.print`, or return the value as a metric."
    ),
    r"collection \"params\"": (
        'Parameters are one of several collections: `model.apply({{"params": params}}, x)`, and an `init` returns them '
        'as `{{"params": …}}`.'
    ),
    r"ScopeCollectionNotFound|ModifyScopeVariableError": (
        'Pass all collections to the model, and the mutable ones by name: `model.apply({{"params": params, '
        '"batch_stats": …}}, x, mutable=["batch_stats"])`; `self.model_linen_apply` and `state.apply` do this.'
    ),
    r"ApplyScopeInvalidVariablesStructureError": (
        '`model.init` returns all collections; pass one of them: `params=variables["params"]`.'
    ),
    r"InvalidRngError": (
        'Pass random keys to the model: `model.apply(…, rngs={{"dropout": rng}})`; `self.model_linen_apply` and '
        "`state.apply` do this."
    ),
    r"TraceContextError": "A step may change its arguments only: return the gradients, without `optimizer.update(…)`.",
    r"__call__\(\) missing": (
        "The model is called with the inputs, and `train` if it has it. Give other parameters a default, or call the "
        "model in a custom loss."
    ),
    r"mismatch in size of old and new data-descriptor": (
        "A tuple was passed where an array is expected: unpack it, `logits, mutable = self.model_linen_apply(…)`."
    ),
    r"(tuple|list) indices must be integers": (
        "A {0} is indexed with a string. If it is the batch, unpack it, `x, y = batch`, or use dict batches."
    ),
    r"CallCompactUnboundModuleError": "Pass the module's method instead of the module: `model.apply`, `model.init`.",
    r"AssignSubModuleError": "Write `@nn.compact` above the method, or create the submodules in `setup`.",
}


def with_user_frame(error: Error, batch: Batch = None) -> Error:
    """`error` with notes on the user's line that raised it, the shapes and dtypes of the batch, and the likely fix.

    Without a line of the user's code there is no note on it.
    """
    notes = getattr(error, "__notes__", [])
    added = [
        line_of(error.__traceback__),
        "" if batch is None else f"The batch: {describe_shapes(batch)}.",
        _fix(error),
    ]
    new = [note for note in added if note and not any(old.startswith(note.partition(": ")[0]) for old in notes)]
    if new:
        error.__notes__ = sorted([*new, *notes], key=lambda note: not note.startswith(_IN_YOUR_CODE))
    return error


@contextmanager
def explaining(batch: Batch = None) -> Iterator[None]:
    """Adds the notes of `with_user_frame` to errors raised inside the block."""
    try:
        yield
    except Exception as error:
        with_user_frame(error, batch)
        raise


def attribute_to(function: Function, user_function: Any) -> Function:
    """Marks `function` as a wrapper of `user_function`, so that errors name the latter."""
    setattr(function, _USER_FUNCTION, user_function)
    return function


@contextmanager
def noting_definition(function: Any) -> Iterator[None]:
    """Adds where the user's `function` is defined to errors that this library raises about its result."""
    try:
        yield
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        has_line = line_of(error.__traceback__) or any(note.startswith(_IN_YOUR_CODE) for note in notes)
        if not has_line and (definition := _definition(function)):
            error.__notes__ = [definition, *notes]
        raise


def line_of(trace: Any) -> str:
    """The innermost line of the user's code in a traceback, as the text of a note; empty if it has none."""
    return _line_of(traceback.extract_tb(trace))


@contextmanager
def noting(text: str) -> Iterator[None]:
    """Adds the note `text` to errors raised inside the block."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def describe_shapes(batch: Batch) -> str:
    """The shapes and dtypes of a batch.

    >>> import numpy as np
    >>> describe_shapes((np.zeros((8, 4), np.float32), np.zeros(8, np.int32)))
    'batch[0] float32[8, 4], batch[1] int32[8]'
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    shapes = []
    for path, leaf in leaves[:MOST_LEAVES]:
        is_array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        kind = f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]" if is_array else f"a {type(leaf).__name__}"
        shapes.append(f"batch{jax.tree_util.keystr(path)} {kind}")
    more = [f"and {len(leaves) - MOST_LEAVES} more"] if len(leaves) > MOST_LEAVES else []
    return ", ".join([*shapes, *more]) or "nothing"


def user_frame(stack: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code; None if there is none."""
    return next((frame for frame in reversed(stack) if _is_user_frame(frame)), None)


def _line_of(stack: traceback.StackSummary) -> str:
    last = user_frame(stack)
    if last is None:
        return ""
    return f'{_IN_YOUR_CODE}: File "{last.filename}", line {last.lineno}, in {last.name}\n    {last.line}'


def _definition(function: Any) -> str:
    while hasattr(function, _USER_FUNCTION):
        function = getattr(function, _USER_FUNCTION)
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    if code is None:  # a callable object, or a function written in C
        return ""
    return _line_of(traceback.StackSummary.from_list([(code.co_filename, code.co_firstlineno, code.co_name, None)]))


def _fix(error: BaseException) -> str:
    if IN_UPDATE in getattr(error, "__notes__", []):
        return f"Likely fix: {_OF_UPDATE}"
    is_external = isinstance(error, AttributeError) or type(error).__module__.startswith(("flax.", "jax."))
    is_external |= "__call__()" in str(error)  # Python could not call a model
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].filename.startswith(_OURS) and not is_external:
        return ""  # messages of this library name the fix; frames of Flax and JAX may be hidden
    text = f"{type(error).__name__}: {error}"
    for pattern, fix in _FIXES.items():
        if found := re.search(pattern, text):
            return f"Likely fix: {fix.format(*found.groups())}"
    return ""


def _is_user_frame(frame: traceback.FrameSummary) -> bool:
    file = frame.filename
    is_generated = file == "<string>" and frame.name.startswith("__")  # by `dataclass`
    return not (is_generated or file.startswith((*_INSTALLED, _OURS, "<frozen")) or "site-packages" in file)
