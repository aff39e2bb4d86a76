"""Before the first step: `preflight` says what memory and time a run needs, `precompile` compiles what it will call."""

import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, CompiledProgram, MetricBuffer, PyTree, ResidentBatch, TrainState
from jax_trainer.core.compile import THREADS
from jax_trainer.core.memory import explain_oom, readable_bytes
from jax_trainer.datasets import ArrayLoader, Data, DataSource
from jax_trainer.datasets.arrays import Ordered, tree_bytes
from jax_trainer.diagnostics.traced import total
from jax_trainer.engine.batches import (
    batch_size_of,
    check_divides,
    padding_for,
    placing,
    train_source,
    with_data_transforms,
)
from jax_trainer.engine.costs import LARGEST, MARGIN, CompiledCost, device_memory, largest_batch, parse_bytes, scaled
from jax_trainer.engine.dispatcher import MAX_UNCHECKED_STEPS, StepDispatcher, devices_of
from jax_trainer.engine.evaluation import EVAL_WINDOW
from jax_trainer.engine.plan import Plan
from jax_trainer.sharding import resized

QUEUED = 32  # dispatches that XLA queues on an accelerator before it lets the host wait
OF_THE_CPU = 0.5  # of the memory of the machine that a step which is run may use
CPU_FLOPS = 2e11  # a step of more takes too long on a CPU to be measured


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    """The largest batch that fits.

    Args:
        size: examples per batch, over all devices.
        needed_bytes: of memory per device.
        compiled: what every batch size that was compiled needs.
        seconds: the measured duration of a step; None: none was run.
    """

    size: int
    needed_bytes: int
    compiled: Mapping[int, int]
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a training needs, before its first step: memory per device, FLOPs, and the time of a step.

    Args:
        devices: number and kind.
        batch_size: examples per batch, over all devices.
        steps_per_call: optimizer steps that are compiled together.
        cost: what XLA reports of the compiled step.
        beside: what else is in the memory of a device, in bytes by name.
        limit: the memory of a device in bytes.
        step_flops: of one optimizer step on all devices, with every iteration of a loop.
        seconds: the measured duration of a step on zeros; None: none was run, as it does not fit, takes too long on
            this CPU, or is for devices that are not there.
        steps: of the complete run; None: unknown.
        found: the largest batch that fits, if it was looked for.
    """

    devices: str
    batch_size: int
    steps_per_call: int
    cost: CompiledCost
    beside: Mapping[str, int]
    limit: int
    step_flops: float
    steps: int | None
    seconds: float | None = None
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
    def problem(self) -> str:
        """What to do if it does not fit; empty if it does."""
        if self.fits:
            return ""
        cure = "Use a smaller batch or model, `accumulate`, `precision=bf16`, `remat`, or more devices (`mesh.fsdp`)."
        if self.found is not None and self.found.size:
            cure = f"A batch of {self.found.size} fits. {cure}"
        need, limit = readable_bytes(self.needed_bytes), readable_bytes(self.limit)
        return f"The training does not fit: a device needs {need} and has {limit}. {cure}"

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        derived = {"needed_bytes": self.needed_bytes, "fits": self.fits, "problem": self.problem}
        cost = {**asdict(self.cost), "peak_bytes": self.cost.peak_bytes}
        return {**asdict(self), "cost": cost, **derived}

    def lines(self) -> dict[str, str]:
        """The report as lines by their subject."""
        cost, size = self.cost, readable_bytes
        calls = f", {self.steps_per_call} steps per call" if self.steps_per_call > 1 else ""
        parts = f"arguments {size(cost.argument_bytes)}, outputs {size(cost.output_bytes)} "
        parts += f"({size(cost.alias_bytes)} in place of arguments), temporary {size(cost.temp_bytes)}, "
        verdict = "fits" if self.fits else "does not fit"
        time = "not measured"
        if self.seconds is not None:
            run = "" if self.steps is None else f", {_seconds(self.seconds * self.steps)} for {self.steps:,} steps"
            time = f"{_seconds(self.seconds)} per step{run} (measured, on zeros)"
        lines = {
            "compiled for": f"{self.devices}, in {cost.compile_seconds:.1f} s",
            "step": f"{self.batch_size} examples{calls}, {scaled(self.step_flops)}FLOP",
            "memory": f"{size(self.needed_bytes)} of {size(self.limit)} per device: {verdict}",
            "of the step": f"{parts}code {size(cost.code_bytes)}",
            "beside it": ", ".join(f"{name} {size(count)}" for name, count in self.beside.items() if count)
            or "nothing",
            "traffic": f"{size(cost.bytes_accessed)} read and written",
            "time": time,
        }
        return lines if self.found is None else {**lines, "largest batch": self._found(self.found)}

    def text(self) -> str:
        """The report as text."""
        return "\n".join(f"{name:>14}: {text}" for name, text in self.lines().items())

    def _found(self, found: FoundBatch) -> str:
        if not found.size:
            return f"none: {min(found.compiled)} examples need {readable_bytes(found.needed_bytes)}"
        ran = "not run" if found.seconds is None else f"confirmed: a step takes {_seconds(found.seconds)}"
        need = f"{readable_bytes(found.needed_bytes)} of {readable_bytes(self.limit)}"
        return f"{found.size} examples, {need} ({MARGIN:.0%} are left free); {len(found.compiled)} compilations, {ran}"


def _seconds(value: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if value >= 2 * size or (unit == "s" and value >= 1):
            return f"{value / size:.3g} {unit}"
    return f"{1000 * value:.3g} ms"


def preflight(
    program: CompiledProgram,
    data: Data,
    plan: Plan,
    example: Batch,
    key: jax.Array,
    *,
    memory: int | str | None = None,
    find_batch: bool = False,
) -> Preflight:
    """What a training needs: its step compiled as the run would, XLA's analysis of it, and its time on zeros.

    Args:
        program: the program, of any style.
        data: the training data: kept on the device or not, prefetched or not.
        plan: how many steps the run has, and how many are compiled together.
        example: a batch, of which only shapes and dtypes matter.
        key: the root key.
        memory: of a device, in bytes or as text ("80GB"); None: those that JAX may use (the CPU: those of the machine).
        find_batch: also look for the largest batch that fits.
    """
    if program.debug:
        raise ValueError(
            "`debug` is True: steps run without compilation, and XLA cannot analyse them. Set it to False."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"A preflight runs in one process, and there are {jax.process_count()}. Run it in one, for described "
            "devices: `jax-trainer check FILE --compile --devices N`."
        )
    memory = parse_bytes(memory) if isinstance(memory, str) else memory
    step = _Step(program, data, plan, example, key)
    report = step.report(memory)
    return replace(report, found=step.largest(report)) if find_batch else report


class _Step:
    """The training step of a run, for batches of any size: its arguments, as the dispatcher passes them, as shapes."""

    def __init__(self, program: CompiledProgram, data: Data, plan: Plan, example: Batch, key: jax.Array) -> None:
        self.program, self._data, self._plan, self._key = program, data, plan.resolved(), key
        self._example, self.size = jax.eval_shape(lambda batch: batch, example), max(1, batch_size_of(example))
        if isinstance(data.train, Ordered) and data.train.schedule.sizes is not None:  # the largest batch counts
            largest = max(data.train.schedule.sizes.values())
            self._example, self.size = _of_size(self._example, self.size, largest), largest
        check_divides(program.layout, self._example, "example batch")
        self.devices = devices_of(program)
        self._source = train_source(data, self._plan)
        dispatcher = StepDispatcher(program, self._plan, self._source, data)
        self._loader, self._rows = dispatcher.loader, dispatcher.buffer_rows
        trace = program.trace_train_step(program.state_shape(key, self._example), self._example)
        # a chunk that is dispatched step by step is one step
        self._chunk = 1 if trace.runs_one_by_one else dispatcher.chunk

    def report(self, memory: int | None) -> Preflight:
        """Compiles the step, reports what it needs, and runs it on zeros if it fits."""
        cost, executable = self.compiled(self.size)
        flops = self.program.train_flops(self.program.state_shape(self._key, self._example), self._example)
        kinds = [device.device_kind for device in self.devices]
        report = Preflight(
            devices=", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)),
            batch_size=self.size,
            steps_per_call=self._chunk,
            cost=cost,
            beside=self.beside(self.size),
            limit=device_memory(self.devices) if memory is None else memory,
            step_flops=total(flops),
            steps=self._plan.ends_at(self._source.lengths)[1],
        )
        is_long = jax.default_backend() == "cpu" and self._chunk * report.step_flops > CPU_FLOPS
        if is_long or not report.fits or not self._can_run(report.needed_bytes):
            return report
        return replace(report, seconds=self._measured(self.size, executable))

    def largest(self, report: Preflight) -> FoundBatch:
        """The largest batch that fits, with a step on it if this machine can run it."""
        compiled = {self.size: (report.cost, None)}

        def needed(size: int) -> int:
            if size not in compiled:
                compiled[size] = self.compiled(size)
            return compiled[size][0].peak_bytes + sum(self.beside(size).values())

        ways = 1 if self.program.layout is None else self.program.layout.batch_ways
        train = self._data.train
        examples = train.schedule.examples if isinstance(train, Ordered) else (self._source.length or 0) * self.size
        examples = examples or LARGEST
        fixed = _shard_bytes(self.program.state_shape(self._key, self._example))
        fixed += 0 if self._loader is None else tree_bytes(self._loader.arrays)
        size, tried = largest_batch(needed, self.size, report.limit, fixed=fixed, multiple=ways, largest=examples)
        seconds = self._measured(size, compiled[size][1]) if size and self._can_run(tried[size]) else None
        return FoundBatch(
            size=size,
            needed_bytes=tried[size] if size else min(tried.values()),
            compiled=dict(sorted(tried.items())),
            seconds=seconds,
        )

    def compiled(self, size: int) -> tuple[CompiledCost, Any]:
        """The step for batches of `size`, compiled: its cost, and the executable."""
        started = time.perf_counter()
        steps = self._chunk if self._chunk > 1 else None
        executable = self.program.lowered_train(*self._arguments(size), steps).compile()
        return CompiledCost.of(executable, time.perf_counter() - started), executable

    def beside(self, size: int) -> dict[str, int]:
        """Bytes on each device besides the arguments of a step, its outputs and temporary values."""
        is_cpu, is_sharded = jax.default_backend() == "cpu", self.program.layout is not None
        if self._loader is not None or (is_cpu and not is_sharded):  # the CPU uses numpy arrays as they are
            return {}
        one = _shard_bytes(self._arguments(size)[2])
        ahead = self._source.prefetch(self._chunk, is_sharded=is_sharded)
        queued = 0 if is_cpu else self._plan.max_in_flight if len(self.devices) > 1 else QUEUED
        if self.program.info.keeps_batches:  # until their metrics are read, one window later
            queued = max(queued, 2 * MAX_UNCHECKED_STEPS)
        # one of them is an argument of the step that runs
        return {"prefetched batches": ahead * one, "batches of queued steps": max(0, queued - 1) * one}

    def _arguments(self, size: int) -> tuple[TrainState, MetricBuffer, Batch]:
        """The shapes of the state, the metric buffer and the batch, with their shardings."""
        layout, batch = self.program.layout, _of_size(self._example, self.size, size)
        state = self.program.state_shape(self._key, batch)
        replicated = None if layout is None else layout.replicated
        fmt = self.program.trace_train_step(state, batch).format
        buffer = MetricBuffer(jax.ShapeDtypeStruct((self._rows, fmt.width), np.uint32, sharding=replicated), fmt)
        if self._loader is not None:
            batch = jax.ShapeDtypeStruct((size,), np.int32)

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = leaf.shape if self._chunk == 1 else (self._chunk, *leaf.shape)
            sharding = None if layout is None else layout.batch_sharding(shape, stacked=self._chunk > 1)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

        batch = jax.tree.map(placed, batch)
        if self._loader is not None:
            whole = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated)
            batch = ResidentBatch(batch, jax.tree.map(whole, self._loader.arrays))
        return state, buffer, batch

    def _can_run(self, needed: int) -> bool:
        if any(device not in jax.local_devices() for device in self.devices):
            return False  # only described
        share = OF_THE_CPU if jax.default_backend() == "cpu" else 1.0
        return needed <= share * device_memory(self.devices)

    def _measured(self, size: int, executable: Any) -> float:
        """Seconds of a step on a batch of this size, of zeros: the second one, as the first loads the code."""
        state, buffer, batch = self._arguments(size)
        executable = self.compiled(size)[1] if executable is None else executable
        number = np.int32(self._chunk) if jax.default_backend() == "cpu" and self._chunk > 1 else None
        zeros = lambda tree: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), tree)
        leaves, rows, batch = zeros(jax.tree.leaves(state)), zeros(buffer.rows), zeros(batch)
        try:
            leaves, rows, _ = jax.block_until_ready(executable(leaves, rows, batch, number))
            started = time.perf_counter()
            jax.block_until_ready(executable(leaves, rows, batch, number))
        except jax.errors.JaxRuntimeError as error:
            raise explain_oom(error, "train_step", state, batch)  # noqa: B904 - the same error, or one from it
        return (time.perf_counter() - started) / self._chunk


def _of_size(example: Batch, before: int, size: int) -> Batch:
    """The shapes of a batch with `size` instead of `before` examples."""

    def scaled(leaf: Any) -> jax.ShapeDtypeStruct:
        is_row = bool(leaf.shape) and leaf.shape[0] == before
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]) if is_row else leaf.shape, leaf.dtype)

    return resized(jax.tree.map(scaled, example), size)


def _shard_bytes(tree: PyTree) -> int:
    leaves = jax.tree.leaves(tree)
    shapes = [leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in zip(leaves, shapes, strict=True))


@contextmanager
def precompile(program: CompiledProgram, data: Data, plan: Plan) -> Iterator[None]:
    """Has `init`, the first training step and the first evaluation compiled in threads; create the state inside.

    All of it is traced here, from the shapes that `program.shapes` has found. The first call of each then waits for its
    thread, instead of compiling after the others. What cannot be known without reading data is left to the first call,
    and so is every error, which shows there with the batch and the user's line.
    """
    pool = ThreadPoolExecutor(THREADS, "compile-ahead")
    try:
        with suppress(Exception):
            _submit(pool, program, data, plan.resolved())
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown(wait=False)  # the first calls wait for what they need, and the end of the process for the rest


def _submit(pool: Executor, program: CompiledProgram, data: Data, plan: Plan) -> None:
    if (state := program.init_shapes()) is None:
        return
    trained = with_data_transforms(program, data)
    # first, because it takes longest
    StepDispatcher(trained, plan, train_source(data, plan), data).compile_ahead(pool, state, program.example)
    program.init_ahead(pool)
    for name, source in data.evals.items() if plan.evaluates or plan.eval_at_start or plan.eval_at_end else ():
        if not isinstance(source, ArrayLoader | list | tuple):
            continue
        data_source = DataSource(source, name, may_be_empty=True)
        evaluated = with_data_transforms(trained.evaluating(name), data_source)
        with closing(data_source.open(1)) as epoch_iterator:
            step_batch = epoch_iterator.take(1)  # reading a batch once more costs nothing
        if step_batch is not None:
            step_batch = padding_for(evaluated, data_source)(step_batch)
            batch = placing(evaluated, data_source)[1](step_batch).batch
            evaluated.compile_eval_ahead(pool, state, evaluated.eval_buffer(state, batch, EVAL_WINDOW), batch)
