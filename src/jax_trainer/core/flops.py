"""What a step computes, in floating-point operations, against what its devices can compute."""

import math
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


def matrix_flops(jaxpr: Any) -> float:
    """The operations of all matrix products and convolutions in a traced function: 2 per multiplication and addition.

    The body of a scan counts as often as it runs, and that of a `while` loop of unknown length once. XLA's own cost
    analysis counts the body of every loop once: with micro-batches, or layers in a scan, a fraction of the step.

    >>> matrix_flops(jax.make_jaxpr(lambda x: x @ x)(jax.numpy.ones((4, 4))))
    128.0
    """
    return math.fsum(_flops(equation) for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def _flops(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * _size(equation.outvars[0]) * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        outputs = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0]) * math.prod(kernel) / outputs
    inner = [matrix_flops(part) for part in _parts(params.values())]
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _parts(values: Iterable[Any]) -> list[Any]:
    parts = [part for value in values for part in (value if isinstance(value, tuple | list) else (value,))]
    return [part for part in parts if hasattr(getattr(part, "jaxpr", part), "eqns")]


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)


def memory_of(devices: Iterable[Any]) -> dict[str, float]:
    """The most bytes that one of these devices of this process uses now, and has used; empty where it does not tell."""
    local = set(jax.local_devices())
    stats = [one for device in devices if device in local and (one := device.memory_stats()) is not None]
    names = {"memory_in_use": "bytes_in_use", "memory_peak": "peak_bytes_in_use"}
    return {name: float(max(one.get(key, 0) for one in stats)) for name, key in names.items()} if stats else {}
