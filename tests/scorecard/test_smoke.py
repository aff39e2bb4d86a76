"""What of the scorecard runs in every test: processes that are killed in a few ways, one after the other."""

import time
from dataclasses import replace

import pytest
from crashes import killed_at, killed_when, terminated
from harness import Score, differences, progress, reference, starts, until_done
from job import Options

SHORT = Options(out="", steps=45, val_every=20, val_epochs=1)


@pytest.mark.slow
def test_a2_a5_a_run_killed_while_it_saves_and_terminated_ends_as_if_nothing_had_happened(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "disturbed"))
    undisturbed = reference(options, references)
    with Score("A2") as score:
        score.add(killed_at(options, "before_rename:kill:4"), "before_rename")
    with Score("A5") as score:
        score.add(terminated(options, "mark_eval:40"), "eval")
    assert until_done(options) == 1
    assert differences(options, undisturbed) == []


def test_a1_a_run_killed_at_any_time_ends_as_if_nothing_had_happened(tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "disturbed"))
    undisturbed = reference(options, references)
    with Score("A1") as score:
        killed_when(options, lambda child: time.monotonic() > child.began + 1.0)  # while it imports
        killed_when(options, lambda child: len(starts(options)) == 1)  # while it compiles
        killed_when(options, lambda child: progress(options) >= 25)
        assert until_done(options) == 1
        score.add(differences(options, undisturbed))
        score.note(kills=3)
