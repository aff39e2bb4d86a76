"""What is known of a training step before it runs: memory, FLOPs and time, from XLA's analysis of the compiled step."""

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from jax_trainer.core.memory import readable_bytes

MARGIN = 0.03  # of the memory, which the largest batch leaves free: allocations are rounded, and leave gaps
# On the CPU: how many times as long as at the measured rates products may take, as small ones and convolutions do
CPU_SLACK = 3.0
_NO_WORK = re.compile(r"= (\w+\[\]|\S+ (constant|get-tuple-element|tuple|bitcast)\()")  # scalars, and names of arrays
_UNITS = {"": 1, "B": 1} | {
    f"{unit}{i}B": (1024 if i else 1000) ** n for n, unit in enumerate("kMGT", 1) for i in ("", "i")
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
        kernels: functions that the CPU calls one after the other, and arrays that it passes; 0 on other devices, which
            start them ahead.
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    compile_seconds: float
    kernels: int = 0

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
            kernels=_kernels_in(compiled.as_text()) if jax.default_backend() == "cpu" else 0,
        )

    @property
    def peak_bytes(self) -> int:
        """What a device must hold while the step runs; the code of a GPU is not in the memory that JAX manages."""
        code = 0 if jax.default_backend() == "gpu" else self.code_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + code


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The estimated duration of a step in seconds, without communication between devices.

    Args:
        compute: of its products of matrices, at the measured rate of their dtype.
        traffic: of reading and writing memory, at the measured rate.
        dispatch: of starting it, as measured for a function that computes nothing.
        kernels: of starting its kernels, on the CPU; 0 on other devices.
    """

    compute: float
    traffic: float
    dispatch: float = 0.0
    kernels: float = 0.0

    @property
    def low(self) -> float:
        """If computation and memory traffic overlap completely (the roofline), on the CPU in its caches."""
        return max(self.compute, self.dispatch, 0.0 if self.kernels else self.traffic)

    @property
    def high(self) -> float:
        """If they do not overlap; on the CPU with products `CPU_SLACK` times as slow, and every kernel on its own."""
        slack = CPU_SLACK if self.kernels else 1.0
        return max(slack * (self.compute + self.traffic) + self.kernels, self.dispatch)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A change of the training, with the memory and the time that it would need.

    Args:
        name: the change, as it is written in a file or a call.
        needed_bytes, seconds: with the change; None if it cannot be compiled.
        fits: whether it fits.
        problem: why it cannot be compiled.
    """

    name: str
    needed_bytes: int | None = None
    seconds: StepTime | None = None
    fits: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    """The largest batch that fits.

    Args:
        size: examples per batch, over all devices.
        needed_bytes: of memory per device.
        compiled: what every batch size that was compiled needs.
        seconds: the measured duration of a step; None: none was run.
        limited_by_data: whether it is all of the training data.
    """

    size: int
    needed_bytes: int
    compiled: Mapping[int, int]
    seconds: float | None = None
    limited_by_data: bool = False


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a training needs, before its first step: memory per device, FLOPs, and estimated time.

    Args:
        devices: number and kind.
        batch_size: examples per batch, over all devices.
        steps_per_call: optimizer steps that are compiled together.
        cost: what XLA reports of the compiled step.
        beside: what else is in the memory of a device, in bytes by name.
        limit: the memory of a device in bytes.
        step_flops: of one optimizer step on all devices, with every iteration of a loop.
        seconds: the estimated duration of a step.
        steps: of the complete run; None: unknown.
        rates: measured FLOP/s by dtype, and bytes per second as "memory".
        variants: changes of the training, and what they would need.
        found: the largest batch that fits, if it was looked for.
    """

    devices: str
    batch_size: int
    steps_per_call: int
    cost: CompiledCost
    beside: Mapping[str, int]
    limit: int
    step_flops: float
    seconds: StepTime
    steps: int | None
    rates: Mapping[str, float]
    variants: tuple[Variant, ...] = ()
    found: FoundBatch | None = None

    @property
    def needed_bytes(self) -> int:
        """What a device must hold in training."""
        return self.cost.peak_bytes + sum(self.beside.values())

    @property
    def fits(self) -> bool:
        """Whether the device has the memory that is needed."""
        return self.needed_bytes <= self.limit

    @property
    def suggestions(self) -> tuple[Variant, ...]:
        """The variants that need less memory, the fastest that fits first."""
        less = [one for one in self.variants if one.needed_bytes is not None and one.needed_bytes < self.needed_bytes]
        return tuple(sorted(less, key=lambda one: (not one.fits, one.seconds.high if one.seconds else math.inf)))

    @property
    def problem(self) -> str:
        """What to do if it does not fit; empty if it does."""
        if self.fits:
            return ""
        helps = [one.name for one in self.suggestions if one.fits]
        if self.found is not None and self.found.size:
            helps.append(f"a batch of {self.found.size}")
        cure = f"What fits: {'; '.join(helps)}." if helps else "Use a smaller batch or model, or more devices."
        need, limit = readable_bytes(self.needed_bytes), readable_bytes(self.limit)
        return f"The training does not fit: a device needs {need} and has {limit}. {cure}"

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        derived = {"needed_bytes": self.needed_bytes, "fits": self.fits, "problem": self.problem}
        cost = {**asdict(self.cost), "peak_bytes": self.cost.peak_bytes}
        times = {"low": self.seconds.low, "high": self.seconds.high, **asdict(self.seconds)}
        suggested = [one.name for one in self.suggestions]
        return {**asdict(self), "cost": cost, "seconds": times, **derived, "suggestions": suggested}

    def lines(self) -> dict[str, str]:
        """The report as lines by their subject."""
        cost, size = self.cost, readable_bytes
        calls = f", {self.steps_per_call} steps per call" if self.steps_per_call > 1 else ""
        parts = f"arguments {size(cost.argument_bytes)}, outputs {size(cost.output_bytes)} "
        parts += f"({size(cost.alias_bytes)} in place of arguments), temporary {size(cost.temp_bytes)}, "
        verdict = "fits" if self.fits else "does not fit"
        rates = [f"{scaled(rate)}FLOP/s in {name}" for name, rate in self.rates.items() if name != "memory"]
        run = "" if self.steps is None else f", {_range(self.seconds, self.steps)} for {self.steps:,} steps"
        lines = {
            "compiled for": f"{self.devices}, in {cost.compile_seconds:.1f} s",
            "step": f"{self.batch_size} examples{calls}, {scaled(self.step_flops)}FLOP",
            "memory": f"{size(self.needed_bytes)} of {size(self.limit)} per device: {verdict}",
            "of the step": f"{parts}code {size(cost.code_bytes)}",
            "beside it": ", ".join(f"{name} {size(count)}" for name, count in self.beside.items() if count)
            or "nothing",
            "traffic": f"{size(cost.bytes_accessed)} read and written",
            "time": f"{_range(self.seconds)} per step{run} (estimate)",
            "rates": ", ".join([*rates, f"{size(self.rates['memory'])}/s of memory"]) + " (measured)",
        }
        return lines if self.found is None else {**lines, "largest batch": self._found(self.found)}

    def text(self) -> str:
        """The report as text."""
        rows = [f"{name:>14}: {text}" for name, text in self.lines().items()]
        rows += [f"{'change':>14}: {': '.join(row)}" for row in self.variant_rows()]
        return "\n".join(rows)

    def variant_rows(self) -> list[tuple[str, str]]:
        """The name of each variant, and what it needs."""
        return [(one.name, _variant(one)) for one in self.variants]

    def _found(self, found: FoundBatch) -> str:
        if not found.size:
            return f"none: {min(found.compiled)} examples need {readable_bytes(found.needed_bytes)}"
        why = ", all of the data" if found.limited_by_data else f" ({MARGIN:.0%} are left free)"
        ran = "not run" if found.seconds is None else f"confirmed: a step takes {_seconds(found.seconds)}"
        need = f"{readable_bytes(found.needed_bytes)} of {readable_bytes(self.limit)}"
        return f"{found.size} examples, {need}{why}; {len(found.compiled)} compilations, {ran}"


def _kernels_in(hlo: str) -> int:
    """The number of kernels and arguments in the text of a compiled module: the instructions outside of fusions."""
    kernels, is_fused = 0, False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            is_fused = "fused_computation" in line
        kernels += " = " in line and not is_fused and _NO_WORK.search(line) is None
    return kernels


def compile_cost(lower: Callable[[], Any]) -> tuple[CompiledCost, Any]:
    """The cost of what `lower` returns, compiled, and the executable."""
    started = time.perf_counter()
    compiled = lower().compile()
    return CompiledCost.of(compiled, time.perf_counter() - started), compiled


# text


def parse_bytes(text: str) -> int:
    """A number of bytes with a unit: 4GiB, 80GB, 512MB.

    >>> parse_bytes("4GiB"), parse_bytes("1.5 kB")
    (4294967296, 1500)
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"expected a number of bytes such as 4GiB, 80GB or 512MB, got {text!r}.")
    return int(float(match[1]) * units[match[2].lower()])


def _variant(one: Variant) -> str:
    if one.needed_bytes is None or one.seconds is None:
        return one.problem
    fits = "fits" if one.fits else "does not fit"
    return f"{readable_bytes(one.needed_bytes)}, {_range(one.seconds)} per step, {fits}"


def _range(times: StepTime, steps: int = 1) -> str:
    return f"{_seconds(times.low * steps)} to {_seconds(times.high * steps)}"


def _seconds(value: float) -> str:
    for unit, size in (("days", 86400 * 2), ("h", 3600), ("min", 60), ("s", 1)):
        if value >= 2 * size and unit != "s":
            return f"{value / (86400 if unit == 'days' else size):.3g} {unit}"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def scaled(value: float) -> str:
    """`value` with a decimal prefix, to be followed by a unit."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} E"
