import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.callbacks import logger_observers
from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader, Data
from jax_trainer.engine import Event, Every, Plan, StepEnd, run
from jax_trainer.logger import CSVConfig, Logger, LoggerConfig, TensorboardConfig, XAxis
from jax_trainer.testing import linear_program
from tests.logger.event_files import scalars_in
from tests.logger.faulty_tools import FaultyConfig, FaultyTool
from tests.logger.logger_runs import train_two_epochs
from tests.rows import noted_row

PLACES = {"step": [2, 4, 6, 8], "epoch": [1, 1, 2, 2], "examples": [64, 128, 192, 256]}


def logger_on(folder: Path, x_axis: Any, *tools: Any) -> Logger:
    return Logger(LoggerConfig(log_steps_every=2, tool_config=list(tools), x_axis=x_axis), folder)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_lies_on_the_axis_that_was_chosen(tmp_path_factory: pytest.TempPathFactory):
    for axis in PLACES:
        with noted_row(axis):
            tmp_path = tmp_path_factory.mktemp("row")
            logger = logger_on(tmp_path, axis, FaultyConfig(), TensorboardConfig(), CSVConfig())
            train_two_epochs(logger)
            logger.close("completed")
            assert logger.failures == {}
            tool = FaultyTool.latest
            assert [x for x, row in tool.rows() if "train/loss_step" in row] == PLACES[axis]
            assert [x for x, row in tool.rows() if "val/loss" in row] == PLACES[axis][1::2]
            assert [x for x, _ in scalars_in(tmp_path)["train/loss_step"]] == PLACES[axis]
            assert (tmp_path / "metrics.csv").read_text().split(",")[0] == axis
            rows = [row for row in rows_in(tmp_path) if "train/loss_step" in row]  # they always have the step
            assert [row["step"] for row in rows] == PLACES["step"]
            assert [row[axis] for row in rows] == PLACES[axis]


def test_seconds_grow_and_are_rounded_for_tools_that_need_integers(tmp_path):
    logger = logger_on(tmp_path, "seconds", FaultyConfig(), CSVConfig())
    logger.cut(None, 0, 7.25)
    train_two_epochs(logger)
    logger.close("completed")
    seconds = [row["seconds"] for row in rows_in(tmp_path)]
    assert seconds == sorted(seconds) and 7.25 <= seconds[0] < seconds[-1] < 60
    assert [x for x, _ in FaultyTool.latest.rows()] == [round(place) for place in seconds]
    assert [float(line.split(",")[0]) for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]] == seconds


class LogsEarly:
    """Logs at every step, when its metrics have not arrived."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def handle(self, event: Event) -> None:
        if isinstance(event, StepEnd):
            self._logger.log_scalar("mine/value", event.step, event.step)


SIZES = [32, 16, 8, 32, 8, 16]


def batches(sizes: list[int]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(n, 8)).astype(np.float32), "y": rng.integers(0, 4, n)} for n in sizes]


def test_examples_are_exact_whatever_the_sizes_of_batches_and_continue_after_a_resume(tmp_path):
    program, data = compile_program(linear_program(), on_recompile="ignore"), batches(SIZES)
    state, first = program.init(jax.random.key(0), data[0]), logger_on(tmp_path, "examples", FaultyConfig())
    observers = logger_observers(first)
    plan = Plan(max_epochs=1)
    state = run(program, state, Data(data), plan, [*observers, LogsEarly(first)])
    first.close("completed")
    saved = observers[0].state_dict()
    second = logger_on(tmp_path, "examples", FaultyConfig())
    observers = logger_observers(second)
    observers[0].load_state_dict(json.loads(json.dumps(saved)))
    run(program, state, Data(data), plan, [*observers, LogsEarly(second)])
    second.close("completed")
    assert (first.failures, second.failures) == ({}, {})
    totals = np.cumsum(2 * SIZES).tolist()
    found = {row["mine/value"]: row["examples"] for row in rows_in(tmp_path) if "mine/value" in row}
    assert found == dict(enumerate(totals, start=1))
    assert [x for x, row in FaultyTool.latest.rows() if "mine/value" in row] == totals[6:]
    steps = {row["step"]: row["examples"] for row in rows_in(tmp_path) if "train/loss_step" in row}
    assert steps == {step: totals[step - 1] for step in range(2, 13, 2)}


def embedding_program() -> Any:
    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
        return params["table"][batch["tokens"]].mean()

    return function_program(lambda key, batch: {"table": jnp.ones((9, 4))}, loss, optax.sgd(0.1))


def test_tokens_are_exact_whatever_the_lengths_of_batches(tmp_path_factory: pytest.TempPathFactory):
    for lengths in [[7, 7, 5, 5, 7, 3], [7] * 6]:
        with noted_row(lengths):
            tmp_path = tmp_path_factory.mktemp("row")
            program = compile_program(embedding_program(), on_recompile="ignore")
            tokens: Any = [{"tokens": np.zeros((4, length), np.int32)} for length in lengths]
            resident = ArrayLoader({"tokens": np.zeros((24, 7), np.int32)}, 4)
            data = Data(resident, resident=True) if len({*lengths}) == 1 else Data(tokens)
            logger = logger_on(tmp_path, "tokens", FaultyConfig())
            observers = [*logger_observers(logger), LogsEarly(logger)]
            run(program, program.init(jax.random.key(0), tokens[0]), data, Plan(max_epochs=1), observers)
            logger.close("completed")
            found = [x for x, row in FaultyTool.latest.rows() if "mine/value" in row]
            assert found == np.cumsum([4 * length for length in lengths]).tolist()


def test_without_token_ids_the_error_names_another_axis(tmp_path):
    logger = logger_on(tmp_path, "tokens")
    with pytest.raises(ValueError, match="x_axis: tokens.*x_axis: examples"):
        train_two_epochs(logger)
    logger.close("failed")


def test_without_a_run_rows_bring_their_place_or_cost_a_warning(tmp_path, caplog):
    logger = logger_on(tmp_path, "examples", FaultyConfig())
    logger.write(0, {"loss": 1.0})
    logger.write(5, {"loss": 0.5, "examples": 160})
    logger.log_scalar("loss", 0.4, step=6)
    logger.close("completed")
    assert FaultyTool.latest.rows() == [(0, {"loss": 1.0}), (160, {"loss": 0.5})]
    assert rows_in(tmp_path)[1] == {"step": 5, "loss": 0.5, "examples": 160}
    assert logger.failures == {"Logger": 1}
    assert "`x_axis: examples`" in caplog.text and "step 6" in caplog.text


def test_entries_of_steps_that_never_arrive_are_not_lost(tmp_path):
    logger = logger_on(tmp_path, "examples", FaultyConfig())
    logger.count(2, 1, [32, 64], [0, 0])
    logger.log_scalar("loss", 0.4, step=3)
    assert not logger.flush()
    logger.close("failed")
    assert FaultyTool.latest.rows() == [(64, {"loss": 0.4})]


def test_an_unknown_axis_is_refused():
    wrong: Any = "steps"
    with pytest.raises(ValueError, match="x_axis.*steps"):
        LoggerConfig(x_axis=wrong)


def test_old_counts_are_forgotten(tmp_path):
    axes = XAxis("examples")
    for step in range(1, 30_001):
        axes.count(step, 1, [step], [0])
    assert axes.at(30_000, {}) == 30_000
    with pytest.raises(ValueError, match="step 5"):
        axes.at(5, {})


def test_evaluations_in_the_middle_of_an_epoch_lie_at_the_examples_so_far(tmp_path):
    program, data = compile_program(linear_program(), on_recompile="ignore"), batches([32] * 6)
    logger = logger_on(tmp_path, "examples", FaultyConfig())
    plan = Plan(max_epochs=1, eval_every=Every(steps=3))
    observed = logger_observers(logger)
    run(program, program.init(jax.random.key(0), data[0]), Data(data, {"val": data[:1]}), plan, observed)
    logger.close("completed")
    assert [x for x, row in FaultyTool.latest.rows() if "val/loss" in row] == [96, 192]


def test_hyperparameters_are_never_lost(tmp_path):
    logger = logger_on(tmp_path, "examples", FaultyConfig())
    logger.write(8, {"loss": 0.5, "examples": 256})
    logger.count(9, 2, [288], [0])  # resumed at step 9, and stopped there
    logger.log_hparams({"lr": 0.1})
    logger.close("completed")
    assert logger.failures == {}
    assert FaultyTool.latest.entries[-1] == ("hparams", 288, {"lr": 0.1}, {})
