import io
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from jax_trainer.callbacks import ProgressBar
from jax_trainer.engine import (
    EpochEnd,
    EpochStart,
    EvalEnd,
    EvalRoundEnd,
    EvalStart,
    EvalStep,
    Every,
    FitEnd,
    FitStart,
    Notice,
    Plan,
    StepEnd,
    StepMetrics,
)
from tests.callbacks.callback_runs import fit, scripted, scripted_program


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


def test_without_a_terminal_there_is_one_line_per_epoch_without_control_characters():
    text = shown(terminal=False, refresh_seconds=0.0, steps=64)
    assert text.replace("\n", "").isprintable()
    first, *lines = text.splitlines()
    assert first.split() == ["epoch", "1", "compiling"]
    assert lines == [f"epoch   {epoch}  step {32 * epoch}  train loss 1  val loss 1" for epoch in (1, 2)]


def test_drawing_is_limited_by_time_not_by_steps():
    assert shown(terminal=True, refresh_seconds=60.0).count("epoch 1 ") < shown(
        terminal=True, refresh_seconds=0.0
    ).count("epoch 1 ")


def test_a_bar_says_of_how_many_epochs_how_fast_and_how_long():
    text = shown(terminal=True, refresh_seconds=0.0, epochs=2, title="first line")
    assert re.search(r"epoch 2/2 ━+─+ 16/32  step 48  loss 1  \S+/s  ETA 0:00", text)
    assert "epoch 2/2 val" in text
    assert "first line\n" in text


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
    assert max(len(line.replace("\x1b[2K", "")) for line in lines) < 40
    assert any(re.search("epoch 2 .*32/32  loss 1", line) for line in lines)


def test_a_run_that_is_counted_in_steps_is_reported_in_steps():
    _, *lines = shown(terminal=False, in_steps=True).splitlines()
    assert lines == [f"step {step:>6}  train loss 1  val loss 1" for step in (32, 64)]


class ScriptedBar:
    """A bar that gets events from a test, on a clock that the test moves."""

    def __init__(self, monkeypatch, *, terminal: bool = False, **options: Any) -> None:
        self.now, self.step, self.epoch_step, self.screen = 1000.0, 0, 0, io.StringIO()
        monkeypatch.setattr("jax_trainer.callbacks.progress.time", SimpleNamespace(perf_counter=lambda: self.now))
        self.console = Console(file=self.screen, force_terminal=terminal, width=200)
        self.bar = ProgressBar(console=self.console, is_primary=True, **options)

    def __call__(self, kind: Any, *args: Any, epoch: int = 1) -> None:
        self.bar.handle(kind(self.step, epoch, None, *args))

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.step += 1
            self.epoch_step += 1
            self(StepEnd, 1, self.epoch_step, None, None)

    def start(self, steps: int, epoch: int = 1, *, at: int = 0) -> None:
        """Starts an epoch of so many steps, `at` of which are done."""
        self.epoch_step = at
        self(EpochStart, steps - at, epoch=epoch)

    def evaluate(self, seconds: float, epoch: int = 1, **metrics: float) -> None:
        self(EvalStart, "val", 2, epoch=epoch)
        for batch in (1, 2):
            self.now += seconds / 2
            self(EvalStep, "val", batch, epoch=epoch)
        self(EvalEnd, "val", metrics, epoch=epoch)
        self(EvalRoundEnd, {"val": metrics}, epoch=epoch)

    def metrics(self, **values: float) -> None:
        ones = np.ones(1)
        columns = {
            name: SimpleNamespace(values=np.array([value]), weights=ones, compute=None)
            for name, value in values.items()
        }
        self(StepMetrics, SimpleNamespace(columns=columns))

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().splitlines()

    @property
    def drawn(self) -> str:
        """The bar as it is now."""
        return self.screen.getvalue().rpartition("\x1b[2K")[2]


def test_a_file_gets_few_lines_of_a_long_epoch_with_step_loss_rate_and_eta(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch, epochs=2, steps=20_000)
    scripted_bar(FitStart)
    scripted_bar.start(10_000)
    scripted_bar.now += 60.0  # compiling, which does not count for the rate
    scripted_bar.steps(1, 0.0)
    scripted_bar.metrics(loss=0.25, acc=0.5)
    scripted_bar.steps(9_000, 4.0)
    first, compiled, second, *others = scripted_bar.lines
    assert (first, compiled) == ("epoch 1/2  compiling", "epoch 1/2  1/10000  step 1/20000  starting")
    assert second == "epoch 1/2  16/10000  step 16/20000  loss 0.25  acc 0.5  4 s/step  ETA 11:05:36, run 22:12:16"
    assert len(others) == 61  # in ten hours: after minutes at first, then every ten minutes


def test_a_file_gets_a_line_per_epoch_and_of_very_many_epochs_some(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    for epoch in range(1, 5001):
        scripted_bar.start(10, epoch)
        scripted_bar.steps(10, 0.01)
        scripted_bar(EpochEnd, {"loss": 0.5}, 0.1, 0.0, None, epoch=epoch)
    scripted_bar(FitEnd, "completed", epoch=5000)
    epochs = [int(line.split()[1]) for line in scripted_bar.lines[1:]]
    assert epochs[:200] == [*range(1, 201)] and epochs[-1] == 5000
    assert 250 < len(epochs) < 320  # one every five seconds of 480


def test_evaluations_count_for_the_time_left_of_the_run_and_not_for_the_rate(monkeypatch):
    options = {"epochs": 4, "steps": 400, "metric": "val/acc"}
    scripted_bar = ScriptedBar(monkeypatch, terminal=True, refresh_seconds=0.0, **options)
    scripted_bar.start(100)
    scripted_bar.now += 60.0
    scripted_bar.steps(100, 0.5)
    assert "2/s  ETA 0:00, run 2:30" in scripted_bar.drawn  # no evaluation was measured yet
    scripted_bar(EpochEnd, {"loss": 0.5}, 50.0, 0.0, None)
    scripted_bar.evaluate(30.0, acc=0.75)
    scripted_bar.start(100, 2)
    scripted_bar.steps(50, 0.5)
    assert "2/s  ETA 0:25, run 2:55" in scripted_bar.drawn  # 250 steps, and the evaluations to come
    assert "val/acc 0.75" in scripted_bar.drawn


def test_a_resumed_run_shows_where_it_is_and_how_long_the_rest_takes(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch, terminal=True, refresh_seconds=0.0, epochs=4, steps=400)
    scripted_bar.step = 260
    scripted_bar(FitStart, epoch=3)
    scripted_bar.start(100, 3, at=60)
    scripted_bar.now += 30.0
    scripted_bar.steps(21, 0.5)
    assert re.search("epoch 3/4 .* 81/100  step 281/400  2/s  ETA 0:09, run 0:59", scripted_bar.drawn)


@pytest.mark.parametrize(
    ("metric", "shown"), [("val/acc", "val/acc 0.875"), ("train/acc", "train/acc 0.5"), ("loss", ""), ("", "")]
)
def test_the_bar_shows_the_loss_and_the_chosen_metric_at_80_columns(monkeypatch, metric, shown):
    scripted_bar = ScriptedBar(monkeypatch, terminal=True, refresh_seconds=0.0, metric=metric, epochs=20, steps=2000)
    monkeypatch.setattr(scripted_bar.console, "_width", 80)
    scripted_bar.evaluate(1.0, epoch=0, acc=0.875, loss=0.5)
    scripted_bar.start(100, 12)
    scripted_bar.metrics(loss=0.25, acc=0.5)
    scripted_bar.steps(20, 0.005)
    assert len(scripted_bar.drawn) < 80
    assert re.search(rf"^epoch 12/20 ━+─+ 20/100  .*loss 0.25  {shown}.*200/s  ETA 0:00, run ", scripted_bar.drawn)


def test_a_notice_that_comes_again_with_other_numbers_is_shown_once(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    for epoch in (1, 2, 3):
        scripted_bar(Notice, f"In epoch {epoch} the device waited {90 + epoch}% of the time.", epoch=epoch)
    scripted_bar(Notice, "Another.")
    scripted_bar(FitEnd, "completed")
    assert scripted_bar.lines == ["In epoch 1 the device waited 91% of the time.", "Another."]


def test_a_terminal_of_80_columns_shows_an_epoch_on_one_line_with_the_chosen_metric(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch, terminal=True, metric="val/accuracy", epochs=4)
    monkeypatch.setattr(scripted_bar.console, "_width", 80)
    scripted_bar(EpochEnd, {"loss": 0.123456, "accuracy": 0.98765, "perplexity": 1.23456}, 1.0, 0.0, None)
    scripted_bar.evaluate(1.0, loss=0.123456, accuracy=0.98765, perplexity=1.23456)
    scripted_bar(FitEnd, "completed")
    line = next(line for line in scripted_bar.lines if "train loss" in line).rpartition("\x1b[2K")[2]
    assert len(line) < 80
    assert re.search("train loss 0.1235 .*val loss 0.1235  accuracy 0.9877", line)


def test_progress_goes_to_standard_error(capsys):
    bar = ProgressBar(title="first", is_primary=True)
    bar.handle(FitEnd(1, 1, None, "completed"))  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert [shown.err, shown.out] == ["first\n", ""]


def test_secondary_statistics_do_not_crowd_a_line(monkeypatch):
    scripted_bar = ScriptedBar(monkeypatch)
    scripted_bar(
        EvalEnd, "val", {"acc": 0.5, "acc_max": 1.0, "acc_std": 0.1, "loss": 2.0, "loss_min": 1.0, "size_max": 3.0}
    )
    scripted_bar(FitEnd, "completed")
    assert scripted_bar.lines == ["epoch   1  step      0  val loss 2  acc 0.5  size_max 3"]


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
    assert any(re.search("epoch 1 .* 17/32 .* loss 500", line) for line in drawn if "1 val" not in line)
    lines = re.findall("epoch   1  step +(\\d+)  (.*)", screen.getvalue())
    assert lines == [("16", "val loss 16.5"), ("32", "train loss 500  val loss 16.5")]  # one of the end of the epoch


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
    scripted_bar.start(10)
    scripted_bar.steps(10, 0.1)
    scripted_bar.metrics(loss=0.25)
    scripted_bar(EpochEnd, {"loss": 0.5}, 1.0, 0.0, None)
    scripted_bar.start(10, 2)
    scripted_bar.steps(3, 0.1)
    drawn = [line for line in scripted_bar.screen.getvalue().split("\r") if "epoch 2 " in line]
    assert len(drawn) == 4 and all("loss 0.25" in line for line in drawn)


def test_metrics_are_read_only_when_they_are_drawn(monkeypatch):
    scripted_bar, reads = ScriptedBar(monkeypatch, terminal=True, refresh_seconds=1.0), []

    class Rows:
        """Counts how often its columns are read, which takes long if there are many."""

        @property
        def columns(self) -> dict[str, Any]:
            reads.append(scripted_bar.step)
            return {"loss": SimpleNamespace(values=np.array([0.25]), compute=None)}

    scripted_bar.start(100)
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
    scripted_bar.start(10, 3)
    scripted_bar.steps(1, 0.1)
    scripted_bar(FitEnd, "completed", epoch=3)
    assert not any("no steps are left" in line for line in scripted_bar.lines)
