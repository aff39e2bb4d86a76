import gzip
import json
import logging

import jax
import pytest

from jax_trainer.callbacks import JAXProfiler, JAXProfilerConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.engine import Plan
from jax_trainer.testing import fault
from tests.callbacks.callback_runs import fit


def traces(folder) -> list:
    return sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))


def profiled(folder_run, steps: int, **options) -> None:
    fit(JAXProfiler(JAXProfilerConfig(**options), folder_run), plan=Plan(max_steps=steps))


def test_some_steps_are_traced_into_the_runs_folder(folder_run):
    profiled(folder_run, 6, first_step=2, profile_n_steps=3)
    (trace,) = traces(folder_run.folder)
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("step" in name for name in names)


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_ends_with_the_run(folder_run, fails):
    if fails:
        with fault("step:raise:4"), pytest.raises(Exception, match="step"):
            profiled(folder_run, 6, first_step=2, profile_n_steps=100)
    else:
        profiled(folder_run, 4, first_step=2, profile_n_steps=100)
    assert len(traces(folder_run.folder)) == 1
    jax.profiler.start_trace(folder_run.folder)  # would raise if one were still running
    jax.profiler.stop_trace()


def test_a_short_run_is_not_traced(folder_run):
    profiled(folder_run, 4)
    assert not traces(folder_run.folder)


def test_traces_recur_after_so_many_minutes(folder_run, monkeypatch):
    began = []
    monkeypatch.setattr(jax.profiler, "start_trace", began.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    profiled(folder_run, 8, first_step=1, profile_n_steps=1, every_n_minutes=1e-9)
    assert len(began) == 4
    profiled(folder_run, 8, first_step=1, profile_n_steps=1, every_n_minutes=-1)
    assert len(began) == 5


def test_another_trace_costs_a_warning_and_not_the_run(folder_run, tmp_path, caplog):
    with jax.profiler.trace(tmp_path / "mine"), caplog.at_level(logging.WARNING, "jax_trainer"):
        profiled(folder_run, 8, first_step=1, profile_n_steps=1, every_n_minutes=1e-9)
    [record] = caplog.records
    assert "JAXProfiler" in record.message


def test_a_trace_of_no_steps_is_refused():
    with pytest.raises(SettingsError, match="`profile_n_steps`.* 1.* got 0"):
        JAXProfilerConfig(profile_n_steps=0)
