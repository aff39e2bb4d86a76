import io
import re

import jax
import pytest
from callback_runs import fit, run_in, scripted, scripted_program
from rich.console import Console

from jax_trainer.callbacks import Progress, ProgressBar, ProgressConfig
from jax_trainer.engine import EpochStart, Every, Plan


def shown(*, terminal: bool, width: int = 200, **options) -> str:
    screen = io.StringIO()
    bar = ProgressBar(console=Console(file=screen, force_terminal=terminal, width=width), **options)
    plan = Plan(max_epochs=2, eval_every=Every(epochs=1), metrics_every=5)
    train = scripted([1.0] * 32)
    fit(bar, plan=plan, program=scripted_program(), train=train, evals={"val": train})
    return screen.getvalue()


def test_a_terminal_sees_steps_speed_and_the_latest_metrics():
    text = shown(terminal=True, refresh_seconds=0.0)
    assert "32/32" in text
    assert "starting" in text
    assert "/s" in text
    assert "loss" in text
    assert "epoch 2 val" in text


def test_without_a_terminal_there_is_one_line_per_epoch_and_evaluation():
    lines = shown(terminal=False).splitlines()
    assert [line.split("loss")[0].split() for line in lines] == [
        ["epoch", "1", "step", "32", "train"],
        ["epoch", "1", "step", "32", "val"],
        ["epoch", "2", "step", "64", "train"],
        ["epoch", "2", "step", "64", "val"],
    ]


def test_drawing_is_limited_by_time_not_by_steps():
    assert shown(terminal=True, refresh_seconds=60.0).count("epoch 1 ") < shown(
        terminal=True, refresh_seconds=0.0
    ).count("epoch 1 ")


def test_a_bar_says_of_how_many_epochs_how_fast_and_how_long():
    text = shown(terminal=True, refresh_seconds=0.0, epochs=2, title="first line")
    assert re.search(r"epoch 2/2  \S+ 16/32  0:00 < 0:00  \S+/s  loss", text)
    assert "epoch 2/2 val" in text
    assert "first line\n" in text


def test_a_notebook_gets_one_line_drawn_over_and_no_escape_sequences():
    text = shown(terminal=False, refresh_seconds=0.0, is_notebook=True)
    assert "\x1b" not in text
    assert "32/32" in text
    assert "starting" in text
    # what a notebook shows in the end: of each line, what was written last at every place
    lines = [line for line in map(as_shown, text.split("\n")) if line]
    assert [line.split()[:5] for line in lines] == [
        ["epoch", "1", "step", "32", "train"],
        ["epoch", "1", "step", "32", "val"],
        ["epoch", "2", "step", "64", "train"],
        ["epoch", "2", "step", "64", "val"],
    ]
    assert all("━" not in line for line in lines)


def as_shown(line: str) -> str:
    cells: list[str] = []
    for part in line.split("\r"):
        cells[: len(part)] = part
    return "".join(cells).rstrip()


def test_only_the_lead_process_speaks(monkeypatch):
    assert shown(terminal=True, is_lead=False) == ""
    screen = io.StringIO()
    bar = ProgressBar(console=Console(file=screen, force_terminal=True))
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # asked when something happens, not before
    bar.handle(EpochStart(0, 1, None, 4))  # type: ignore[arg-type]
    assert screen.getvalue() == ""


def test_a_bar_is_one_write(monkeypatch):
    writes: list[str] = []
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(console.file, "write", writes.append)
    fit(ProgressBar(console=console, refresh_seconds=0.0), plan=Plan(max_steps=3))
    assert all(text.startswith("\r") for text in writes)
    assert len(writes) == 1 + 3 + 1  # the epoch, its steps, the end


def test_a_bar_fits_the_screen():
    lines = re.split(r"\r|\n", shown(terminal=True, refresh_seconds=0.0, width=40))
    assert max(len(line.replace("\x1b[2K", "")) for line in lines if "epoch   " not in line) < 40


@pytest.mark.parametrize("twice", [False, True])
def test_the_callback_shows_the_folder_the_epochs_and_all_that_the_bar_does(tmp_path, capsys, twice):
    callback = Progress(ProgressConfig(refresh_seconds=0.0))
    for number in range(1 + twice):
        with run_in(tmp_path / str(number), epochs=2) as run:
            callback.attach(run)
            fit(callback)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == f"Run folder: {run.folder}"
        assert [[line.split()[i] for i in (0, 1, 4)] for line in lines[1:]] == [
            ["epoch", "1", "train"],
            ["epoch", "1", "val"],
            ["epoch", "2", "train"],
            ["epoch", "2", "val"],
        ]


def test_a_run_that_is_counted_in_steps_is_told_in_steps():
    lines = shown(terminal=False, in_steps=True).splitlines()
    assert [line.split("loss")[0].split() for line in lines] == [
        ["step", step, name] for step in ("32", "64") for name in ("train", "val")
    ]
