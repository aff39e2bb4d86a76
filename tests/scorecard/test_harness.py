"""The cases fail through `Score`: here it is seen to fail."""

import json

import pytest
from harness import CARD, Score


def left(*runs: list[str], error: Exception | None = None) -> None:
    """Leaves a score with these runs, each with its problems."""
    with Score("A1") as score:
        for problems in runs:
            score.add(problems, "killed")
        if error is not None:
            raise error


def test_leaving_a_score_fails_unless_every_run_is_as_it_should_be():
    left([], [])
    with pytest.raises(AssertionError, match=r"A1: 1 of 2 are as they should be:\nkilled: rng differ"):
        left([], ["rng differ"])


def test_a_case_in_which_nothing_was_tried_has_failed():
    with pytest.raises(AssertionError, match="A1: nothing was tried"):
        left()


def test_an_error_continues_and_counts_as_a_run_that_is_not_as_it_should_be(tmp_path, monkeypatch):
    monkeypatch.setenv(CARD, str(tmp_path / "card.jsonl"))
    with pytest.raises(LookupError, match="broken"):
        left([], error=LookupError("broken"))
    row = json.loads((tmp_path / "card.jsonl").read_text())
    assert (row["runs"], row["passed"], row["problems"]) == (2, 1, ["LookupError: broken"])
