"""Cases fail through `Score`: these tests check that it fails."""

import json
from pathlib import Path

import pytest

from tests.scorecard.harness import CARD, Score


@pytest.fixture(autouse=True)
def card(tmp_path, monkeypatch) -> Path:
    """A card of their own: these runs are no result."""
    monkeypatch.setenv(CARD, str(tmp_path / "card.jsonl"))
    return tmp_path / "card.jsonl"


def leave_score(*runs: list[str], error: Exception | None = None) -> None:
    """Exits a `Score` with these runs, each with its problems."""
    with Score("A1") as score:
        for problems in runs:
            score.add(problems, "killed")
        if error is not None:
            raise error


def test_a_score_fails_unless_every_run_passed():
    leave_score([], [])
    with pytest.raises(AssertionError, match=r"A1: 1 of 2 runs passed:\nkilled: rng differ"):
        leave_score([], ["rng differ"])


def test_a_case_without_runs_fails():
    with pytest.raises(AssertionError, match="A1: no runs"):
        leave_score()


def test_an_error_propagates_and_counts_as_a_failed_run(card):
    with pytest.raises(LookupError, match="broken"):
        leave_score([], error=LookupError("broken"))
    row = json.loads(card.read_text())
    assert (row["runs"], row["passed"], row["problems"]) == (2, 1, ["LookupError: broken"])
