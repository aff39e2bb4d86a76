"""Several loaders as one: what it yields, and that it resumes as exactly as each of them."""

from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.core import batch_weight
from jax_trainer.datasets import (
    ArrayLoader,
    CombinedLoader,
    DataError,
    DataSource,
    DeviceTransforms,
    Position,
    SupervisedBatch,
    normalize,
)
from jax_trainer.datasets.contents import content_of
from tests.datasets.data_sources import KINDS, Counted
from tests.datasets.test_positions import Session

NUMBERS = np.arange(40, dtype=np.int32)
MODES = ("min_size", "max_size_cycle", "sequential")


def few(**options: Any) -> ArrayLoader:
    return ArrayLoader(NUMBERS[:6], 2, **options)  # 3 batches


def many(**options: Any) -> ArrayLoader:
    return ArrayLoader(NUMBERS[10:30], 4, **options)  # 5 batches


def epochs(data: Any, *numbers: int) -> list[list[Any]]:
    source = DataSource(data, "train")
    return [[jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), one) for one in source.open(n)] for n in numbers]


def test_the_mode_decides_when_an_epoch_ends(subtests):
    mode: Any
    for mode, lengths in [("min_size", (3, 3)), ("max_size_cycle", (5, 5)), ("sequential", (3, 5))]:
        with subtests.test(mode=mode, lengths=lengths):
            data = CombinedLoader({"few": few(), "many": many()}, mode)
            (batches,) = epochs(data, 1)
            first, second = ([*few()] * 2)[: lengths[0]], [*many()][: lengths[1]]
            if mode == "sequential":
                assert batches == [batch.tolist() for batch in [*first, *second]]
            else:
                assert batches == [{"few": a.tolist(), "many": b.tolist()} for a, b in zip(first, second, strict=True)]
            assert len(data) == DataSource(data, "train").length == len(batches)


def test_a_loader_that_starts_again_is_shuffled_anew_each_time():
    data = CombinedLoader({"few": few(shuffle=True), "many": many(shuffle=True)}, "max_size_cycle")
    seen = [batch["few"] for epoch in epochs(data, 1, 2, 3) for batch in epoch]
    own = few(shuffle=True)
    # two epochs of the shorter one begin in each epoch of the longer one
    expected = [batch.tolist() for first in (1, 3, 5) for n in (first, first + 1) for batch in own.epoch(n)]
    assert seen == [batch for index, batch in enumerate(expected) if index % 6 < 5]
    assert len({tuple(map(tuple, expected[n : n + 3])) for n in range(0, 18, 3)}) == 6
    assert epochs(data, 1, 1)[0] == epochs(data, 1)[0]  # as an evaluation does


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind", ["list", "torch", "torchdata, stateful dataset", "grain loader", "own state", "function"]
)
def test_any_kinds_of_loaders_resume_together_from_every_position(kind, mode):
    def make() -> CombinedLoader:
        return CombinedLoader({"own": many(shuffle=True), "other": KINDS[kind]()}, mode)

    if mode != "min_size" and kind in ("own state", "function"):
        with pytest.raises(DataError, match=f"'other' .*no length.*{mode}"):
            make()
        return
    # the shorter one ends an epoch after 5 batches, the longer one after 6
    length = {"min_size": 5, "max_size_cycle": 6, "sequential": 11}[mode]
    full = Session(make(), per_epoch=length).take(2 * length)
    for count in (1, 4, 5, 6, length, length + 2):
        session = Session(make(), per_epoch=length)
        seen = session.take(count)
        rest = Session(make(), session.position, per_epoch=length).take(2 * length - count)
        assert seen + rest == full, count


def test_a_loader_that_is_ahead_of_one_that_has_ended_loses_no_batch():
    data = CombinedLoader({"ahead": Counted(), "ended": few()}, "min_size")  # of 6 and 3 batches
    assert [batch["ahead"][0] for epoch in epochs(data, 1, 2) for batch in epoch] == [1, 2, 3, 4, 5, 6]


def test_one_loader_counts_the_examples_of_a_combined_batch():
    data = CombinedLoader({"few": few(), "many": many()}, size_of="few")
    assert [batch_weight(batch) for batch in data] == [2] * 3
    with pytest.raises(ValueError, match=r"leading sizes \[2, 4\]"):
        batch_weight(next(iter(CombinedLoader({"few": few(), "many": many()}))))


def test_positions_of_other_batch_sizes_are_refused():
    sources = [DataSource(CombinedLoader({"a": few(), "b": ArrayLoader(NUMBERS, n)}), "train") for n in (4, 5)]
    position = sources[0].position_at(Position(1, 2), sources[0].full_batch())
    assert position == Position(1, 2)
    with pytest.raises(DataError, match="2 batches of 6 .* 7 now"):
        sources[1].position_at(position, sources[0].full_batch())


def test_the_contents_of_all_loaders_tell_data_apart():
    last = NUMBERS.copy()
    last[-1] = 7
    contents = [content_of(CombinedLoader({"a": few(), "b": ArrayLoader(one, 4)})) for one in (NUMBERS, last)]
    assert contents[0] == content_of(CombinedLoader({"a": few(), "b": ArrayLoader(NUMBERS.copy(), 4)}))
    assert contents[0]["digests"] != contents[1]["digests"]


TRANSFORMED = ArrayLoader(SupervisedBatch.of(np.zeros((8, 4, 4), np.uint8), np.zeros(8)), 4)
TRANSFORMED.transforms = DeviceTransforms(train=(normalize(0.5, 0.5),), eval=(normalize(0.5, 0.5),))


def test_what_cannot_be_combined_is_refused_by_name(subtests):
    for arguments, message in [
        (({"a": few()}, "max_size"), "`mode`.*min_size, max_size_cycle, sequential.*'max_size'"),
        (([few(), many()],), "`loaders`.*dict.*name"),
        (({},), "`loaders`.*dict.*name"),
        (({"a": iter([NUMBERS])}, "min_size"), "'a' .*iterator"),
        (({"a": few(), "b": []},), "'b' .*empty"),
        (({"a": few(), "b": lambda: iter([])}, "max_size_cycle"), "'b' .*no length.*max_size_cycle"),
        (({"a": ArrayLoader(NUMBERS, {0: 2, 3: 4})}, "min_size"), "'a' .*{0: 2, 3: 4}"),
        (({"a": few(), "b": TRANSFORMED},), "transforms"),
        (({"a": few(), "b": TRANSFORMED}, "sequential"), "transforms"),
    ]:
        with subtests.test(arguments=arguments), pytest.raises((ValueError, TypeError), match=message):
            CombinedLoader(*arguments)


def test_only_a_loader_of_a_dict_can_count_its_examples(subtests):
    mode: Any
    for other, size_of, mode in [("b", "c", "min_size"), ("b", "a", "sequential"), ("size", "a", "min_size")]:
        with (
            subtests.test(other=other, size_of=size_of, mode=mode),
            pytest.raises(ValueError, match=f"`size_of`.*{size_of}.*{mode}"),
        ):
            CombinedLoader({"a": few(), other: many()}, mode, size_of=size_of)


def test_a_state_of_other_loaders_is_refused(subtests):
    for state in [{"gone": {"at": 1}}, "text"]:
        with subtests.test(state=state):
            source = DataSource(CombinedLoader({"a": few(), "own": Counted()}), "train")
            with pytest.raises(DataError, match="a, own"):
                source.restore(state)


def test_loaders_with_the_same_transforms_can_follow_each_other():
    data = CombinedLoader({"a": TRANSFORMED, "b": TRANSFORMED}, "sequential")
    assert DataSource(data, "train").transforms == TRANSFORMED.transforms


class Longer(ArrayLoader):
    """One whose length is wrong."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_a_length_that_is_wrong_is_an_error_where_the_position_depends_on_it(subtests):
    mode: Any
    for mode in ["max_size_cycle", "sequential"]:
        with subtests.test(mode=mode), pytest.raises(DataError, match="'a' ended after 3 .* 4"):
            list(CombinedLoader({"a": Longer(NUMBERS[:6], 2), "b": many()}, mode))
