"""Which run is continued, the same in every style: what is the same, what is only longer, and what is another run."""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import ArrayLoader, TrainState
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.runs import OtherRunError
from jax_trainer.styles import fit
from jax_trainer.testing import assert_same_bits, fault
from jax_trainer.tools.reports.record import read_settings
from tests.styles import style_runs
from tests.styles.style_runs import SAVE, STEPS, STYLES, TOTAL, Style, arrays, cross_entropy, train_data

NAMES = ("TrainerModule, linen", "fit, nnx", "train_fn", "TrainLoop")
HAVE_FOLDERS = NAMES[:2]  # whose `resume="auto"` may start a new run; the others resume what is in their folder
EVERY = pytest.mark.parametrize("name", NAMES)


class Ones(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3, kernel_init=nn.initializers.ones)(x)


class LinenLine(nn.Module):
    """A class of the same name with another `__call__`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * nn.Dense(3, kernel_init=nn.initializers.zeros)(x)


class Linear(nnx.Linear):
    def __call__(self, inputs: jax.Array, *more: Any, **options: Any) -> jax.Array:
        return 2 * super().__call__(inputs, *more, **options)


class Named(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3, kernel_init=nn.initializers.zeros, name="named")(x)


class Around(nnx.Module):
    def __init__(self) -> None:
        self.layer = zeros(nnx.Linear)

    def __call__(self, inputs: jax.Array, *more: Any, **options: Any) -> jax.Array:
        return self.layer(inputs)


def flavoured(linen: Callable[[], Any], made: Callable[[], Any]) -> Callable[[Style], Any]:
    return lambda style: linen() if style.flavour == "linen" else made()


def zeros(kind: type[nnx.Linear], fill: Any = nnx.initializers.zeros) -> nnx.Linear:
    return kind(6, 3, kernel_init=fill, rngs=nnx.Rngs(0))


def printing(logits: jax.Array, labels: jax.Array) -> jax.Array:
    jax.debug.print("{}", logits.mean())
    return cross_entropy(logits, labels)


def flipped() -> ArrayLoader:
    x, y = arrays(16 * STEPS)
    return ArrayLoader((x, 2 - y), 16, shuffle=True, seed=3)


class Case(NamedTuple):
    """A change of the training, and the part that differs by it, with what the message says; "": it is the same."""

    part: str = ""
    says: str = ""
    changes: Mapping[str, Any] = MappingProxyType({})  # methods of the style
    options: Mapping[str, Any] = MappingProxyType({})  # arguments of the style
    data: Callable[[], Any] = train_data
    seed: int = style_runs.SEED


CASES = {
    "nothing": Case(),
    "logging": Case(options={"options": {"log_param_stats": True, "param_log_modes": ("mean",)}}),
    "prints": Case(options={"loss": printing}),
    "learning rate": Case("optimizer", r"0\.1 → 0\.001", {"optimizer": lambda style: optax.sgd(0.001, 0.9)}),
    "another optimizer": Case("optimizer", r"sgd → adam", {"optimizer": lambda style: optax.adam(0.1)}),
    "a constant in the loss": Case(
        "program", r"of \d+ equations|loss", options={"loss": lambda logits, labels: 2 * cross_entropy(logits, labels)}
    ),
    "a class of the same name": Case(
        "program", r"equations, first at `__call__`", {"model": flavoured(LinenLine, lambda: zeros(Linear))}
    ),
    "names of parameters": Case(
        "program", r"parameters: \w+.*bias|Linear → Around", {"model": flavoured(Named, lambda: Around())}
    ),
    "names in the optimizer's state": Case(
        "optimizer", "", {"optimizer": lambda style: optax.chain(optax.identity(), optax.sgd(0.1, 0.9))}
    ),
    "precision": Case("program", "precision: none → bf16", options={"options": {"precision": "bf16"}}),
    "guard": Case("program", "on_nonfinite: none → skip. ", options={"options": {"on_nonfinite": "skip"}}),
    "initial weights": Case(
        "start", "weights", {"model": flavoured(Ones, lambda: zeros(nnx.Linear, nnx.initializers.ones))}
    ),
    "seed": Case("start", r"seed: 5 → 7|random key", seed=7),
    "labels": Case("data", "other labels", data=flipped),
    "order": Case("data", r"seed: 3 → 4", data=lambda: ArrayLoader(arrays(16 * STEPS), 16, shuffle=True, seed=4)),
}


def styled(name: str, folder: Path, case: Case = CASES["nothing"], **options: Any) -> Style:
    base = {"optimizer": lambda style: optax.sgd(0.1, 0.9)}
    kind = type(STYLES[name].__name__, (STYLES[name],), {**base, **case.changes})
    return kind(folder, **{"linear": True, **case.options, **options})


NOT_ASKED = {  # because it is an error already, or cannot differ
    ("train_fn", "initial weights"),  # its model has the weights of the checkpoint
    *((style, "another optimizer") for style in ("train_fn", "TrainLoop")),  # whose state the checkpoint lacks
    *((style, "names in the optimizer's state") for style in ("train_fn", "TrainLoop")),
    ("TrainLoop", "guard"),  # the checkpoint lacks its counter
    *((style, "names of parameters") for style in ("train_fn", "TrainLoop")),  # the checkpoint has other names
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A copy of the folder of a complete training, by style; done once for each."""

    @cache
    def kept(name: str) -> Path:
        folder = tmp_path_factory.mktemp("kept")
        styled(name, folder / "run").train()
        return folder / "run"

    def folder(name: str, to: Path) -> Path:
        return shutil.copytree(kept(name), to / "run")

    return folder


def runs_in(folder: Path) -> list[Path]:
    return sorted({file.parent for file in folder.rglob("run.json")})


def trained(name: str, folder: Path, case: Case, monkeypatch: Any, **options: Any) -> Any:
    monkeypatch.setattr(style_runs, "SEED", case.seed)
    allow = options.pop("allow", ())
    return styled(name, folder, case, **options).train(case.data(), resume=True, allow=allow)


@EVERY
def test_the_same_is_returned_with_a_line(name, finished, tmp_path, monkeypatch, caplog, subtests):
    for case in [one for one, case in CASES.items() if not case.part]:
        caplog.clear()
        with subtests.test(case=case):
            folder = finished(name, tmp_path / case)
            # the others compare when they train on
            longer = {} if name in HAVE_FOLDERS else {"epochs": 3, "total": 3 * STEPS}
            trained(name, folder, CASES[case], monkeypatch, **longer)
            assert len(runs_in(folder)) == 1
            if name in HAVE_FOLDERS:
                assert f"complete, at step {TOTAL}" in caplog.text


@EVERY
def test_what_is_only_longer_continues(name, finished, tmp_path, monkeypatch, caplog):
    folder = finished(name, tmp_path)
    longer = trained(name, folder, CASES["nothing"], monkeypatch, epochs=3, total=3 * STEPS)
    assert len(runs_in(folder)) == 1
    at_once = styled(name, tmp_path / "at once", epochs=3, total=3 * STEPS).train()
    assert_same_bits(longer.params, at_once.params)
    if name in HAVE_FOLDERS:
        assert "epochs: 2 → 3" in caplog.text


@EVERY
def test_what_computes_something_else_is_another_run(name, finished, tmp_path, monkeypatch, caplog, subtests):
    asked = [one for one, case in CASES.items() if case.part and (name, one) not in NOT_ASKED]
    for case in asked:
        caplog.clear()
        with subtests.test(case=case):
            check_another_run(name, case, finished, tmp_path / case.replace("'", ""), monkeypatch, caplog)


def check_another_run(name: str, case: str, finished: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    folder, found = finished(name, tmp_path), CASES[case]
    [before] = runs_in(folder)
    longer = {"epochs": 3, "total": 3 * STEPS}
    if name in HAVE_FOLDERS:
        trained(name, folder, found, monkeypatch)
        assert len(runs_in(folder)) == 2
        [line] = [record.getMessage() for record in caplog.records if before.name in record.getMessage()]
    else:
        with pytest.raises(OtherRunError) as error:
            trained(name, folder, found, monkeypatch, **longer)
        line = str(error.value)
        assert "resume" not in line  # they have no such argument
    words = found.says or found.part
    assert re.search(words, line) and f"allow_changes={found.part}" in line
    if case in ("names of parameters", "guard"):
        return  # which cannot be continued with
    shutil.rmtree(folder)
    shutil.copytree(finished(name, tmp_path / "again"), folder)
    allowed = (found.part, "optimizer") if found.part == "program" else (found.part,)
    trained(name, folder, found, monkeypatch, allow=allowed, **longer)
    [run] = runs_in(folder)
    record = json.loads((run / "run.json").read_text())
    recorded = record["allowed"] if "allowed" in record else record["starts"][-1]["allowed"]
    assert found.part in [part for part, _ in recorded]
    caplog.clear()
    trained(name, folder, found, monkeypatch, **longer)  # which is the same now
    assert len(runs_in(folder)) == 1


@pytest.mark.parametrize("name", [*HAVE_FOLDERS, "TrainLoop"])
def test_schedules_of_two_lengths_are_told_by_the_same_steps(name, tmp_path, monkeypatch, caplog):
    def over(steps: int) -> Case:
        return Case(changes={"optimizer": lambda style: optax.sgd(optax.linear_schedule(0.1, 0.0, steps), 0.9)})

    styled(name, tmp_path, over(8)).train()
    try:
        trained(name, tmp_path, over(16), monkeypatch, epochs=3, total=3 * STEPS)
        said = caplog.text
    except OtherRunError as error:
        said = str(error)
    assert "step 4: 0.05 → 0.075, optimizer.learning_rate.step 8: 0 → 0.05." in said


@EVERY
def test_a_learning_rate_that_the_state_of_the_optimizer_has_is_compared(name, tmp_path, monkeypatch, caplog):
    def injected(rate: float) -> Case:
        made = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
        return Case(changes={"optimizer": lambda style: made})

    longer = {"epochs": 3, "total": 3 * STEPS}
    styled(name, tmp_path, injected(0.1)).train()
    if name in HAVE_FOLDERS:
        trained(name, tmp_path, injected(0.001), monkeypatch, **longer)
        assert len(runs_in(tmp_path)) == 2 and "0.1 → 0.001" in caplog.text
    else:
        with pytest.raises(OtherRunError, match="0.1 → 0.001"):
            trained(name, tmp_path, injected(0.001), monkeypatch, **longer)
    trained(name, tmp_path, injected(0.1), monkeypatch, **longer)
    assert len(runs_in(tmp_path)) == 1 + (name in HAVE_FOLDERS)


def test_a_lambda_is_named_by_its_run(tmp_path):
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(batch[0] @ params["w"], batch[1])

    state = TrainState.create(apply_fn=lambda params, x: x, params={"w": jnp.zeros((6, 3))}, tx=optax.sgd(0.1))
    options = {"num_epochs": 1, "log_dir": str(tmp_path), "log_name": "lines", "progress": False, "save": False}
    for loss, name in ((loss_fn, "loss_fn"), (lambda params, batch: loss_fn(params, batch), "lines")):
        folder = fit(state, train_data(), None, loss_fn=loss, **options).folder
        assert read_settings(folder / "config.yaml")["model"].endswith(name)


@pytest.mark.parametrize("name", HAVE_FOLDERS)
def test_a_run_that_failed_is_not_continued_with_another_learning_rate(name, tmp_path, monkeypatch, caplog):
    with fault(f"step:raise:{SAVE + 1}"), pytest.raises(FaultInjected):
        styled(name, tmp_path).train()
    trained(name, tmp_path, CASES["learning rate"], monkeypatch)
    assert len(runs_in(tmp_path)) == 2 and "0.1 → 0.001" in caplog.text
    caplog.set_level(logging.INFO, "jax_trainer")
    same = trained(name, tmp_path, CASES["nothing"], monkeypatch)
    assert len(runs_in(tmp_path)) == 2 and f"Resuming from step {SAVE + 1}" in caplog.text
    assert_same_bits(same.params, styled(name, tmp_path / "at once").train().params)


@pytest.mark.parametrize("name", HAVE_FOLDERS)
def test_nothing_is_said_of_a_first_run(name, tmp_path, monkeypatch, caplog):
    trained(name, tmp_path, CASES["nothing"], monkeypatch)
    assert not caplog.records and len(runs_in(tmp_path)) == 1


def test_equal_parts_have_equal_facts_whatever_the_style_is_called(finished, tmp_path):
    facts = [
        json.loads((runs_in(finished(name, tmp_path / name))[0] / "run.json").read_text()) for name in HAVE_FOLDERS
    ]
    linen, made = (one["fingerprint"] for one in facts)
    assert linen["data"] == made["data"] and linen["optimizer"]["equations"] == made["optimizer"]["equations"]
    assert np.shape(linen["start"]["key"]) == np.shape(made["start"]["key"])
