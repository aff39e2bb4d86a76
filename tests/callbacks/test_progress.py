import io
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from callback_runs import fit, run_in, scripted, scripted_program
from rich.console import Console

from jax_trainer.callbacks import Progress, ProgressBar, ProgressConfig
from jax_trainer.engine import (
    EpochEnd,
    EpochStart,
    EvalEnd,
    Every,
    FitEnd,
    FitStart,
    Notice,
    Plan,
    StepEnd,
    StepMetrics,
)


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
    assert "compiling" in text
    assert "/s" in text
    assert "loss" in text
    assert "epoch 2 val" in text


def test_without_a_terminal_there_is_one_line_per_epoch_and_evaluation():
    first, *lines = shown(terminal=False).splitlines()
    assert first.split() == ["epoch", "1", "compiling"]
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
    assert "compiling" in text
    # what a notebook shows in the end: of each line, what was written last at every place
    lines = [line for line in map(as_shown, text.split("\n")) if line]
    assert re.search("epoch 2  .* loss 1  val  loss 1", text)  # the last evaluation beside the next epoch
    assert [line.split()[:5] for line in lines] == [
        ["epoch", "2", "step", "64", "train"],
        ["epoch", "2", "step", "64", "val"],
    ]
    assert all("━" not in line for line in lines)


def as_shown(line: str) -> str:
    cells: list[str] = []
    for part in line.split("\r"):
        cells[: len(part)] = part
    return "".join(cells).rstrip()


def test_only_the_primary_process_shows_a_bar(monkeypatch):
    assert shown(terminal=True, is_primary=False) == ""
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
        assert lines[:2] == [f"Run folder: {run.folder}", "epoch 1/2  compiling"]
        assert [[line.split()[i] for i in (0, 1, 4)] for line in lines[2:]] == [
            ["epoch", "1", "train"],
            ["epoch", "1", "val"],
            ["epoch", "2", "train"],
            ["epoch", "2", "val"],
        ]


def test_a_run_that_is_counted_in_steps_is_reported_in_steps():
    _, *lines = shown(terminal=False, in_steps=True).splitlines()
    assert [line.split("loss")[0].split() for line in lines] == [
        ["step", step, name] for step in ("32", "64") for name in ("train", "val")
    ]


class ScriptedBar:
    """A bar that gets events from a test, on a clock that the test moves."""

    def __init__(self, monkeypatch, *, terminal: bool = False, **options: Any) -> None:
        self.now, self.step, self.screen = 1000.0, 0, io.StringIO()
        monkeypatch.setattr("jax_trainer.callbacks.progress.time", SimpleNamespace(perf_counter=lambda: self.now))
        console = Console(file=self.screen, force_terminal=terminal, width=200)
        self.bar = ProgressBar(console=console, is_primary=True, **options)

    def __call__(self, kind: Any, *args: Any, epoch: int = 1) -> None:
        self.bar.handle(kind(self.step, epoch, None, *args))

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.step += 1
            self(StepEnd, 1, 1, None, None)

    def metrics(self, **values: float) -> None:
        ones = np.ones(1)
        columns = {name: SimpleNamespace(values=np.array([value]), weights=ones) for name, value in values.items()}
        self(StepMetrics, SimpleNamespace(columns=columns))

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()


def test_a_file_gets_a_line_with_step_loss_rate_and_eta_every_few_seconds(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch, epochs=2, steps=200)
    scripted_bar(FitStart)
    scripted_bar(EpochStart, 100)
    scripted_bar.now += 60.0  # compiling, which does not count for the rate
    scripted_bar.steps(1, 0.0)
    scripted_bar.metrics(loss=0.25, acc=0.5)
    scripted_bar.steps(40, 0.5)
    assert scripted_bar.lines[0] == "epoch 1/2  compiling"
    assert scripted_bar.lines[1].split() == ["epoch", "1/2", "1/100", "step", "1"]
    assert scripted_bar.lines[2].split() == [
        "epoch",
        "1/2",
        "11/100",
        "step",
        "11",
        "loss",
        "0.25",
        "acc",
        "0.5",
        "2",
        "steps/s",
        "ETA",
        "1:34",
    ]
    assert [line.split()[4] for line in scripted_bar.lines[3:]] == ["21", "31", "41"]  # every 5 seconds


def test_a_file_that_hears_of_epochs_often_enough_gets_no_other_lines(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    for epoch in (1, 2, 3, 4):
        scripted_bar(EpochStart, 10, epoch=epoch)
        scripted_bar.steps(10, 0.19)
        scripted_bar(EpochEnd, {"loss": 0.5}, 1.9, 0.0, None, epoch=epoch)
    scripted_bar(FitEnd, "completed")
    assert [line.split()[4] for line in scripted_bar.lines[1:]] == ["train"] * 4


@pytest.mark.parametrize("is_notebook", [False, True])
def test_a_notebook_gets_it_on_standard_output_and_anybody_else_on_standard_error(monkeypatch, capsys, is_notebook):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: is_notebook)
    bar = ProgressBar(title="first", is_primary=True)
    bar.handle(FitEnd(1, 1, None, "completed"))  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert [shown.err.strip(), shown.out.strip()] == (["", "first"] if is_notebook else ["first", ""])


def test_secondary_statistics_do_not_crowd_a_line(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    scripted_bar(
        EvalEnd, "val", {"acc": 0.5, "acc_max": 1.0, "acc_std": 0.1, "loss": 2.0, "loss_min": 1.0, "size_max": 3.0}
    )
    scripted_bar(FitEnd, "completed")
    assert scripted_bar.lines == ["epoch   1  step      0  val  loss 2  acc 0.5  size_max 3"]


def test_a_validation_inside_an_epoch_has_its_own_numbers_and_training_goes_back_to_its_count():
    screen = io.StringIO()
    bar = ProgressBar(console=Console(file=screen, force_terminal=True, width=200), refresh_seconds=0.0)
    losses = scripted([float(n) for n in range(1, 33)])
    plan = Plan(max_epochs=1, eval_every=Every(steps=16), metrics_every=4)
    fit(bar, plan=plan, program=scripted_program(), train=scripted([500.0] * 32), evals={"val": losses})
    drawn = screen.getvalue().split("\r")
    of_validation = [line for line in drawn if "epoch 1 val" in line]
    assert not any("loss 500" in line for line in of_validation)
    assert any(re.search("epoch 1 val .* loss ", line) for line in of_validation)
    assert any(re.search("17/32 .* loss 500", line) for line in drawn if "epoch 1  " in line)


def test_the_end_says_why_and_the_beginning_from_where(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    scripted_bar.step = 40
    scripted_bar(FitStart, epoch=3)
    scripted_bar(Notice, "Training ends after step 40: `max_time` (5 s) is over.", epoch=3)
    scripted_bar(FitEnd, "stopped", "EarlyStopping after step 40: `val/acc` is 1.", epoch=3)
    first, *rest = scripted_bar.lines
    assert first == "Resumed from step 40 (epoch 3)."
    assert rest == [
        "Training ends after step 40: `max_time` (5 s) is over.",
        "EarlyStopping after step 40: `val/acc` is 1.",
    ]


def test_the_latest_metrics_stay_until_an_epoch_has_its_own(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch, terminal=True, refresh_seconds=0.0)
    scripted_bar(EpochStart, 10)
    scripted_bar.steps(10, 0.1)
    scripted_bar.metrics(loss=0.25)
    scripted_bar(EpochEnd, {"loss": 0.5}, 1.0, 0.0, None)
    scripted_bar(EpochStart, 10, epoch=2)
    scripted_bar.steps(3, 0.1)
    drawn = scripted_bar.screen.getvalue().split("\r")
    assert all("loss 0.25" in line for line in drawn if "epoch 2  " in line)


def test_metrics_are_read_only_when_they_are_drawn(monkeypatch):
    scripted_bar, reads = ScriptedBar(monkeypatch, terminal=True, refresh_seconds=1.0), []

    class Rows:
        """Counts how often its columns are read, which takes long if there are many."""

        @property
        def columns(self) -> dict[str, Any]:
            reads.append(scripted_bar.step)
            return {"loss": SimpleNamespace(values=np.array([0.25]))}

    scripted_bar(EpochStart, 100)
    for _ in range(20):
        scripted_bar(StepMetrics, Rows())
        scripted_bar.steps(1, 0.1)
    assert 1 <= len(reads) <= 2
    assert "loss 0.25" in scripted_bar.screen.getvalue()


def test_a_run_that_had_ended_reports_that_no_steps_are_left(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    scripted_bar.step = 44
    scripted_bar(FitStart, epoch=2)
    scripted_bar(FitEnd, "completed", epoch=2)
    assert scripted_bar.lines[0] == "Resumed from step 44 (epoch 2)."
    assert re.search("no steps are left.*step 44", scripted_bar.lines[1])


def test_a_resumed_run_with_steps_left_does_not_report_that_none_are(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    scripted_bar.step = 44
    scripted_bar(FitStart, epoch=2)
    scripted_bar(EpochStart, 10, epoch=3)
    scripted_bar.steps(1, 0.1)
    scripted_bar(FitEnd, "completed", epoch=3)
    assert not any("no steps are left" in line for line in scripted_bar.lines)
