"""Running out of memory: what took it, in numbers, and what helps."""

import math
from typing import Any

import jax

from jax_trainer.core.metrics import Batch, PyTree
from jax_trainer.core.recompile import RecompileGuard
from jax_trainer.core.state import FlatState, TrainState

SIGNS = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")
KNOBS = {  # what helps, and where: when training, when asking a model, when a state is made
    "a smaller batch size": ("train", "eval", "predict"),
    "the same batch in parts, one after the other (`accumulate: 4`)": ("train",),
    "computing in half precision (`precision: bf16`)": ("train", "eval", "predict"),
    "rematerialisation in the model (`nn.remat`, `nnx.remat`, `jax.checkpoint`)": ("train",),
    "a smaller model": ("init", "begin"),
    "weights in half precision (`precision: bf16_full`)": ("init", "begin"),
    "an optimizer that keeps less (SGD, Adafactor)": ("init", "begin"),
    "more devices to share the work": ("train", "eval", "predict", "init", "begin"),
}


class OutOfMemoryError(RuntimeError):
    """The memory of a device does not suffice. The message says what takes it, and what helps."""


class OomReporter(RecompileGuard):
    """A guarded function that says what takes the memory when there is not enough of it."""

    _ran = 0  # how many of its compilations have run

    def __call__(self, held: FlatState, *more: Any) -> Any:
        """Runs the function, and waits for it the first time after it was compiled."""
        try:
            results = super().__call__(held, *more)
            if self.compilations != self._ran:
                # the CPU allocates after the call has returned: who does not wait hears of it at some later batch
                jax.block_until_ready(results)
                self._ran = self.compilations
            return results
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, self.name, held.state, more[1])  # noqa: B904 - the same error, or one from it


def explain_oom(error: Exception, name: str, state: TrainState, batch: Batch) -> Exception:
    """An `OutOfMemoryError` if `error` is one of memory, otherwise itself. `state` may be shapes only."""
    if not any(sign in str(error) for sign in SIGNS):
        return error
    takes = {"parameters": state.params, "optimizer state": state.opt_state, _batch(name, batch): batch}
    sizes = [f"{part} {readable_bytes(_bytes(tree))}" for part, tree in takes.items() if tree is not None]
    knobs = [knob for knob, kinds in KNOBS.items() if name.partition("_")[0] in kinds]
    told = OutOfMemoryError(
        f"`{name}` needs more memory than {_device(state)} has. Known parts of it{_each(state)}: {', '.join(sizes)}; "
        f"gradients and what the model computes in between come on top. What helps: {'; '.join(knobs)}. "
        f"The device said: {str(error).splitlines()[0]}"
    )
    told.__cause__ = error
    return told


def readable_bytes(count: float) -> str:
    """So many bytes, in words.

    >>> readable_bytes(312), readable_bytes(24_120_000_000)
    ('312 B', '24.1 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def _batch(name: str, batch: Batch) -> str:
    axis = int(name == "train_chunk")  # batches of a chunk are stacked
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if hasattr(leaf, "shape")]
    size = max((shape[axis] for shape in shapes if len(shape) > axis), default=1)
    return f"{shapes[0][0]} batches of {size} examples each" if axis else f"a batch of {size} examples"


def _bytes(tree: PyTree) -> int:
    """What a tree takes on each device."""
    return sum(_leaf_bytes(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


def _leaf_bytes(leaf: Any) -> int:
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize


def _devices(state: TrainState) -> list[Any]:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    return list(next((sharding.device_set for sharding in shardings if sharding is not None), ()))


def _each(state: TrainState) -> str:
    return " on each device" if len(_devices(state)) > 1 else ""


def _device(state: TrainState) -> str:
    device = (_devices(state) or jax.local_devices())[0]
    stats = device.memory_stats() or {}
    limit = f", {readable_bytes(stats['bytes_limit'])}" if "bytes_limit" in stats else ""
    return f"the device ({device.device_kind}{limit})"
