import re
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "draw_run.py"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [f'{{"step": {10 * n}, "epoch": {n}, "train/acc_epoch": 0.{n}, "val/acc": 0.{n}}}' for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "param/num_model_params": 5}\n' + "\n".join(rows))
    return tmp_path


def test_the_curves_of_a_run_are_drawn(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["draw_run.py", str(run), str(run / "c.svg"), "train/acc_epoch", "val/acc"])
    runpy.run_path(str(SCRIPT))["main"]()
    assert "<svg" in (run / "c.svg").read_text()


def test_an_unknown_metric_is_answered_with_the_logged_ones(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_run.py", str(run), str(run / "c.svg"), "val/loss"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"]()
    assert re.search("'val/loss'.*train/acc_epoch, val/acc", capsys.readouterr().err)
