"""What the plan takes from the data, and when."""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import jax

from jax_trainer.core import Batch, CompiledProgram, Layout, LayoutError
from jax_trainer.datasets import (
    Cursor,
    Data,
    DataError,
    DeviceTransforms,
    Feed,
    FirstBatches,
    Supply,
    Taken,
    in_words,
    nearby_multiples,
    with_transforms,
)
from jax_trainer.engine.gathering import Gathered
from jax_trainer.engine.parts import Agreed, EqualParts, Where
from jax_trainer.engine.plan import Plan
from jax_trainer.processes import peers

SLOW_SHARE, SLOW_SECONDS = 0.1, 0.5  # waiting for data is worth a line from here on
Ready = Callable[[Taken], Taken]
Making = Callable[[Ready], Generator[Taken, None, None]]


def train_feed(data: Data, plan: Plan) -> Feed:
    """The training data as a feed; refuses a plan under which it must run dry or never end."""
    options: dict[str, Any] = {"prefetch": data.prefetch, "timeout": data.timeout}
    feed = Feed(data.train, "train", steps_per_epoch=plan.steps_per_epoch, **options)
    if plan.overfit_batches:
        return Feed(FirstBatches(feed, plan.overfit_batches), "train", **options)
    if feed.is_one_shot and plan.steps_per_epoch is None:
        _check_stream(feed, plan, type(data.train).__name__)
    return feed


def seeing(program: CompiledProgram, transforms: DeviceTransforms | None) -> CompiledProgram:
    """`program` on batches that are transformed as their data asks, unless it transforms batches already."""
    if program.transforms is not None or not transforms:
        return program
    return program.changed(transforms, lambda plain: with_transforms(plain, transforms))


def takes(
    open_cursor: Callable[[], Cursor],
    plan: Plan,
    step: int,
    epoch_step: int,
    length: int | None,
    chunk: int,
    ready: Ready,
    left_out: Sequence[int] = (),
) -> Generator[Taken, None, None]:
    """What to dispatch in the rest of an epoch: batches without those `left_out`, cut where the state must be seen."""
    room = 0
    with closing(open_cursor()) as cursor:
        while True:
            room = room or plan.room(step, plan.epoch_steps(step, epoch_step, length))
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


def train_supply(
    program: CompiledProgram, feed: Feed, epoch: int, chunk: int, device_is_idle: Callable[[], bool], making: Making
) -> Supply:
    """The batches of a training epoch, made ahead where that helps; `making` makes them, given what readies them."""
    depth, where = 0 if program.debug else feed.prefetch(chunk), partial(in_words, epoch=epoch, name=feed.name)
    if not feeds_parts(program) or feed.is_shared:
        return feed.supply(making(ready_for(program, where, ahead=depth > 0)), device_is_idle, depth)
    parts: Any = EqualParts(program, where, peers().index)
    return Agreed(feed.supply(making(parts.ready), device_is_idle, depth), feed.name, peers())


def eval_takes(program: CompiledProgram, feed: Feed, limit: int | None, device_is_idle: Callable[[], bool]) -> Supply:
    """The batches of an evaluation, at most `limit` of them, made ahead where that helps."""
    depth, where = 0 if program.debug else feed.prefetch(), partial(in_words, epoch=1, name=feed.name)
    is_gathered = feeds_parts(program) and not _is_evenly_shared(program, feed)
    ready: Ready = _as_it_is if is_gathered else ready_for(program, where, ahead=depth > 0)

    def batches() -> Generator[Taken, None, None]:
        done = 0
        with closing(feed.open(1)) as cursor:
            while done != limit and (taken := cursor.take(1)) is not None:
                done += 1
                yield ready(taken)

    supply = feed.supply(batches(), device_is_idle, depth)
    return Gathered(supply, feed.name, peers(), program, where) if is_gathered else supply


def ready_for(program: CompiledProgram, where: Where, *, ahead: bool) -> Ready:
    """What puts batches where the program wants them."""

    def ready(taken: Taken) -> Taken:
        try:
            placed = program.place(taken.batch, stacked=taken.stacked, whole=taken.whole, ahead=ahead)
        except LayoutError as error:
            raise DataError(f"The {where(taken.number)} cannot be fed: {error}") from error
        return taken._replace(batch=placed)

    return ready if ahead or program.layout is not None else _as_it_is


def feeds_parts(program: CompiledProgram) -> bool:
    """Whether other processes feed the devices, too."""
    if program.layout is None and peers().are_several:
        raise DataError(
            f"There are {peers().count} processes, and the program was compiled for the devices of one. Pass "
            "`layout=Layout(mesh=make_mesh())`, which takes those of all."
        )
    return program.layout is not None and program.layout.feeding is not None


def _is_evenly_shared(program: CompiledProgram, feed: Feed) -> bool:
    """Whether every process can put its part of every full batch on its devices."""
    feeding = None if program.layout is None else program.layout.feeding
    if not feed.is_shared or feeding is None or feeding.axes is None:
        return False
    return feed.batch_size is None or feed.batch_size % feeding.ways == 0


def _as_it_is(taken: Taken) -> Taken:
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


def steps_per_call(plan: Plan, feed: Feed) -> int:
    """How many steps go into one dispatch."""
    if plan.steps_per_call != "epoch":
        return plan.steps_per_call
    steps = shorter(feed.length, plan.steps_per_epoch)
    if steps is None:
        raise DataError(
            "The plan has `steps_per_call=\"epoch\"`, but the 'train' data has no length. "
            "Set `steps_per_epoch`, a number for `steps_per_call`, or pass data with `len()`."
        )
    return steps


def shorter(a: int | None, b: int | None) -> int | None:
    """The smaller of two lengths, either of which may be unknown."""
    return min((n for n in (a, b) if n is not None), default=None)


def _check_stream(feed: Feed, plan: Plan, kind: str) -> None:
    if plan.max_epochs is None or plan.max_steps is not None or (plan.max_epochs <= 1 and not feed.is_endless):
        return
    what = "an endless iterator" if feed.is_endless else "an iterator that can be used only once"
    raise DataError(
        f"The {feed.name!r} data is {what} ({kind}), and the plan asks for "
        f"{plan.max_epochs} epochs: epoch {1 if feed.is_endless else 2} would "
        f"{'never end' if feed.is_endless else 'find it used up'}. Set `steps_per_epoch` or `max_steps`, or pass a "
        "list, a loader, or a function that returns a fresh iterator."
    )
