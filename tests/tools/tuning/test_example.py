import runpy
import sys
from pathlib import Path

import pytest

from tests.tools.tuning.tuning_runs import ROOT


@pytest.mark.example
def test_the_example_cuts_trials_and_finds_a_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["tune_digits.py", "--trials", "5", "--out", str(tmp_path)])
    found = runpy.run_path(str(ROOT / "examples" / "tune_digits.py"))["main"]()
    assert found.count("pruned") >= 1 and found.count("complete") >= 3
    assert found.value >= 0.97 and found.config == tmp_path / "best.yaml"
    output = capsys.readouterr()
    assert "were pruned: " in output.out and output.err.count("trial ") == 5
