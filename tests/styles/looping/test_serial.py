"""Processors one after the other, by us and by redex."""

from dataclasses import replace

import pytest
from redex import combinator

from jax_trainer.styles.checkpoints import Checkpoint, serial

CHECKPOINT = Checkpoint({}, {}, (), {}, 0.5, 1, 0.1, 3)


def later(checkpoint: Checkpoint) -> Checkpoint:
    return replace(checkpoint, step=checkpoint.step + 1)


def test_each_processor_gets_what_the_one_before_returned(subtests):
    for compose in [serial, combinator.serial]:
        with subtests.test(compose=compose):
            assert compose(later, later)(CHECKPOINT).step == 5


def test_a_processor_that_returns_none_passes_its_argument_on():
    seen: list[Checkpoint] = []
    assert serial(later, seen.append, later)(CHECKPOINT).step == 5
    assert [checkpoint.step for checkpoint in seen] == [4]


def test_nothing_to_do_gives_the_checkpoint_back():
    assert serial()(CHECKPOINT) is CHECKPOINT


def test_what_cannot_be_called_is_refused_at_once():
    with pytest.raises(TypeError, match="Processor 1 is a int"):
        serial(later, 3)  # type: ignore[arg-type]
