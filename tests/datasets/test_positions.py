"""A position goes through the text of a checkpoint, into a fresh loader or a fresh process, and nothing is lost."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from jax_trainer.checkpoint.json_codec import decoded, encoded
from jax_trainer.datasets import ArrayLoader, DataSource, Position
from tests.datasets.data_sources import (
    BATCHES,
    IDS,
    INSTALLED,
    KINDS,
    SIZE,
    STATEFUL,
    WITH_WORKERS,
    ids_of,
    of_torch,
)

EPOCHS, BEGINNING = 3, "[0, 0, null]"


def as_text(position):
    """A position as a checkpoint stores it."""
    return json.dumps([position.epoch, position.epoch_step, encoded(position.state)])


def from_text(text):
    epoch, step, state = json.loads(text)
    return Position(epoch, step, decoded(state))


class Session:
    """A run without steps: it takes batches as the loop does, and knows where it stands."""

    def __init__(self, source, at=BEGINNING, *, per_epoch=BATCHES):
        position = from_text(at)
        self._data_source, self._per_epoch = DataSource(source, "train", steps_per_epoch=per_epoch), per_epoch
        self._epoch, self._step, self._state = position.epoch, position.epoch_step, position.state
        self._data_source.restore(position.state)
        self.positions = []  # after each batch

    def take(self, count):
        """The examples of the next `count` batches, over the ends of epochs."""
        seen = []
        while len(seen) < count:
            self._epoch += not self._step
            with closing(self._data_source.open(self._epoch, self._step)) as epoch_iterator:
                while (
                    len(seen) < count
                    and self._step < self._per_epoch
                    and (step_batch := epoch_iterator.take(1)) is not None
                ):
                    seen.append(np.asarray(ids_of(step_batch.batch)).tolist())
                    self._step, self._state = self._step + 1, step_batch.state
                    self.positions.append(self.position)
            if len(seen) < count:
                self._step = 0
        return seen

    @property
    def position(self):
        """Where it stands; behind the last batch of an epoch that is the epoch's end."""
        return as_text(Position(self._epoch, self._step % self._per_epoch, self._state))

    @property
    def position_before_the_end(self):
        """The position before the end of the epoch was emitted."""
        return as_text(Position(self._epoch, self._step, self._state))


def test_a_run_that_is_killed_again_and_again_sees_what_one_in_one_go_sees(subtests):
    for kind in KINDS:
        with subtests.test(kind=kind):
            full = Session(KINDS[kind]()).take(EPOCHS * BATCHES)
            for pieces in ([8, 2, 1, 7], [6, 6, 6], [5, 1, 4, 8]):  # twice within an epoch, at its ends, around them
                seen, at = [], BEGINNING
                for count in pieces:
                    session = Session(KINDS[kind](), at)
                    seen += session.take(count)
                    at = session.position
                assert seen == full, pieces
            session = Session(KINDS[kind]())
            seen = session.take(BATCHES)
            assert seen + Session(KINDS[kind](), session.position_before_the_end).take(3) == full[: BATCHES + 3]


def test_epochs_that_are_cut_short_are_resumed_from_as_well(subtests):
    for kind in sorted(STATEFUL - {"torchdata nodes"} | {"array loader", "torch"}):
        with subtests.test(kind=kind):
            full = Session(KINDS[kind](), per_epoch=4).take(12)
            for count in (3, 4, 8, 9):
                session = Session(KINDS[kind](), per_epoch=4)
                seen = session.take(count)
                rest = Session(KINDS[kind](), session.position, per_epoch=4).take(12 - count)
                assert seen + rest == full, count


def test_a_loader_of_torchdata_draws_nothing_again_and_is_iterated_once_per_epoch():
    counted = of_torch("torchdata, counted")
    first = Session(counted())
    seen, at = [first.take(8)], first.position
    for count in (2, 2, 6):
        loader = counted()
        session = Session(loader, at)
        seen.append(session.take(count))
        at = session.position
        ids = [number for batch in seen[-1] for number in batch]
        assert [IDS[index] for index in loader.dataset.read] == ids
        assert loader.started == 1
    assert sum(map(len, seen)) == 18


def test_a_loader_that_must_replay_is_iterated_once_per_epoch():
    started = []

    class Plain:
        def __iter__(self):
            started.append(1)
            return iter(ArrayLoader(IDS, SIZE))

    session = Session(Plain())
    session.take(8)
    Session(Plain(), session.position).take(10)
    assert len(started) == 2 + 2


def test_nodes_of_torchdata_whose_state_does_not_change_after_a_restore_are_warned_about():
    nodes = of_torch("torchdata nodes that restart")
    session = Session(nodes())
    session.take(BATCHES)
    with pytest.warns(RuntimeWarning, match="`state_dict` did not change"):
        Session(nodes(), session.position).take(2)


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_can_rewind_does_so_in_the_same_process(kind):
    source = KINDS[kind]()
    data_source = DataSource(source, "train", steps_per_epoch=BATCHES)
    assert data_source.can_rewind == (kind != "stream")
    if not data_source.can_rewind:
        return
    first = Session(source)
    start, at = first.take(2), first.position
    lost = Session(source, at).take(5)
    assert Session(source, at).take(5) == lost
    assert start + lost == Session(KINDS[kind]()).take(7)


def test_an_epoch_that_was_resumed_can_be_read_again_from_its_first_batch(subtests):
    for kind in ["Hugging Face", "torchdata, Hugging Face", "torchdata", "grain"]:
        with subtests.test(kind=kind):
            source = KINDS[kind]()
            first = Session(source)
            start = first.take(2)
            Session(source, first.position).take(1)
            assert Session(source).take(2) == start


def run_in_a_process(kinds, positions, count):
    """The next `count` batches of each of `kinds`, drawn by a process of its own, and where it stood after each."""
    request = json.dumps([kinds, positions, count])
    code = "from tests.datasets.test_positions import main; main()"  # not as a file: workers would import it, too
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)])}
    command = [sys.executable, "-W", "ignore", "-c", code]
    child = subprocess.run(command, env=environment, input=request, capture_output=True, text=True, timeout=250)
    assert not child.returncode, child.stderr
    return json.loads(child.stdout)


@pytest.mark.integration
def test_a_fresh_process_resumes_and_another_one_after_it(subtests):
    for kinds in [INSTALLED, *([kind] for kind in WITH_WORKERS)]:
        with subtests.test(kinds=kinds):
            full = run_in_a_process(kinds, {}, 14)
            positions = {kind: positions[7] for kind, (_, positions) in full.items()}
            for first, count in ((8, 2), (10, 4)):
                answer = run_in_a_process(kinds, positions, count)
                positions = {kind: result[1][-1] for kind, result in answer.items()}
                expected = {kind: batches[first : first + count] for kind, (batches, _) in full.items()}
                assert {kind: batches for kind, (batches, _) in answer.items()} == expected


def main():
    """What `run_in_a_process` asks for."""
    flags.FLAGS(["test"])  # grain's workers want them parsed
    kinds, positions, count = json.load(sys.stdin)
    answer = {}
    for kind in kinds:
        session = Session((KINDS | WITH_WORKERS)[kind](), positions.get(kind, BEGINNING))
        answer[kind] = (session.take(count), session.positions)
    sys.stdout.write(json.dumps(answer))
