import os
import subprocess
import sys
import time
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pytest

from jax_trainer.tools.tuning import storage
from jax_trainer.tools.tuning.storage import beating, is_alive, is_running, own_note


class Notes:
    """A trial that remembers what is noted at it."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Any]] = []

    def set_user_attr(self, key: str, value: Any) -> None:
        self.notes.append((key, value))


def test_this_process_is_alive():
    assert is_alive(own_note())


def test_a_process_that_has_ended_is_not():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    note = {**own_note(), "pid": process.pid}
    assert is_alive(note)
    process.kill()
    process.communicate()
    assert not is_alive(note)


def test_another_process_with_the_same_number_is_another_one(subtests):
    for change in [{"beat": time.time() - storage.PATIENCE - 1}, {"pid": 2**30}]:
        with subtests.test(change=change):
            assert not is_alive({**own_note(), **change})


def test_of_another_machine_only_the_beat_is_known():
    elsewhere = {**own_note(), "machine": "elsewhere", "pid": 2**30}
    assert is_alive(elsewhere)
    assert is_alive({**elsewhere, "beat": time.time() - storage.PATIENCE + 60})
    assert not is_alive({**elsewhere, "beat": time.time() - storage.PATIENCE - 1})


def test_the_restart_of_a_worker_on_another_machine_knows_that_the_first_start_is_dead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(storage.WORKER, "7_3")
    before = {**own_note(), "machine": "elsewhere"}
    assert is_alive(own_note())
    assert not is_alive(before)
    monkeypatch.setenv(storage.WORKER, "7_4")
    assert is_alive(before)
    monkeypatch.delenv(storage.WORKER)
    assert is_alive({**before, "worker": ""})


def test_a_note_that_is_none_of_ours_is_no_sign_of_life(subtests):
    for note in [None, "text", {}, {"pid": "x"}, {"pid": 1, "machine": 2}, {"pid": 10**30}]:
        with subtests.test(note=note):
            assert not is_alive(note)


def test_a_trial_that_has_just_started_needs_no_note():
    class Begun:
        user_attrs: ClassVar[dict[str, Any]] = {}
        datetime_start: datetime | None = datetime.now()

    trial = Begun()
    assert is_running(trial)
    trial.datetime_start = datetime.now() - timedelta(minutes=1)
    assert not is_running(trial)
    trial.datetime_start = None
    assert not is_running(trial)


def test_a_trial_is_noted_at_once_and_then_again_until_it_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "BEAT_EVERY", 0.01)
    trial = Notes()
    with beating(trial):
        assert [key for key, _ in trial.notes][:1] == ["process"]
        end = time.monotonic() + 10
        while len(trial.notes) < 3 and time.monotonic() < end:
            time.sleep(0.01)
    count = len(trial.notes)
    assert count >= 3
    assert trial.notes[0][1]["pid"] == os.getpid()
    assert trial.notes[0][1]["beat"] < trial.notes[2][1]["beat"]
    time.sleep(0.05)
    assert len(trial.notes) == count
