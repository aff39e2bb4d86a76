import logging
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jax_trainer.callbacks import ModelSummary, ModelSummaryConfig
from jax_trainer.engine import Plan
from jax_trainer.testing.models import CLASSES, FEATURES, HIDDEN
from tests.callbacks.callback_runs import STEPS, fit, program_of, rows

NUMBER = FEATURES * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * CLASSES + CLASSES
NOTHING = Plan(max_steps=0)


@pytest.mark.parametrize("flavour", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_the_parameters_are_listed_and_counted(folder_run, flavour):
    fit(ModelSummary(run=folder_run), plan=NOTHING, flavour=flavour)
    lines = (folder_run.folder / "params.txt").read_text().splitlines()
    assert len(lines) == 6 + 2
    (kernel,) = [line.split("  ") for line in lines if line.startswith("hidden.kernel")]
    assert [word.strip() for word in kernel if word.strip()][1:] == ["[8, 16]", "float32", "128"]
    assert lines[-1].split() == ["total", str(NUMBER)]
    assert rows(folder_run) == [{"step": 0, "param/num_model_params": NUMBER}]
    assert (folder_run.folder / "model.txt").read_text() == (folder_run.folder / "params.txt").read_text()


def test_a_trainer_makes_the_table_of_layers(folder_run, capsys):
    trainer = SimpleNamespace(tabulate=lambda: "layers [bold]as they are[/bold]\n")
    fit(ModelSummary(ModelSummaryConfig(show=True), replace(folder_run, trainer=trainer)), plan=NOTHING)
    assert (folder_run.folder / "model.txt").read_text() == "layers [bold]as they are[/bold]\n"
    assert (folder_run.folder / "params.txt").read_text().startswith("parameter")
    assert capsys.readouterr().err == "layers [bold]as they are[/bold]\n"


def test_a_summary_is_printed_on_request_only(folder_run, capsys):
    fit(ModelSummary(run=folder_run), plan=NOTHING)
    assert capsys.readouterr() == ("", "")


def test_a_table_that_cannot_be_made_does_not_cost_the_run(folder_run, caplog):
    def tabulate() -> str:
        raise RuntimeError("no shapes")

    with caplog.at_level(logging.WARNING, "jax_trainer"):
        fit(ModelSummary(run=replace(folder_run, trainer=SimpleNamespace(tabulate=tabulate))), plan=NOTHING)
    assert "ModelSummary" in caplog.text and "RuntimeError: no shapes" in caplog.text
    assert (folder_run.folder / "model.txt").read_text().startswith("parameter")


@pytest.mark.parametrize("step", [0, STEPS])
def test_a_resumed_run_logs_nothing_again(folder_run, step):
    state = program_of("functions").init(jax.random.key(0), {"x": jax.numpy.zeros((32, FEATURES))})
    state = state.replace(step=jax.numpy.asarray(step, state.step.dtype))
    fit(ModelSummary(run=folder_run), plan=Plan(max_steps=step), state=state)
    assert len(rows(folder_run)) == (step == 0)
