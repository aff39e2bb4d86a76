"""What steps cost and devices have: XLA's report of a step, the largest batch that fits, rates, peaks and memory."""

import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from jax_trainer.core import Batch, MetricWindow, StepTrace
from jax_trainer.sharding.mesh import LayoutError

MARGIN = 0.03  # of the memory, which the largest batch leaves free: allocations are rounded, and leave gaps
CLOSE = 0.02  # of the memory: a batch that leaves no more than this and the margin is the largest
MOST_COMPILATIONS = 6  # to find the largest batch
LARGEST = 1 << 30  # examples in a batch
GPUS_PER_NODE = 8  # of GPUs that are not there
_UNITS = {"": 1, "b": 1} | {
    f"{unit}{i}b": (1024 if i else 1000) ** n for n, unit in enumerate("kmgt", 1) for i in ("", "i")
}
# dense bf16 (float16 where there is no bf16) matrix operations per second, by a part of `device_kind`, most specific
# first; from the data sheets of the vendors, without sparsity
PEAK_FLOPS: dict[str, float] = {
    "B200": 2.25e15,  # NVIDIA DGX B200 data sheet: 36 PFLOPS of 8 GPUs with sparsity
    "H200": 989e12,  # NVIDIA H200 data sheet, SXM: 1,979 with sparsity
    "H100 PCIe": 756e12,  # NVIDIA H100 data sheet: 1,513 with sparsity
    "H100 NVL": 835e12,  # NVIDIA H100 data sheet: 1,671 with sparsity
    "H100": 989e12,  # NVIDIA H100 data sheet, SXM: 1,979 with sparsity
    "A100": 312e12,  # NVIDIA A100 data sheet
    "A10G": 70e12,  # AWS G5: 70 with float16 accumulation
    "A10": 125e12,  # NVIDIA A10 data sheet
    "L4": 121e12,  # NVIDIA L4 data sheet: 242 with sparsity
    "T4": 65e12,  # NVIDIA T4 data sheet, float16
    "V100": 125e12,  # NVIDIA V100 data sheet, float16
    "RTX 4090": 165.2e12,  # NVIDIA Ada white paper, float32 accumulation
    "TPU v4": 275e12,  # Google Cloud: TPU v4, a chip
    "TPU v5 lite": 197e12,  # Google Cloud: TPU v5e
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,  # Google Cloud: TPU v5p
    "TPU v5": 459e12,
    "TPU v6e": 918e12,  # Google Cloud: TPU v6e (Trillium)
    "TPU v6": 918e12,
}


@dataclass(frozen=True, kw_only=True)
class CompiledCost:
    """What XLA reports of a compiled step, per device: one call, in which the body of a loop counts once.

    Args:
        flops, bytes_accessed: computed, and read and written.
        argument_bytes, output_bytes: of the arrays that the step takes and returns.
        alias_bytes: of outputs that reuse the memory of arguments.
        temp_bytes: of activations, gradients and other intermediate values, as one allocation.
        code_bytes: of the program itself, and its constants.
        compile_seconds: how long tracing and compiling took.
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    compile_seconds: float

    @classmethod
    def of(cls, compiled: Any, seconds: float) -> "CompiledCost":
        """The cost of a compiled function (`jax.stages.Compiled`), which took so many seconds."""
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
        if memory is None:
            raise RuntimeError(f"XLA has no memory analysis for {jax.default_backend()!r} devices. Train to find out.")
        return cls(
            flops=float(cost.get("flops", 0.0)),
            bytes_accessed=float(cost.get("bytes accessed", 0.0)),
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            code_bytes=max(0, memory.generated_code_size_in_bytes),  # -1: unknown
            compile_seconds=seconds,
        )

    @property
    def peak_bytes(self) -> int:
        """What a device must hold while the step runs; the code of a GPU is not in the memory that JAX manages."""
        code = 0 if jax.default_backend() == "gpu" else self.code_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + code


def largest_batch(
    needed: Callable[[int], int], start: int, limit: int, *, fixed: int = 0, multiple: int = 1, largest: int = LARGEST
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
    target, points = (1 - MARGIN) * limit, {0: fixed}
    largest = max(multiple, largest - largest % multiple)
    size = min(largest, max(multiple, start - start % multiple))
    while size not in points and len(points) <= MOST_COMPILATIONS:
        points[size] = needed(size)
        fitting = max((one for one, need in points.items() if need <= target), default=0)
        failing = min((one for one, need in points.items() if one and need > target), default=largest + multiple)
        if (fitting and points[fitting] >= (1 - CLOSE) * target) or failing - fitting <= multiple:
            break
        # the two sizes that are nearest to the target in what they need
        (a, need_a), (b, need_b) = sorted(points.items(), key=lambda one: abs(one[1] - target))[:2]
        slope = (need_b - need_a) / (b - a)
        goal = target / 2 if len(points) == 2 and points[size] < target / 4 else target
        size = int(a + (goal - need_a) / slope if slope > 0 else 2 * fitting or size / 2)
        # coarser for large sizes, which suits the hardware and costs less than a percent
        step = multiple * max(1, 2 ** int(math.log2(max(1.0, size / 128 / multiple))))
        size = min(max(size // step * step, fitting + multiple), failing - multiple)
    tried = {one: need for one, need in points.items() if one}
    return max((one for one, need in tried.items() if need <= target), default=0), tried


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
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def parse_bytes(text: str) -> int:
    """A number of bytes with a unit: 4GiB, 80GB, 512MB.

    >>> parse_bytes("4GiB"), parse_bytes("1.5 kB")
    (4294967296, 1500)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"expected a number of bytes such as 4GiB, 80GB or 512MB, got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def scaled(value: float) -> str:
    """`value` with a decimal prefix, to be followed by a unit."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} E"


class Throughput:
    """Counts the examples and tokens of the steps whose metrics were read.

    Attributes:
        token_leaf: the entry of a batch that has token ids; None: there are none, or all batches have one length.
    """

    def __init__(self) -> None:
        self._examples = self._tokens = 0  # since the last call of `rates`
        self._flops = 0.0  # of a step
        self._lengths: deque[tuple[int, int]] = deque()  # tokens of an example, with the first step that has as many
        self.token_leaf: int | None = None

    def expect(self, trace: StepTrace, batch: Batch, *, one_length: bool) -> None:
        """Steps like the traced one follow, on such batches; `one_length`: all of them have as many tokens."""
        self._flops, leaves = trace.flops, jax.tree.leaves(batch)
        # token ids: rows of integers that index an embedding or are predicted; labels have no second axis
        ids = [use.leaf for use in trace.indices if np.ndim(leaves[use.leaf]) == 2]
        longest = max(ids, key=lambda leaf: np.shape(leaves[leaf])[1], default=None)
        if longest is not None and one_length:
            self._lengths.append((0, np.shape(leaves[longest])[1]))
        elif longest is not None:
            self.token_leaf = longest

    def note_length(self, length: int, first: int) -> None:
        """Notes that examples of the steps from `first` on have `length` tokens: batches may have several lengths."""
        if not self._lengths or length != self._lengths[-1][1]:
            self._lengths.append((first, length))

    def count(self, rows: MetricWindow) -> np.ndarray:
        """Counts these steps; returns the number of tokens in an example of each, 0 without token ids."""
        while len(self._lengths) > 1 and self._lengths[1][0] <= rows.first:
            self._lengths.popleft()
        lengths = np.zeros(rows.last - rows.first + 1, np.int64)
        for start, length in self._lengths:
            lengths[max(0, start - rows.first) :] = length
        self._examples += int(rows.examples.sum())
        self._tokens += int(rows.examples @ lengths)
        return lengths

    def rates(self, steps: int, seconds: float, devices: Sequence[Any]) -> dict[str, float]:
        """Rates of `steps` steps in `seconds`, counted since the last call; memory of the devices."""
        examples, tokens = self._examples, self._tokens
        self._examples = self._tokens = 0
        if not steps or seconds <= 0:
            return {}
        speed = {"steps_per_second": steps / seconds, "examples_per_second": examples / seconds}
        if tokens:
            speed["tokens_per_second"] = tokens / seconds
        if self._flops:
            speed["model_flops_per_second"] = self._flops * steps / seconds
            if (peak := peak_flops(devices[0])) is not None:
                speed["mfu"] = speed["model_flops_per_second"] / (peak * len(devices))
        return speed | memory_of(devices)


def peak_flops(device: Any) -> float | None:
    """The dense bf16 peak of a device, in operations per second; None: unknown."""
    words = device.device_kind.lower().replace("-", " ").split()
    for name, peak in PEAK_FLOPS.items():
        parts = name.lower().split()
        if any(words[start : start + len(parts)] == parts for start in range(len(words))):
            return peak
    return None


def memory_of(devices: Iterable[Any]) -> dict[str, float]:
    """The most bytes that one of these devices of this process uses now, and has used; empty where it does not tell."""
    local = set(jax.local_devices())
    stats = [one for device in devices if device in local and (one := device.memory_stats()) is not None]
    names = {"memory_in_use": "bytes_in_use", "memory_peak": "peak_bytes_in_use"}
    return {name: float(max(one.get(key, 0) for one in stats)) for name, key in names.items()} if stats else {}
