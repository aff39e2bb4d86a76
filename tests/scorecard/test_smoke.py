"""The part of the scorecard that `make slow` runs: a few kills of one job."""

import time
from dataclasses import replace

import pytest

from tests.scorecard.crashes import kill_at, kill_when, terminate
from tests.scorecard.harness import Score, differences, progress, reference, run_until_done, starts
from tests.scorecard.job import Options

pytestmark = pytest.mark.slow  # `make test` kills a smaller run: `tests/trainer/test_edits_after_kills.py`
SHORT = Options(out="", steps=45, val_every=20, val_epochs=1)


def test_a2_a5_a_run_killed_while_it_saves_and_terminated_ends_bit_identical(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "disturbed"))
    undisturbed = reference(options, references)
    with Score("A2") as score:
        score.add(kill_at(options, "before_rename:kill:4"), "before_rename")
    with Score("A5") as score:
        score.add(terminate(options, "mark_eval:40"), "eval")
    assert run_until_done(options) == 1
    assert differences(options, undisturbed) == []


def test_a1_a_run_killed_at_any_time_ends_bit_identical(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "disturbed"))
    undisturbed = reference(options, references)
    with Score("A1") as score:
        kill_when(options, lambda child: time.monotonic() > child.began + 1.0)  # while it imports
        kill_when(options, lambda child: len(starts(options)) == 1)  # while it compiles
        kill_when(options, lambda child: progress(options) >= 25)
        assert run_until_done(options) == 1
        score.add(differences(options, undisturbed))
        score.note(kills=3)
