"""What the plan takes from the data, and when."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax

from jax_trainer.core import Batch, CompiledProgram, Layout, LayoutError
from jax_trainer.datasets import (
    BatchIterator,
    Data,
    DataError,
    DataSource,
    DeviceTransforms,
    EpochIterator,
    FirstBatches,
    StepBatch,
    in_words,
    nearby_multiples,
    with_transforms,
)
from jax_trainer.engine.gathered_batches import GatheredBatches
from jax_trainer.engine.lockstep import LocalShards, LockstepBatches, Where
from jax_trainer.engine.plan import Plan
from jax_trainer.processes import process_group

SLOW_SHARE, SLOW_SECONDS = 0.1, 0.5  # waiting for data is worth a line from here on
Ready = Callable[[StepBatch], StepBatch]
Making = Callable[[Ready], Generator[StepBatch, None, None]]


def train_source(data: Data, plan: Plan) -> DataSource:
    """The training data as a feed; refuses a plan under which it must run dry or never end."""
    options: dict[str, Any] = {"prefetch": data.prefetch, "timeout": data.timeout}
    data_source = DataSource(data.train, "train", steps_per_epoch=plan.steps_per_epoch, **options)
    if plan.overfit_batches:
        return DataSource(FirstBatches(data_source, plan.overfit_batches), "train", **options)
    if data_source.is_one_shot and plan.steps_per_epoch is None:
        _check_stream(data_source, plan, type(data.train).__name__)
    return data_source


def with_data_transforms(program: CompiledProgram, transforms: DeviceTransforms | None) -> CompiledProgram:
    """`program` on batches that are transformed as their data asks, unless it transforms batches already."""
    if program.transforms is not None or not transforms:
        return program
    return program.transformed(transforms, lambda plain: with_transforms(plain, transforms))


def step_batches(
    open_cursor: Callable[[], EpochIterator],
    plan: Plan,
    step: int,
    epoch_step: int,
    length: int | None,
    chunk: int,
    ready: Ready,
    left_out: Sequence[int] = (),
) -> Generator[StepBatch, None, None]:
    """What to dispatch in the rest of an epoch: batches without those `left_out`, cut where the state must be seen."""
    room = 0
    with closing(open_cursor()) as cursor:
        while True:
            room = room or plan.steps_until_cut(step, plan.epoch_steps(step, epoch_step, length))
            before_next = min((number - epoch_step for number in left_out if number >= epoch_step), default=room)
            if room and not before_next:
                cursor.skip()
                epoch_step, room = epoch_step + 1, 0
                continue
            taken = cursor.take(min(room, before_next), chunk) if room else None
            if taken is None:
                return
            step, epoch_step, room = step + taken.steps, epoch_step + taken.steps, room - taken.steps
            yield ready(taken)


def train_batches(
    program: CompiledProgram,
    data_source: DataSource,
    epoch: int,
    chunk: int,
    device_is_idle: Callable[[], bool],
    making: Making,
) -> BatchIterator:
    """The batches of a training epoch, made ahead where that helps; `making` makes them, given what readies them."""
    depth, where = (
        0 if program.debug else data_source.prefetch(chunk),
        partial(in_words, epoch=epoch, name=data_source.name),
    )
    if not feeds_local_shards(program) or data_source.is_shared:
        return data_source.iterate(making(placed_for(program, where, ahead=depth > 0)), device_is_idle, depth)
    parts: Any = LocalShards(program, where, process_group().index)
    return LockstepBatches(
        data_source.iterate(making(parts.ready), device_is_idle, depth), data_source.name, process_group()
    )


def eval_batch_iterator(
    program: CompiledProgram, data_source: DataSource, limit: int | None, device_is_idle: Callable[[], bool]
) -> BatchIterator:
    """The batches of an evaluation, at most `limit` of them, made ahead where that helps."""
    depth, where = 0 if program.debug else data_source.prefetch(), partial(in_words, epoch=1, name=data_source.name)
    is_gathered = feeds_local_shards(program) and not _is_evenly_shared(program, data_source)
    ready: Ready = _as_it_is if is_gathered else placed_for(program, where, ahead=depth > 0)

    def batches() -> Generator[StepBatch, None, None]:
        done = 0
        with closing(data_source.open(1)) as cursor:
            while done != limit and (taken := cursor.take(1)) is not None:
                done += 1
                yield ready(taken)

    batch_iterator = data_source.iterate(batches(), device_is_idle, depth)
    return (
        GatheredBatches(batch_iterator, data_source.name, process_group(), program, where)
        if is_gathered
        else batch_iterator
    )


def placed_for(program: CompiledProgram, where: Where, *, ahead: bool) -> Ready:
    """What puts batches where the program wants them."""

    def ready(taken: StepBatch) -> StepBatch:
        try:
            placed = program.place(taken.batch, stacked=taken.stacked, whole=taken.replicated, ahead=ahead)
        except LayoutError as error:
            raise DataError(f"The {where(taken.number)} cannot be fed: {error}") from error
        return taken._replace(batch=placed)

    return ready if ahead or program.layout is not None else _as_it_is


def feeds_local_shards(program: CompiledProgram) -> bool:
    """Whether other processes feed the devices, too."""
    if program.layout is None and process_group().is_multi_process:
        raise DataError(
            f"There are {process_group().count} processes, and the program was compiled for the devices of one. Pass "
            "`layout=Layout(mesh=make_mesh())`, which takes those of all."
        )
    return program.layout is not None and program.layout.batch_placement is not None


def _is_evenly_shared(program: CompiledProgram, data_source: DataSource) -> bool:
    """Whether every process can put its part of every full batch on its devices."""
    feeding = None if program.layout is None else program.layout.batch_placement
    if not data_source.is_shared or feeding is None or feeding.axes is None:
        return False
    return data_source.batch_size is None or data_source.batch_size % feeding.ways == 0


def _as_it_is(taken: StepBatch) -> StepBatch:
    return taken


def check_divides(layout: Layout | None, batch: Batch, where: Any) -> None:
    """Refuses training batches (of all processes) that the devices cannot share evenly: each would do all the work."""
    ways = 1 if layout is None else layout.batch_ways
    size = max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "shape", ())), default=0)
    if size % ways:
        raise DataError(
            f"The {where} has {size} examples, which {ways} devices cannot share evenly. "
            f"Use a batch size of {nearby_multiples(size, ways)}."
        )


def slow_data(epoch: int, seconds: float, waited: float) -> str:
    """One line if data was what an epoch waited for, else nothing."""
    if waited < SLOW_SHARE * seconds or waited < SLOW_SECONDS:
        return ""
    return (
        f"Data is the bottleneck: in epoch {epoch} the device waited for batches {waited / seconds:.0%} of the time "
        f"({waited:.1f} of {seconds:.1f} s). Use more workers, cheaper transforms, or `resident=True` if the data fits."
    )


def early_end(name: str, epoch: int, steps: int, whole: int | None) -> str:
    """One line if the data ended before a whole epoch was over, else nothing."""
    if whole is None or steps >= whole:
        return ""
    return f"The {name!r} data ended after {steps} of {whole} steps of epoch {epoch}; the epoch ends there."


def steps_per_call(plan: Plan, data_source: DataSource) -> int:
    """How many steps go into one dispatch."""
    if plan.steps_per_call != "epoch":
        return plan.steps_per_call
    steps = shorter(data_source.length, plan.steps_per_epoch)
    if steps is None:
        raise DataError(
            "The plan has `steps_per_call=\"epoch\"`, but the 'train' data has no length. "
            "Set `steps_per_epoch`, a number for `steps_per_call`, or pass data with `len()`."
        )
    return steps


def shorter(a: int | None, b: int | None) -> int | None:
    """The smaller of two lengths, either of which may be unknown."""
    return min((n for n in (a, b) if n is not None), default=None)


def _check_stream(data_source: DataSource, plan: Plan, kind: str) -> None:
    if plan.max_epochs is None or plan.max_steps is not None or (plan.max_epochs <= 1 and not data_source.is_endless):
        return
    what = "an endless iterator" if data_source.is_endless else "an iterator that can be used only once"
    raise DataError(
        f"The {data_source.name!r} data is {what} ({kind}), and the plan asks for "
        f"{plan.max_epochs} epochs: epoch {1 if data_source.is_endless else 2} would "
        f"{'never end' if data_source.is_endless else 'find it used up'}. Set `steps_per_epoch` or `max_steps`, or "
        "pass a list, a loader, or a function that returns a fresh iterator."
    )
