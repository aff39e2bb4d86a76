"""Rates of a training: steps, examples, tokens and FLOPs per second; peaks and memory of the devices."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch, MetricWindow, StepTrace

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
