"""How `scripts/scorecard.py` turns the rows of the cases into a table."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "scorecard.py"))


def row(case: str, runs: int, passed: int, test: str = "", **numbers: Any) -> str:
    """A result, and that its test has finished."""
    test = test or f"{case}-{numbers}"
    result = {"case": case, "test": test, "runs": runs, "passed": passed, "numbers": numbers, "problems": []}
    return json.dumps(result) + "\n" + json.dumps({"finished": test, "seconds": 2.0})


def test_the_runs_of_a_case_are_added_up_over_its_tests(tmp_path):
    card = tmp_path / "card.jsonl"
    card.write_text("\n".join([row("A1", 3, 3, linen="3 kills"), row("A1", 2, 1, nnx="2 kills"), row("B5", 1, 1)]))
    found, seconds = SCRIPT["read_tallies"](card)
    assert seconds == 6.0
    text = SCRIPT["table"](["A1", "B5", "A6"], found).splitlines()
    assert text[2].endswith("| 5 | **4** | linen: 3 kills; nnx: 2 kills |")
    assert text[3].endswith("| 1 | 1 |  |") and "| not run | 0 |" in text[4]


@pytest.mark.parametrize(
    ("priority", "runs", "passed", "passes"),
    [(0, 50, 50, True), (0, 50, 49, False), (0, 0, 0, False), (1, 20, 19, True), (1, 20, 18, False), (2, 5, 4, True)],
)
def test_the_required_share_depends_on_the_priority(priority, runs, passed, passes):
    assert SCRIPT["Tally"](runs, passed).passes(priority) is passes


def test_every_test_belongs_to_a_case_of_the_table():
    names = [
        line.split("(")[0]
        for file in Path(__file__).parent.glob("test_*.py")
        for line in file.read_text().split("def ")
    ]
    cases = {name.split("_")[1] for name in names if name.startswith(("test_a", "test_b", "test_c", "test_d"))}
    known = {case.lower() for case in SCRIPT["CASES"]}
    numbered = {case for case in cases if case[1:].isdigit()}
    assert numbered == known - {"mutants"}


def test_groups_and_cases_can_be_chosen():
    assert SCRIPT["select_cases"]("A6, D") == ["A6", *(f"D{number}" for number in range(1, 15))]
    with pytest.raises(SystemExit, match="A99"):
        SCRIPT["select_cases"]("A99")


def test_a_result_counts_once_its_test_has_finished_and_only_the_last_one(tmp_path):
    card = tmp_path / "card.jsonl"
    killed = row("A1", 9, 2, test="one").splitlines()[0]
    card.write_text("\n".join([killed, row("A1", 9, 9, test="one"), row("B1", 1, 1).splitlines()[0]]))
    found, _ = SCRIPT["read_tallies"](card)
    assert (found["A1"].runs, found["A1"].passed) == (9, 9) and "B1" not in found


def test_results_are_kept_for_one_state_of_the_working_tree():
    card = SCRIPT["card_of"]
    assert card(5) == card(5) != card(50)


def test_timed_cases_exist_and_are_never_run_in_parallel(tmp_path, monkeypatch):
    calls: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, **_: calls.append(command))
    assert SCRIPT["TIMED"] <= SCRIPT["CASES"].keys()
    SCRIPT["run"](["A1", "D5"], jobs=2, kills=1, card=tmp_path / "card.jsonl")
    assert [("-n" in command, "test_d5_" in command[-1]) for command in calls] == [(True, False), (False, True)]
