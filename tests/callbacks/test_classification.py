import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compoconf import parse_config

from jax_trainer.callbacks import Callback, ConfusionMatrixCallback, ConfusionMatrixConfig, RunContext
from jax_trainer.engine import Every, Plan
from jax_trainer.testing import numbered_data, numbered_loader
from jax_trainer.testing.models import CLASSES
from tests.callbacks.callback_runs import evaluated, fit, matrix_program, run_in

MATRIX = np.array([[3.0, 1.0, 0.0], [0.0, 0.0, 0.0], [2.0, 0.0, 2.0]])  # no example of class 1


class Gallery:
    """A logger that keeps figures."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, Any, int]] = []

    def log_figure(self, name: str, figure: Any, step: int) -> None:
        self.shown.append((name, figure, step))


def run_of(folder_run, **options: Any) -> RunContext:
    return replace(folder_run, logger=Gallery(), **options)


def drawn(folder_run, matrix: np.ndarray = MATRIX, *, dataset: Any = None, **options: Any) -> Any:
    run = run_of(folder_run)
    callback = ConfusionMatrixCallback(ConfusionMatrixConfig(**options), run)
    if dataset is not None:
        callback.attach(replace(run, dataset=dataset))
    evaluated(callback, {"conf_matrix": matrix}, step=4)
    ((_, figure, _),) = run.logger.shown  # type: ignore[attr-defined]
    return figure


def cells(figure: Any) -> list[list[str]]:
    texts = [text.get_text() for text in figure.axes[0].texts]
    size = round(len(texts) ** 0.5)
    return [texts[row * size : (row + 1) * size] for row in range(size)]


def test_shares_are_those_of_each_true_class_and_an_empty_class_has_none(folder_run):
    figure = drawn(folder_run)
    assert cells(figure) == [["75.00%", "25.00%", "0.00%"], ["0.00%"] * 3, ["50.00%", "0.00%", "50.00%"]]
    np.testing.assert_allclose(figure.axes[0].images[0].get_array()[0], [0.75, 0.25, 0])
    assert (figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()) == ("true class", "predicted class")


def test_counts_are_integers(folder_run):
    assert cells(drawn(folder_run, normalize=False)) == [["3", "1", "0"], ["0"] * 3, ["2", "0", "2"]]
    assert cells(drawn(folder_run, normalize=False, format="03d"))[0] == ["003", "001", "000"]


@pytest.mark.parametrize("spelling", ["figsize", "fig_size"])
def test_size_and_colours_are_as_configured(folder_run, spelling):
    size: dict[str, Any] = {spelling: (4, 3)}
    figure = drawn(folder_run, dpi=50, cmap="Reds", format=".1f", **size)
    assert (*figure.get_size_inches(), figure.dpi) == (4, 3, 50)
    assert figure.axes[0].images[0].get_cmap().name == "Reds"
    assert cells(figure)[0] == ["0.8", "0.2", "0.0"]


@pytest.mark.parametrize(
    "dataset",
    [
        SimpleNamespace(metadata={"class_names": ["cat", "dog", "owl"]}),
        SimpleNamespace(metadata={}, class_names=("cat", "dog", "owl")),
        SimpleNamespace(classes=["cat", "dog", "owl"]),
    ],
)
def test_the_dataset_names_the_classes(folder_run, dataset):
    axes = drawn(folder_run, dataset=dataset).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "owl"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog", "owl"]


def test_names_of_other_classes_are_not_used(folder_run):
    axes = drawn(folder_run, dataset=SimpleNamespace(classes=["cat", "dog"])).axes[0]
    assert "cat" not in [label.get_text() for label in axes.get_yticklabels()]


def test_many_classes_are_drawn_without_numbers(folder_run):
    assert not list(drawn(folder_run, np.eye(100)).axes[0].texts)


def test_validations_and_tests_are_drawn_by_their_names(folder_run):
    run = run_of(folder_run)
    callback = ConfusionMatrixCallback(ConfusionMatrixConfig(every_n_epochs=2), run)
    for epoch in (1, 2):
        evaluated(callback, {"conf_matrix": MATRIX}, step=epoch, epoch=epoch, name="val_near")
    evaluated(callback, {"conf_matrix": MATRIX}, step=3, epoch=3, name="test")
    shown = [(name, step) for name, _, step in run.logger.shown]  # type: ignore[attr-defined]
    assert shown == [("val_near/confusion_matrix", 2), ("test/confusion_matrix", 3)]


def test_a_run_draws_what_it_evaluated(tmp_path):
    labels = numbered_data(64)["y"]
    with run_in(tmp_path) as run:
        gallery = Gallery()
        callback = ConfusionMatrixCallback(ConfusionMatrixConfig(normalize=False), replace(run, logger=gallery))
        plan = Plan(max_epochs=2, eval_every=Every(epochs=1))
        fit(callback, program=matrix_program(), plan=plan, evals={"val": numbered_loader(64)})
    assert [(name, step) for name, _, step in gallery.shown] == [
        ("val/confusion_matrix", 4),
        ("val/confusion_matrix", 8),
    ]
    counts = np.array(cells(gallery.shown[-1][1]), int)
    assert counts.sum(axis=1).tolist() == np.bincount(labels, minlength=CLASSES).tolist()


def test_a_run_without_the_metric_is_an_error_that_says_what_to_report(folder_run):
    callback = ConfusionMatrixCallback(run=run_of(folder_run))
    with pytest.raises(ValueError, match="'conf_matrix'.*val/acc, val/loss"):
        evaluated(callback, {"loss": 1.0, "acc": 0.5}, step=4)
    with pytest.raises(ValueError, match=r"'val/conf_matrix'.*\[classes, classes\].*\[2, 3\]"):
        evaluated(callback, {"conf_matrix": np.zeros((2, 3))}, step=4)


def test_without_matplotlib_there_is_one_warning_and_the_run_continues(folder_run, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = run_of(folder_run)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        callback = ConfusionMatrixCallback(run=run)
        for step in (1, 2):
            evaluated(callback, {"conf_matrix": MATRIX}, step=step)
    assert run.logger.shown == []  # type: ignore[attr-defined]
    (record,) = caplog.records
    assert "draws no figures" in record.message


def test_mistakes_show_before_training(folder_run):
    with pytest.raises(ValueError, match="Bluess"):
        ConfusionMatrixCallback(ConfusionMatrixConfig(cmap="Bluess"), folder_run)
    with pytest.raises(ValueError, match="format code 'd'"):
        ConfusionMatrixCallback(ConfusionMatrixConfig(format="d"), folder_run)


def test_the_section_of_the_seed_document_is_read():
    section = {"normalize": True, "cmap": "Blues", "figsize": [8, 8], "dpi": 100, "every_n_epochs": 1}
    config: Any = parse_config(Callback.cfgtype, {"class_name": "ConfusionMatrixCallback", **section})
    assert (config.figsize, config.cmap, config.format) == ((8, 8), "Blues", None)
