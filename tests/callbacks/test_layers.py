"""NormMonitor and HistogramMonitor: one line each in a file and in Python, and where their data arrive."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer import FunctionModel
from jax_trainer import fit as fit_model
from jax_trainer.callbacks import HistogramMonitor, LogMetrics, NormMonitor
from jax_trainer.callbacks.monitor import sampled
from jax_trainer.engine import Every, Plan
from jax_trainer.testing import cross_entropy, numbered_data
from jax_trainer.tools.reports import RunRecord, read_run
from tests.callbacks.callback_runs import EXAMPLE, STEPS, fit, matrix_program, rows, run_in
from tests.logger.event_files import values_in
from tests.tools.cli.cli_runs import QUICK, run_command, tiny_file

KINDS = ("param_norm", "grad_norm", "update_norm")


def names(record: RunRecord, kind: str) -> set[str]:
    """The layers whose norms a run has logged, by step and by epoch."""
    found = {name.partition("/")[2] for name in record.curves if name.startswith(f"{kind}/")}
    layers = {name.removesuffix("_epoch") for name in found if name.endswith("_epoch")}
    assert found == {*(f"{one}_epoch" for one in layers), *(f"{one}_step" for one in layers)}
    return layers


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layers")
    monitors = "    NormMonitor: {}\n    HistogramMonitor: {every_n_steps: 3}\n"
    logger = "  logger: {log_steps_every: 2, tool_config: {class_name: TensorboardToolLogger}}\n"
    text = QUICK.replace("model:\n", f"{monitors}{logger}model:\n", 1)
    result = run_command("train", tiny_file(folder, text), "--json", folder=folder)
    assert result.code == 0, result.err
    return Path(result.data["run"])


def test_a_line_in_a_file_logs_norms_and_histograms(from_file: Path):
    record = read_run(from_file)
    layers = [names(record, kind) for kind in KINDS]
    assert layers[0] == layers[1] == layers[2] and len(layers[0]) == 2
    arrays = {f"{layer}.{name}" for layer in layers[0] for name in ("kernel", "bias")}
    assert {*record.histograms} == {f"{kind}_histogram/{array}" for kind in ("param", "grad") for array in arrays}


def test_tensorboard_shows_them(from_file: Path):
    kinds = {tag: values[0][1].WhichOneof("value") for tag, values in values_in(from_file).items()}
    histograms = {tag for tag, kind in kinds.items() if kind in ("histo", "tensor") and "_histogram/" in tag}
    assert len(histograms) == 8
    assert sum(tag.startswith(KINDS) and kind == "simple_value" for tag, kind in kinds.items()) == 12


@pytest.mark.slow
def test_a_line_in_python_logs_the_same(tmp_path: Path):
    data = numbered_data(64)
    monitors = [NormMonitor(), HistogramMonitor(grads=False)]
    options: dict[str, Any] = {"optimizer": optax.sgd(0.1), "num_epochs": 2, "batch_size": 32, "log_dir": tmp_path}
    options |= {"progress": False, "tensorboard": False, "save": False}
    model, loss = linear_model(), lambda logits, labels: cross_entropy(logits, labels).mean()
    result = fit_model(model, (data["x"], data["y"]), loss_fn=loss, callbacks=monitors, **options)
    record = read_run(result.folder)
    assert {*record.histograms} == {"param_histogram/kernel", "param_histogram/bias"}
    assert all(f"{kind}/kernel_epoch" in record.curves for kind in KINDS)


def linear_model() -> Any:
    def init(key: jax.Array, x: Any) -> Any:
        return {"kernel": 0.1 * jax.random.normal(key, (x.shape[-1], 4)), "bias": jax.numpy.zeros(4)}

    return FunctionModel(init, lambda params, x: x @ params["kernel"] + params["bias"])


def histograms(run: Any, kind: str) -> list[int]:
    """The steps of the histograms of one array."""
    found = [row for row in rows(run) if f"{kind}_histogram/kernel" in row.get("histograms", {})]
    return [row["step"] for row in found]


def test_histograms_are_drawn_when_they_are_due(tmp_path):
    for number, (config, params, grads) in enumerate(
        [
            ({}, [4, 8, 12], [0, 4, 8]),
            ({"every_n_epochs": 2}, [8], [4]),
            ({"every_n_epochs": 0, "every_n_steps": 5}, [5, 10], [0, 5, 10]),
            ({"every_n_epochs": 2, "every_n_steps": 4}, [4, 8, 12], [0, 4, 8]),
            ({"grads": False}, [4, 8, 12], []),
            ({"params": False, "every_n_epochs": -1}, [], [0, 4, 8]),
        ]
    ):
        for steps_per_call in (1, STEPS):
            callback = HistogramMonitor(**config)
            with run_in(tmp_path / f"{number}-{steps_per_call}") as run:
                callback.attach(run)
                fit(callback, plan=Plan(max_epochs=3, steps_per_call=steps_per_call))
                assert (histograms(run, "param"), histograms(run, "grad")) == (params, grads), config


def test_a_histogram_counts_the_values_of_the_array(tmp_path):
    callback = HistogramMonitor(grads=False)
    with run_in(tmp_path) as run:
        callback.attach(run)
        state = fit(callback, plan=Plan(max_epochs=1))
        [row] = [row["histograms"] for row in rows(run) if "param_histogram/kernel" in row.get("histograms", {})]
    found, kernel = row["param_histogram/kernel"], np.asarray(state.params["kernel"])
    assert sum(found["counts"]) == kernel.size
    assert [found["edges"][0], found["edges"][-1]] == pytest.approx([kernel.min(), kernel.max()])


@given(shape=st.lists(st.integers(1, 12), min_size=0, max_size=4), most=st.integers(1, 300))
def test_a_sample_has_about_as_many_values_and_is_evenly_spaced(shape, most):
    array = np.arange(int(np.prod(shape))).reshape(shape)
    found = sampled(array, most)  # type: ignore[arg-type]
    assert found.ndim == array.ndim and np.isin(found, array).all()
    if array.size <= most:
        assert found.size == array.size
    else:
        assert most / 2 <= found.size * 2 ** (array.ndim - 1) and found.size <= 2 * most


def test_norms_arrive_as_step_metrics(tmp_path):
    with run_in(tmp_path) as run:
        log = LogMetrics(run.logger, every_n_steps=2, closes=False)
        fit(log, NormMonitor(run=run), program=matrix_program(), plan=Plan(max_steps=4, eval_every=Every(steps=4)))
        layer = next(iter(matrix_program().init(jax.random.key(0), EXAMPLE).params))
        logged = [row for row in rows(run) if f"update_norm/{layer}_step" in row]
    assert [row["step"] for row in logged] == [2, 4]
    assert all(0 < row[f"update_norm/{layer}_step"] < row[f"param_norm/{layer}_step"] for row in logged)
