import json
from itertools import product

import jax
import numpy as np
import pytest

from jax_trainer.callbacks import LogMetrics, logger_observers
from jax_trainer.checkpoint.json_codec import decoded, encoded
from jax_trainer.core import MetricWindow, as_metrics, compile_program
from jax_trainer.core.metric_buffer import MetricBufferFormat
from jax_trainer.datasets import Data
from jax_trainer.engine import Every, Plan, StepMetrics, run
from jax_trainer.logger import JsonlWriter, Logger, LoggerConfig
from jax_trainer.testing import EventRecorder, linear_program, numbered_data, numbered_loader
from tests.callbacks.callback_runs import fit, matrix_program, scripted, scripted_program
from tests.rows import noted_row

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}
PROGRAM = compile_program(linear_program(), on_recompile="ignore")


def logged(path, plan, every, **options):
    recorder = EventRecorder()
    writer = JsonlWriter(path)
    fit(LogMetrics(writer, every), recorder, plan=plan, **{"program": PROGRAM, "train": numbered_loader(), **options})
    return [json.loads(line) for line in path.read_text().splitlines()], recorder


@pytest.mark.parametrize(
    ("steps_per_call", "metrics_every"),
    [
        *((1, 7), (8, 50)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((8, 7), (1, 50), ("epoch", 7), ("epoch", 50))),
    ],
)
def test_windows_of_steps_are_weighted_means_at_multiples(tmp_path, steps_per_call, metrics_every):
    plan = Plan(max_epochs=2, steps_per_call=steps_per_call, metrics_every=metrics_every)
    train = scripted(np.random.default_rng(0).normal(size=1003).tolist(), batch_size=32)
    rows, seen = logged(tmp_path / "metrics.jsonl", plan, every=10, program=scripted_program(), train=train, evals={})
    windows = {row["step"]: row for row in rows if "train/loss_step" in row}
    assert list(windows) == [10, 20, 30, 40, 50, 60]
    sizes = {step: 11 if step % 32 == 0 else 32 for step in range(1, 65)}
    for end, row in windows.items():
        steps = range(end - 9, end + 1)
        mean = np.average([seen.steps[s]["loss"] for s in steps], weights=[sizes[s] for s in steps])
        assert row["train/loss_step"] == pytest.approx(mean, rel=1e-9)


def test_epochs_and_evaluations_are_written_under_their_names(tmp_path):
    rows, seen = logged(tmp_path / "metrics.jsonl", Plan(max_epochs=2, eval_every=Every(epochs=1)), every=0)
    assert [(row["step"], row["epoch"]) for row in rows] == [(32, 1), (32, 1), (64, 2), (64, 2)]
    assert rows[0]["train/loss_epoch"] == seen.epochs[1]["loss"]
    assert rows[0]["optimizer/grad_global_norm_max_epoch"] == seen.epochs[1]["optimizer/grad_global_norm_max"]
    assert rows[1]["val/acc"] == seen.evals[0][2]["acc"]
    assert not [name for row in rows for name in row if name.endswith("_step")]


def test_metrics_of_epochs_only_are_not_in_step_rows(tmp_path):
    rows, _ = logged(tmp_path / "metrics.jsonl", Plan(max_steps=10), every=10)
    assert "optimizer/grad_global_norm_step" in rows[0]
    assert "optimizer/grad_global_norm_max_step" not in rows[0]


def test_a_negative_interval_is_refused(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="`every_n_steps` must be at least 0, got -1"):
        LogMetrics(writer, -1)
    writer.close("failed")


def test_a_logger_is_fed_as_configured_and_left_open(tmp_path):
    logger = Logger(LoggerConfig(log_steps_every=4), tmp_path)
    state = PROGRAM.init(jax.random.key(0), EXAMPLE)
    run(PROGRAM, state, Data(numbered_loader()), Plan(max_steps=10), logger_observers(logger))
    logger.log_scalar("test/acc", 0.5, step=10)
    logger.close("completed")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 10, 10]
    assert rows[2]["train/time_epoch"] > 0


def test_evaluations_are_rows_with_their_arrays_and_a_file_per_set_has_the_latest(tmp_path):
    logger, seen = Logger(LoggerConfig(log_steps_every=0), tmp_path), EventRecorder()
    evals = {"val_near": numbered_loader(32), "val_far": numbered_loader(64)}
    plan = Plan(max_epochs=2, eval_every=Every(epochs=1))
    program = matrix_program()
    fit(*logger_observers(logger), seen, program=program, plan=plan, evals=evals)
    logger.close("completed")
    assert sorted(path.name for path in (tmp_path / "metrics").iterdir()) == ["val_far.json", "val_near.json"]
    saved = json.loads((tmp_path / "metrics" / "val_far.json").read_text())
    _, _, evaluated = seen.evals[-1]
    assert saved.keys() == {"step", "epoch", "val_far/loss", "val_far/conf_matrix", "val_far/time"}
    assert (saved["epoch"], saved["val_far/loss"]) == (2, evaluated["loss"])
    assert saved["val_far/conf_matrix"] == evaluated["conf_matrix"].tolist()
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["val_far/time"] == saved["val_far/time"]
    arrays = [(row["epoch"], row["arrays"]) for row in logged if "arrays" in row]
    expected = [{f"{name}/conf_matrix": metrics["conf_matrix"].tolist()} for _, name, metrics in seen.evals]
    assert arrays == list(zip((1, 1, 2, 2), expected, strict=True))


def test_every_validation_inside_an_epoch_has_a_row_and_the_number_of_files_does_not_grow(tmp_path):
    logger = Logger(LoggerConfig(log_steps_every=0), tmp_path)
    plan = Plan(max_epochs=2, eval_every=Every(steps=12, epochs=1))
    fit(*logger_observers(logger), program=PROGRAM, train=numbered_loader(), plan=plan)  # 32 steps
    logger.close("completed")
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    by_step = {row["step"]: (row["epoch"], row["val/loss"]) for row in logged if "val/loss" in row}
    assert {step: epoch for step, (epoch, _) in by_step.items()} == {12: 1, 24: 1, 32: 1, 36: 2, 48: 2, 60: 2, 64: 2}
    [latest] = (tmp_path / "metrics").iterdir()
    found = json.loads(latest.read_text())
    assert (latest.name, found["step"], found["val/loss"]) == ("val.json", 64, by_step[64][1])


class Rows:
    """A writer that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def write(self, step, values):
        self.rows.append((step, dict(values)))

    def close(self, status):
        """Does nothing."""


def told_rows(observer: LogMetrics, rows: MetricWindow) -> None:
    observer.handle(StepMetrics(rows.last, 1, None, rows, 7))  # type: ignore[arg-type]


def step_rows(steps: int) -> MetricWindow:
    values = np.random.default_rng(1).normal(size=steps).astype(np.float32)
    metrics = as_metrics({"loss": values[0], "spread": {"value": values[0], "mode": "std"}}, 3)
    fmt = MetricBufferFormat.of(metrics)
    words = np.repeat(np.asarray(fmt.blank(1).append(metrics)[0].rows), steps, axis=0)
    for name in ("loss", "spread"):
        words[:, fmt.metrics[name].value.start] = values.view(np.uint32)
    return MetricWindow(1, fmt, words)


def test_a_window_that_an_interruption_cuts_is_written_as_if_nothing_had_happened():
    for every, cut in product([1, 7, 50], [1, 6, 7, 33, 50, 99]):
        with noted_row(every, cut):
            steps, whole, parts = step_rows(100), Rows(), Rows()
            told_rows(LogMetrics(whole, every), steps)
            head, tail = steps.split(cut)
            first, second = LogMetrics(parts, every), LogMetrics(parts, every)
            told_rows(first, head)
            second.load_state_dict(decoded(json.loads(json.dumps(encoded(first.state_dict()), allow_nan=False))))
            told_rows(second, tail)
            assert parts.rows == whole.rows
            assert len(whole.rows) == 100 // every
            state = second.state_dict()
            assert (state["examples"], state["tokens"]) == (300, 2100)


def test_a_window_of_another_length_counts_for_nothing():
    for before, every in product([0, 7], [0, 5]):
        with noted_row(before, every):
            steps, writer = step_rows(10), Rows()
            head, tail = steps.split(6)
            first, second = LogMetrics(Rows(), before), LogMetrics(writer, every)
            told_rows(first, head)
            second.load_state_dict(first.state_dict())
            told_rows(second, tail)
            assert [step for step, _ in writer.rows] == ([10] if every else [])
            for _, row in writer.rows:
                assert row["train/loss_step"] == pytest.approx(np.mean(tail.values_of("loss")))
