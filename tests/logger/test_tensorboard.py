import json
import math
import subprocess
import sys
import textwrap
from typing import Any

import jax
import pytest
from compoconf import parse_config
from event_files import events_in, scalars_in

from jax_trainer.callbacks import logger_observers
from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Every, Plan, run
from jax_trainer.logger import Logger, LoggerConfig, TensorboardConfig, TensorboardToolLogger
from jax_trainer.testing import numbered_loader, tiny_program


def test_a_run_is_read_back_with_steps_and_epochs_as_x_axes(tmp_path):
    program, loader = compile_program(tiny_program("nnx"), on_recompile="ignore"), numbered_loader(128)
    logger = Logger(LoggerConfig(log_steps_every=2, tool_config=TensorboardConfig()), tmp_path)
    data, plan = Data(loader, {"val": numbered_loader(64)}), Plan(max_epochs=2, eval_every=Every(epochs=1))
    run(program, program.init(jax.random.key(0), next(iter(loader))), data, plan, logger_observers(logger))
    logger.close("completed")
    shown = scalars_in(tmp_path)
    assert {tag for tag in shown if "optimizer" not in tag} == {
        *("train/loss_step", "train/acc_step", "train/loss_epoch", "train/acc_epoch", "train/time_epoch"),
        *("val/loss", "val/acc", "val/time"),
    }
    assert [x for x, _ in shown["train/loss_step"]] == [2, 4, 6, 8]
    assert [x for x, _ in shown["optimizer/grad_global_norm_step"]] == [2, 4, 6, 8]
    for tag in ("train/loss_epoch", "optimizer/grad_global_norm_max_epoch", "val/loss", "val/time"):
        assert [x for x, _ in shown[tag]] == [1, 2]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["epoch"]) for row in rows if "val/loss" in row] == [(4, 1), (8, 2)]
    for tag, points in shown.items():
        assert [y for _, y in points] == pytest.approx([row[tag] for row in rows if tag in row], rel=1e-6)


def test_files_begin_as_tensorboard_expects_and_never_overwrite_each_other(tmp_path):
    for step in (1, 2):  # within a second
        tool = TensorboardToolLogger(TensorboardConfig(), tmp_path)
        tool.write(step, {"x": step, "bad": math.nan, "huge": math.inf})
        tool.close("completed")
    assert [event.file_version for event in events_in(tmp_path)] == ["brain.Event:2", "", "brain.Event:2", ""]
    assert scalars_in(tmp_path)["x"] == [(1, 1.0), (2, 2.0)]
    assert scalars_in(tmp_path)["huge"] == [(1, math.inf), (2, math.inf)]
    assert all(math.isnan(y) for _, y in scalars_in(tmp_path)["bad"])


def test_numbers_are_on_the_disk_before_the_end(tmp_path):
    tool = TensorboardToolLogger(TensorboardConfig(), tmp_path)
    tool.write(1, {"x": 1.0})
    assert scalars_in(tmp_path)["x"] == [(1, 1.0)]
    tool.close("completed")


def test_without_tensorboardx_the_section_is_read_and_the_run_refused_in_one_sentence():
    script = """
    import logging, pathlib, sys, tempfile
    from compoconf import parse_config
    sys.modules["tensorboardX"] = None  # as if it were not installed
    from jax_trainer.logger import Logger, LoggerConfig
    config = parse_config(LoggerConfig, {"tool_config": {"class_name": "TensorboardToolLogger"}})
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        Logger(config, folder)
    except ImportError as error:
        assert str(error) == "tensorboardX is not installed; run `pip install 'jax-trainer[tensorboard]'`.", error
        assert not logging.getLogger("jax_trainer").handlers
    else:
        raise AssertionError("no error")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_section_of_the_seed_document_is_read():
    section = {"name": "", "save_dir": "tests/checkpoints/", "use_timestamp_version": False, "version": "0"}
    config: Any = parse_config(LoggerConfig, {"tool_config": {"class_name": "TensorboardToolLogger", **section}})
    assert config.tool_config == TensorboardConfig(**section)
