"""A checkpoint whose record says what cannot be is damaged: the one before it is restored, whatever is wrong."""

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn

from jax_trainer import fit
from jax_trainer.callbacks import (
    EarlyStoppingConfig,
    GradientSpikeMonitorConfig,
    LogMetrics,
    ModelCheckpointConfig,
    RunContext,
    ThroughputMonitorConfig,
)
from jax_trainer.callbacks.callback import Callback
from jax_trainer.checkpoint.record import CheckpointError, read_saved, write_manifest
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.runs import History, loop_state_of
from jax_trainer.runs.callback_list import CallbackList
from jax_trainer.runs.target import check_data_state, resumable
from jax_trainer.testing import cross_entropy, fault, numbered_data
from tests.rows import noted_row

CONFIGS = {
    "EarlyStopping": EarlyStoppingConfig(monitor="val/loss", mode="min"),
    "GradientSpikeMonitor": GradientSpikeMonitorConfig(),
    "ThroughputMonitor": ThroughputMonitorConfig(),
    "ModelCheckpoint": ModelCheckpointConfig(every_n_steps=3),
}
NAN = {"$": "float", "bits": "7ff8000000000000"}
WRONG: list[Any] = ["text", -7, None, [], {}, NAN, True, [["a"]]]
MISSING = object()
# what may be anything: numbers of a run's past, which are only shown, versions, a position that a loader knows, and the
# index of small arrays, which is compared with the arrays
FREE = ("metrics", "versions", "data_state", "small")


class Outline(Callback):
    """Keeps the shapes of the state."""

    def on_training_start(self) -> None:
        self.shapes = jax.eval_shape(lambda: self.state)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, TrainState]:
    """The checkpoints of a run that failed in the middle of its second epoch, and a state like theirs."""
    folder, outline = tmp_path_factory.mktemp("run"), Outline()
    data = numbered_data(64)
    arrays = data["x"], data["y"]
    with fault("step:raise:6"), pytest.raises(FaultInjected):
        fit(
            nn.Dense(4, kernel_init=nn.initializers.zeros),
            arrays,
            arrays,
            loss_fn=cross_entropy,
            optimizer=optax.adam(1e-2),
            num_epochs=3,
            batch_size=16,
            log_dir=folder,
            callbacks={**CONFIGS, "Outline": outline},
            tensorboard=False,
            progress=False,
        )
    [checkpoints] = folder.rglob("checkpoints")
    return checkpoints, outline.shapes


@pytest.fixture
def damaged(run, tmp_path):
    """The record of the latest checkpoint, and a function that changes it: gives the folder, and who resumes."""
    checkpoints, _ = run
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoints, folder)
    logger, store = Logger(LoggerConfig(), tmp_path), CheckpointStore(folder)
    latest = max(folder.iterdir())
    file = latest / "checkpoint.json"

    def watching() -> CallbackList:
        callbacks: dict[str, Any] = {}
        records: dict[str, Any] = {"run/log/0": LogMetrics(logger, 50), "run/history": History()}
        everybody = CallbackList(callbacks, records)
        described = RunContext(tmp_path, logger, checkpoints=store, callback_states=everybody.states)
        callbacks |= {name: config.instantiate(Callback, described) for name, config in CONFIGS.items()}
        return everybody

    def change(content: Any) -> tuple[CheckpointStore, Path, CallbackList]:
        file.write_text(json.dumps(content))
        write_manifest(latest)
        return store, latest, watching()

    yield json.loads(file.read_text()), change
    logger.close("completed")


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is said in a record, down to every number; of metrics, one of each mode."""
    if path:
        yield path
    if ".".join(map(str, path)) in FREE:
        return
    if isinstance(content, dict):
        seen = set()
        for key in content:
            mode = str(content[key])[:40] if path[-1:] in (("metrics_state",), ("window",)) else key
            if mode not in seen:
                yield from places(content[key], (*path, key))
            seen.add(mode)
    if isinstance(content, list):
        for index in range(len(content)):
            yield from places(content[index], (*path, index))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    content = copy.deepcopy(content)
    inner = at(content, path[:-1])
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def may_be(path: tuple[Any, ...], there: Any, value: Any) -> bool:
    """Whether a record may say `value` as well: another number, or what is unknown."""
    name = ".".join(map(str, path))
    is_number = type(there) in (int, float)
    if name.startswith(FREE) or (value is MISSING and name in ("callbacks", "run", "run.record", "run.devices")):
        return True
    if value is MISSING and (
        (path[0] == "callbacks" and len(path) == 2) or path[-2:-1] in (("metrics_state",), ("window",))
    ):
        return True  # nothing is known of a callback, or of a metric, that was added later
    if value is None and name in (
        "callbacks.EarlyStopping.best",
        "run.record",
        "run.loop.evaluated_step",
        "run.loop.batch_size",
    ):
        return True
    if value is MISSING and path[-2:-1] == ("windows",):
        return True  # one of several
    return type(value) is type(there) or (is_number and value in (-7, NAN, True))


def problem_in(folder: Path, content: Any, watching: CallbackList) -> str:
    (folder / "checkpoint.json").write_text(json.dumps(content))
    try:
        saved, _ = read_saved(folder)
        loop_state_of(saved)
        watching.load_states(saved)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_record_as_it_was_written_is_resumed_from(damaged):
    content, change = damaged
    _, folder, watching = change(content)
    assert problem_in(folder, content, watching) == ""


def test_a_record_that_says_what_cannot_be_is_damage_wherever_that_is(damaged):
    content, change = damaged
    (_, folder, watching), tried, silent = change(content), 0, []
    for place in (place for place in places(content) if place != ("format",)):  # of another version: refused
        for value in [*WRONG, MISSING]:
            problem = problem_in(folder, changed(content, place, value), watching)
            tried += 1
            if not problem and not may_be(place, at(content, place), value):
                silent.append(f"{'.'.join(map(str, place))} = {value!r}")
            assert not problem or str(folder) in problem
    assert tried > 300
    assert not silent, "\n".join(silent)


DAMAGES: dict[str, tuple[tuple[str, ...], Any]] = {
    "a loop state of another type": (("run", "loop"), [1]),
    "seconds that are no number": (("run", "loop", "seconds"), NAN),
    "a step below zero": (("run", "loop", "evaluated_step"), -1),
    "a size as text": (("run", "record"), "776"),
    "a callback's state of another type": (("callbacks", "EarlyStopping"), [0.5]),
    "a callback's number as text": (("callbacks", "EarlyStopping", "waited"), "2"),
    "a key that is gone": (("run", "loop", "has_ended"), MISSING),
}


def test_the_checkpoint_before_a_damaged_record_is_restored_with_a_warning(damaged, run, caplog):
    content, change = damaged
    for what, (place, value) in DAMAGES.items():
        caplog.clear()
        with noted_row(what):
            store, path, watching = change(changed(content, place, value))
            _, saved = resumable(store, "latest", run[1], watching.load_states)
            assert saved.path == min(path.parent.iterdir())
            assert f"Restoring {saved.path}" in caplog.text and f"{path} is damaged: " in caplog.text
            with pytest.raises(CheckpointError, match=f"{path}.*{place[1]}"):
                resumable(store, path, run[1], watching.load_states)


def test_a_state_that_the_data_cannot_have_given_is_damage(damaged, run, caplog):
    content, change = damaged
    store, path, _ = change(changed(content, ("data_state",), "text"))
    _, saved = resumable(store, "latest", run[1], lambda saved: check_data_state(saved, [np.zeros(2)]))
    assert saved.path == min(path.parent.iterdir())
    assert f"{path}" in caplog.text
