"""What devices can hold and compute: the largest batch, their memory, and measured rates, for the time of a step."""

import math
import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies

from jax_trainer.core.compile import compiled_function
from jax_trainer.diagnostics.flops import Flops
from jax_trainer.engine.costs import MARGIN, CompiledCost, StepTime
from jax_trainer.sharding.mesh import LayoutError

CLOSE = 0.02  # of the memory: a batch that leaves no more than this and the margin is the largest
MOST_COMPILATIONS = 6  # to find the largest batch
LARGEST = 1 << 30  # examples in a batch
GPUS_PER_NODE = 8  # of GPUs that are not there


def largest_batch(
    needed: Callable[[int], int],
    start: int,
    limit: int,
    *,
    fixed: int = 0,
    multiple: int = 1,
    largest: int = LARGEST,
) -> tuple[int, dict[int, int]]:
    """The largest batch that fits, and the bytes that each size which was tried needs; 0 if none fits.

    Memory is nearly linear in the batch size: the first size leads to one that needs about half of the memory, and a
    line through both to the third, which is corrected if necessary.

    Args:
        needed: bytes that a batch of this size needs; compiles it.
        start: the first size.
        limit: bytes of the device, of which `MARGIN` is left free.
        fixed: bytes that are needed whatever the size, such as those of the state.
        multiple: of which a size must be a multiple.
        largest: the largest size to consider.

    >>> largest_batch(lambda size: 1000 + 10 * size, 16, 11_000, fixed=500)
    (964, {16: 1160, 117: 2170, 964: 10640})
    """
    target, tried, fitting = (1 - MARGIN) * limit, dict[int, int](), 0
    largest = max(multiple, largest - largest % multiple)

    def rounded(size: float) -> int:
        # coarser for large sizes, which suits the hardware and costs less than a percent
        step = multiple * max(1, 2 ** int(math.log2(max(1.0, size / 128 / multiple))))
        return int(min(largest, max(multiple, size // step * step)))

    size = min(largest, max(multiple, start - start % multiple))
    while len(tried) < MOST_COMPILATIONS:
        tried[size] = needed(size)
        fitting = max((one for one, need in tried.items() if need <= target), default=0)
        failing = min((one for one, need in tried.items() if need > target), default=largest + multiple)
        is_close = bool(fitting) and tried[fitting] >= (1 - CLOSE) * target
        if is_close or failing - fitting <= multiple:
            break
        if len(tried) == 1:
            ratio = (target / 2 - fixed) / max(1, tried[size] - fixed)
            size = rounded(size * (max(ratio, 1 / 8) if not 0.5 < ratio < 2 else 2 if ratio >= 1 else 0.5))
        else:
            # the two sizes that are nearest to the target in what they need
            (a, need_a), (b, need_b) = sorted(tried.items(), key=lambda one: abs(one[1] - target))[:2]
            slope = (need_b - need_a) / (b - a)
            size = rounded(a + (target - need_a) / slope) if slope > 0 else rounded(2 * fitting or size / 2)
            size = min(max(size, fitting + multiple), failing - multiple)
        if size in tried:
            break
    return fitting, tried


# devices


def described_devices(count: int) -> list[Any]:
    """`count` devices like those of this process: its own, or descriptions of GPUs, for which steps only compile."""
    own = jax.devices()
    if len(own) >= count:
        return own[:count]
    if own[0].platform != "gpu":
        raise LayoutError(
            f"{count} devices are needed, and JAX has {len(own)} ({own[0].platform}); only GPUs can be described. On "
            f"the CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={count}, or `jax.config.update("
            f"'jax_num_cpu_devices', {count})` before any other use of JAX."
        )
    nodes, per_node = (1, count) if count <= GPUS_PER_NODE else (count // GPUS_PER_NODE, GPUS_PER_NODE)
    if nodes * per_node != count:
        raise LayoutError(f"{count} GPUs are described as nodes of {GPUS_PER_NODE}. Use a multiple of it.")
    shape = f"1x{nodes}x{per_node}"
    return list(topologies.get_topology_desc(platform="cuda", topology_name="", topology=shape).devices)


def device_memory(devices: list[Any]) -> int:
    """The memory of one of these devices in bytes; CPU devices share that of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    return physical_memory() // len(devices)


def physical_memory() -> int:
    """The memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# rates


def estimated_time(
    cost: CompiledCost, flops: Iterable[Flops], devices: list[Any], *, steps: int = 1, unread: int = 0
) -> tuple[StepTime, dict[str, float]]:
    """The estimated duration of a step on these devices, and the measured rates that it is computed from.

    Args:
        cost: of the compiled step.
        flops: of one step on all devices.
        devices: the devices.
        steps: in one call.
        unread: bytes of arrays from which the step gathers some rows; XLA counts all of them as read.
    """
    # CPU devices are threads of the same cores
    share = len(devices) if jax.default_backend() == "cpu" else 1
    by_dtype: dict[str, float] = {}
    repeats, once = 0.0, 0.0
    for one in flops:
        repeats, once = repeats + one.flops, once + one.once
        if one.dtype:
            by_dtype[one.dtype] = by_dtype.get(one.dtype, 0.0) + one.flops / len(devices)
    most = max(by_dtype.values(), default=0.0)
    used = {name: count for name, count in by_dtype.items() if count > most / 100}
    rates = {name: matrix_rate(name) / share for name in used} | {"memory": memory_rate() / share}
    compute = sum(count / rates[name] for name, count in used.items())
    times = repeats / once if once else 1.0  # that a loop runs, over the one time that XLA counts
    traffic = max(0.0, cost.bytes_accessed - unread) * times / rates["memory"]
    start = dispatch_seconds()
    return StepTime(
        compute=compute, traffic=traffic, dispatch=start / steps, kernels=cost.kernels * times * start
    ), rates


@cache
def matrix_rate(dtype: str) -> float:
    """FLOP/s of a product of two square matrices on one device, measured once."""
    side = 1024 if jax.default_backend() == "cpu" else 8192
    kind = jnp.dtype(dtype) if jnp.issubdtype(jnp.dtype(dtype), jnp.inexact) else jnp.dtype("float32")
    a = jnp.ones((side, side), kind)
    return 2 * side**3 / _fastest(compiled_function(lambda a: a @ a), a)


@cache
def memory_rate() -> float:
    """Bytes per second of reading an array and writing another on one device, measured once."""
    words, times = 1 << (24 if jax.default_backend() == "cpu" else 28), 10
    # several times in one call: a new allocation may take longer than to write to it
    repeated = compiled_function(lambda x: lax.fori_loop(0, times, lambda _, x: x * 0.5, x))
    array = jnp.ones((words,), jnp.float32)
    return 2 * array.nbytes * times / _fastest(repeated, array)


@cache
def dispatch_seconds() -> float:
    """Seconds of calling a compiled function that computes nothing, measured once."""
    return _fastest(compiled_function(lambda x: x + 1), jnp.zeros(()), 20)


def _fastest(function: Callable[[Any], Any], argument: Any, times: int = 10) -> float:
    jax.block_until_ready(function(argument))
    best = math.inf
    for _ in range(times):
        started = time.perf_counter()
        jax.block_until_ready(function(argument))
        best = min(best, time.perf_counter() - started)
    return best
