"""What the devices are: their peak in floating-point operations, and the memory that they use."""

from collections.abc import Iterable
from typing import Any

import jax

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
