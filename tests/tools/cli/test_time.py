"""`jax-trainer time`: where the time of a run went."""

from pathlib import Path

import pytest

from jax_trainer.runs import TIMES
from tests.tools.cli.cli_runs import run_command


def test_the_time_of_a_run_shows_every_phase_and_what_to_change(trained: Path, tmp_path: Path):
    shown, data = (run_command("time", trained, *more, folder=tmp_path) for more in ((), ("--json",)))
    assert (shown.code, shown.err, data.code) == (0, "", 0)
    assert sum(data.data["seconds"].values()) == pytest.approx(data.data["wall"], rel=1e-4)
    assert all(name in shown.out for name in ("steps", "saving", "-bound"))


def test_the_end_of_a_run_has_the_short_form(run: Path, tmp_path: Path):
    result = run_command("resume", run, folder=tmp_path)
    assert result.code == 0 and "Time: " in result.out and "2 starts" in result.out


def test_a_folder_without_the_file_is_an_error(run: Path, tmp_path: Path):
    (run / TIMES).unlink()
    result = run_command("time", run, folder=tmp_path)
    assert result.code == 2 and TIMES in result.err


def test_a_damaged_file_is_an_error(run: Path, tmp_path: Path):
    (run / TIMES).write_text("\x1b[31m{\n")
    result = run_command("time", run, folder=tmp_path)
    assert result.code == 1 and "line 1" in result.err and "\x1b" not in result.err


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path):
    result = run_command("time", tmp_path / "none", folder=tmp_path)
    assert result.code == 2 and "none" in result.err
