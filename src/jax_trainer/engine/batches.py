"""Batches for the loops: which of them a plan uses, how they are stacked, padded and placed; their errors."""

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, BatchChangedError, CompiledProgram, StepTrace, declared_size
from jax_trainer.datasets import (
    BatchIterator,
    Data,
    DataError,
    DataSource,
    StepBatch,
    common_transforms,
    describe_batch,
    transforms_of,
    with_transforms,
)
from jax_trainer.datasets.arrays import nearby_multiples
from jax_trainer.datasets.data_source import FirstBatches, state_kept
from jax_trainer.datasets.foreign import check_batch
from jax_trainer.datasets.prefetch import EpochIterator
from jax_trainer.diagnostics.user_frame import with_user_frame
from jax_trainer.engine.events import EpochEnd
from jax_trainer.engine.plan import Plan, shortest
from jax_trainer.engine.processes import PlaceFn, peers, unchanged
from jax_trainer.sharding import Layout, LayoutError, resized

REUSABLE = "a list, a loader, or a function that returns a fresh iterator"
SLOW_SHARE, SLOW_SECONDS = 0.1, 0.5  # waiting for data is reported from here on
StepBatches = Generator[StepBatch, None, None]


def train_source(data: Data, plan: Plan) -> DataSource:
    """The training data as a `DataSource`; raises if it would be exhausted too early or an epoch would never end."""
    options: dict[str, Any] = {"prefetch": data.prefetch, "timeout": data.timeout}
    data_source = DataSource(data.train, "train", steps_per_epoch=plan.steps_per_epoch, **options)
    if plan.overfit_batches:
        return DataSource(FirstBatches(data_source, plan.overfit_batches), "train", **options)
    epochs = plan.max_epochs if plan.max_steps is None and plan.steps_per_epoch is None else None
    if epochs is not None and data_source.is_one_shot and (epochs > 1 or data_source.is_endless):
        kind, last = "can be used only once", "epoch 2 would have no batches left"
        if data_source.is_endless:
            kind, last = "is endless", "epoch 1 would never end"
        raise DataError(
            f"The 'train' data is an iterator ({type(data.train).__name__}) that {kind}, and the plan has "
            f"{epochs} epochs: {last}. Set `steps_per_epoch` or `max_steps`, or pass {REUSABLE}."
        )
    return data_source


def with_data_transforms(program: CompiledProgram, data: Data | DataSource) -> CompiledProgram:
    """`program` with the device transforms of the data, unless it has some; those of all sets of a `Data` are equal."""
    if program.info.transforms is not None:
        return program
    is_all = isinstance(data, Data)
    transforms = common_transforms(transforms_of(data.train), data.evals) if is_all else data.transforms
    return program.transformed(transforms, partial(with_transforms, transforms=transforms)) if transforms else program


def step_batches(
    open_epoch: Callable[[], EpochIterator],
    plan: Plan,
    step: int,
    epoch_step: int,
    length: int | None,
    chunk: int,
    skipped: Sequence[int] = (),
) -> StepBatches:
    """The rest of an epoch without the batches `skipped`, in chunks that end where an observer needs the state."""
    limit = 0
    with closing(open_epoch()) as epoch_iterator:
        while True:
            limit = limit or plan.steps_until_cut(step, plan.epoch_steps(step, epoch_step, length))
            most = limit
            if skipped and limit:
                most = min((number - epoch_step for number in skipped if number >= epoch_step), default=limit)
                if not most:
                    epoch_iterator.skip()
                    epoch_step, limit = epoch_step + 1, 0
                    continue
            step_batch = epoch_iterator.take(most, chunk) if limit else None
            if step_batch is None:
                return
            step, epoch_step, limit = step + step_batch.steps, epoch_step + step_batch.steps, limit - step_batch.steps
            yield step_batch


def single_batches(open_epoch: Callable[[], EpochIterator], limit: int | None) -> StepBatches:
    """The batches of an epoch one by one, at most `limit`."""
    with closing(open_epoch()) as epoch_iterator:
        for _ in itertools.count() if limit is None else range(limit):
            if (step_batch := epoch_iterator.take(1)) is None:
                return
            yield step_batch


def placed_batches(
    program: CompiledProgram,
    data_source: DataSource,
    batches: StepBatches,
    device_is_idle: Callable[[], bool],
    *,
    trains: bool,
    pads: bool = False,
    epoch: int = 1,
    chunk: int = 1,
) -> BatchIterator:
    """`batches` on the devices, prefetched where that helps; `pads`: with one size, in an evaluation."""
    where, place, depth = placing(program, data_source, epoch, chunk)
    place, wrapped = peers().feed(program, data_source, where, place, trains=trains)
    # wrapped batches are joined from several processes, whose sizes differ
    pad = padding_for(program, data_source) if pads and wrapped is unchanged else unchanged

    def placed() -> StepBatches:
        with closing(batches):
            for step_batch in batches:
                yield place(pad(step_batch))

    return wrapped(data_source.iterate(placed(), device_is_idle, depth))


def check_repeats(data: Any) -> None:
    """Raises a `DataError` for data that can be iterated only once, whose batches the training needs."""
    if DataSource(data, "train").is_one_shot:
        raise DataError(
            f"The 'train' data is an iterator that can be used only once ({type(data).__name__}): a sweep would take "
            f"its first batches from the training. Pass {REUSABLE}."
        )


def sweep_batches(program: CompiledProgram, data: Any) -> Generator[Batch, None, None]:
    """Batches of training data, epoch after epoch, placed on the devices; the data is then as it was before."""
    check_repeats(data)
    data_source = DataSource(data, "train")
    with state_kept(data):
        for epoch in itertools.count(1):
            _, place, _ = placing(program, data_source, epoch)
            step_batch = None
            with closing(single_batches(partial(data_source.open, epoch), None)) as batches:
                for step_batch in batches:
                    yield place(step_batch).batch
            if step_batch is None:
                raise data_source.exhausted_error(epoch)


def placing(
    program: CompiledProgram, data_source: DataSource, epoch: int = 1, chunk: int = 1
) -> tuple[Callable[[int], str], PlaceFn, int]:
    """How the batches of an epoch are described in messages, how each is placed, and how many are prefetched."""
    depth = 0 if program.debug else data_source.prefetch(chunk, is_sharded=program.layout is not None)
    where = partial(describe_batch, epoch=epoch, name=data_source.name)

    def place(step_batch: StepBatch) -> StepBatch:
        try:
            placed = program.place(
                step_batch.batch, stacked=step_batch.stacked, replicated=step_batch.replicated, prefetch=depth > 0
            )
        except LayoutError as error:
            raise DataError(f"The {where(step_batch.number)} cannot be placed on the devices: {error}") from error
        except TypeError:
            check_batch(step_batch.batch, where(step_batch.number))
            raise
        return step_batch._replace(batch=placed)

    transfers = depth > 0 and jax.default_backend() != "cpu"  # the CPU uses numpy arrays as they are
    return where, place if transfers or program.layout is not None else unchanged, depth


def padding_for(program: CompiledProgram, data_source: DataSource) -> PlaceFn:
    """The function that pads the batches of one evaluation of `data_source` by `program`, in their order.

    A smaller last batch gets the size of the others, and a mask for what was added: the evaluation is compiled once,
    and all devices share its batches evenly. It needs a program whose metrics count only what is in the mask
    (`ProgramInfo.add_mask`). All batches of such a set get a mask, because one without it would be compiled apart.
    """
    layout = program.layout
    ways = 1 if layout is None else layout.batch_ways
    size = data_source.full_batch()
    is_even = data_source.has_equal_batches and (ways == 1 or (size is not None and size % ways == 0))
    if program.info.add_mask is None or program.debug or is_even:
        return unchanged
    placement = None if layout is None else layout.batch_placement
    processes, add_mask = 1 if placement is None else placement.processes, program.info.add_mask
    padded_size: int | None = None  # of every batch, over all processes; 0: they cannot be padded

    def pad(step_batch: StepBatch) -> StepBatch:
        nonlocal padded_size
        parts = 1 if step_batch.replicated else processes
        rows = _rows(step_batch.batch)
        if rows is not None and declared_size(step_batch.batch) not in (None, rows * parts):
            rows = None  # of padded examples, such as graphs: a mask of its rows would not count them
        if padded_size is None:
            padded_size = 0 if rows is None else -(-rows * parts // ways) * ways
        if not padded_size or rows is None:
            return step_batch
        size = max(rows, padded_size // parts)
        padded = jax.tree.map(lambda leaf: _padded(leaf, size - rows), step_batch.batch)
        masked = add_mask(resized(padded, size), np.arange(size) < rows)
        if masked is None:
            padded_size = 0
            return step_batch
        return step_batch._replace(batch=masked)

    return pad


def _rows(batch: Batch) -> int | None:
    """The number of examples, if all arrays of a batch have the same and this process has all of them; else None."""
    leaves = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    lengths = {leaf.shape[0] for leaf in leaves}
    is_here = all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array))
    return lengths.pop() if len(lengths) == 1 and is_here else None


def _padded(leaf: Any, more: int) -> Any:
    """`leaf` with its last row repeated: valid data, of which no result is NaN that was not before."""
    if not more or not np.ndim(leaf):
        return leaf
    numpy: Any = jnp if isinstance(leaf, jax.Array) else np
    last = leaf[-1:] if len(leaf) else numpy.zeros((1, *leaf.shape[1:]), leaf.dtype)
    return numpy.concatenate([leaf, numpy.repeat(last, more, axis=0)])


def batch_size_of(batch: Batch) -> int:
    """The number of examples of a batch."""
    return max((np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.shape(leaf)), default=0)


def check_divides(layout: Layout | None, batch: Batch, where: Any) -> None:
    """Raises if a training batch does not divide evenly among the devices: each would compute all of it."""
    ways, size = 1 if layout is None else layout.batch_ways, batch_size_of(batch)
    if size % ways:
        raise DataError(
            f"The {where} has {size} examples, which {ways} devices cannot share evenly. "
            f"Use a batch size of {nearby_multiples(size, ways)}."
        )


def epoch_notices(
    name: str, epoch: int, end: EpochEnd, steps: int, expected: int | None, lost: Sequence[str]
) -> Iterator[str]:
    """What the user should know of an epoch: slow data, `lost` metrics, and fewer than the `expected` steps."""
    if end.waited >= max(SLOW_SHARE * end.seconds, SLOW_SECONDS):
        yield (
            f"Data is the bottleneck: in epoch {epoch} the device waited for batches {end.waited / end.seconds:.0%} of "
            f"the time ({end.waited:.1f} of {end.seconds:.1f} s). Use more workers, cheaper transforms, or "
            "`resident=True` if the data fits."
        )
    if lost:
        yield (
            f"Epoch {epoch} is reported without {', '.join(lost)}: the run resumed after its last step, and the data "
            f"is an iterator, from which no batch can be drawn to trace a step. Pass {REUSABLE}."
        )
    if expected is not None and steps < expected:
        yield f"The {name!r} data ended after {steps} of {expected} steps of epoch {epoch}; the epoch ends there."


@contextmanager
def on_batch(program: CompiledProgram, where: Callable[[], str], batch: Batch) -> Iterator[None]:
    """Around a step of `program` on `batch`: its errors name the user's line and the batch, which is `where()`."""
    program.describe_batch = where
    try:
        yield
    except Exception as error:
        raise with_context(error, where(), batch)  # noqa: B904 - the same error, with a note


def with_context(error: Exception, where: str, batch: Batch) -> Exception:
    """The error with notes that name the user's line and the batch."""
    if isinstance(error, BatchChangedError):
        changed = DataError(f"The {where} differs from those before it: {error}")
        changed.__cause__ = error
        return changed
    if isinstance(error, TypeError):
        check_batch(batch, where)  # an entry that is not numeric, which JAX reports as an argument of a function
    with_user_frame(error, batch).add_note(f"This happened on {where}.")
    return error


def batch_faults(batch: Batch, trace: StepTrace | None) -> str:
    """What in a batch can make the loss non-finite, and how to fix it; empty if nothing can."""
    bad = [
        f"batch{jax.tree_util.keystr(path)} has {np.count_nonzero(~np.isfinite(leaf))} values that are NaN or infinite"
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if np.issubdtype(np.asarray(leaf).dtype, np.floating) and not np.isfinite(leaf).all()
    ]
    if bad:
        return f"{'; '.join(bad)}. Clean the data, or mask missing values."
    return "" if trace is None else trace.out_of_range(batch)


def steps_per_call(plan: Plan, data_source: DataSource) -> int:
    """Optimizer steps per dispatch."""
    if plan.steps_per_call != "epoch":
        return plan.steps_per_call
    lengths = data_source.lengths
    steps = shortest(max(lengths.values()) if isinstance(lengths, Mapping) else lengths, plan.steps_per_epoch)
    if steps is None:
        raise DataError(
            "The plan has `steps_per_call=\"epoch\"`, but the 'train' data has no length. "
            "Set `steps_per_epoch`, a number for `steps_per_call`, or pass data with `len()`."
        )
    return steps
