"""describe and schema: what can be configured, for people and for editors."""

import json
from pathlib import Path
from typing import Any

import pytest
from compoconf import Registry, registered
from jsonschema import Draft202012Validator

from jax_trainer.config.problems import Problems
from jax_trainer.config.yaml_text import parse
from tests.tools.cli.bad_yamls import WRONG_KEYS, WRONG_VALUES
from tests.tools.cli.cli_runs import ROOT, TINY, run_command

OWN_CLASSES = {"cifar10_speedrun.yaml"}  # names classes of an example
CONFIGS = [file for file in sorted((ROOT / "src/jax_trainer/configs").glob("*.yaml")) if file.name not in OWN_CLASSES]

# what only reading finds: what values mean together, patterns, and numbers that JSON does not have
NOT_IN_A_SCHEMA = {
    "values that do not go together",
    "no limit",
    "a metric whose name does not say which way it is good",
    "no regular expression",
    "a learning rate that is NaN",
    "an infinite learning rate",
    "a learning rate that no number can hold",
}


def is_ours(interface: Any, name: str) -> bool:
    return Registry.get_class(interface, name).__module__.startswith("jax_trainer.")


def shipped() -> set[str]:
    return {name for interface in registered() for name in registered(interface) if is_ours(interface, name)}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_command("describe", "--json", folder=tmp_path_factory.mktemp("describe")).data["classes"]


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_command("schema", "--json", folder=tmp_path_factory.mktemp("schema")).data


def read(text: str) -> Any:
    problems = Problems()
    data = parse(text, "file", problems).data()
    assert not problems
    return data


def test_every_shipped_class_is_described_once(described: list[dict[str, Any]]):
    names = [one["name"] for one in described]
    assert shipped() <= set(names)
    assert [name for name in shipped() if names.count(name) != 1] == []


def test_every_key_of_a_shipped_class_says_what_it_is_for_and_what_it_expects(described: list[dict[str, Any]]):
    ours = [one for one in described if one["name"] in {*shipped(), "Experiment", "Group"}]
    keys = [(one["name"], key) for one in ours for key in one["keys"]]
    assert len(keys) > 300
    assert [f"{name}.{key['name']}" for name, key in keys if not key["help"].strip()] == []
    assert [f"{name}.{key['name']}" for name, key in keys if not key["expects"]] == []
    assert [one["name"] for one in ours if not one["summary"].endswith((".", ":"))] == []


def test_defaults_are_those_of_the_file(described: list[dict[str, Any]]):
    keys = {f"{one['name']}.{key['name']}": key for one in described for key in one["keys"]}
    assert (keys["AdamW.b1"]["default"], keys["AdamW.b1"]["required"]) == (0.9, False)
    required = keys["Group.parameter_regex"]
    assert (required["default"], required["required"]) == (None, True)
    assert keys["ImgClassifierTrainer.callbacks"]["default"] == {}


def test_without_a_name_there_is_an_index(tmp_path: Path):
    result = run_command("describe", folder=tmp_path)
    lines = [line for line in result.out.splitlines() if line.strip()]
    assert (result.code, result.err) == (0, "")
    assert "jax-trainer describe NAME" in lines[-1]
    assert any(line.split()[:2] == ["AdamW", "Adam"] for line in lines)
    assert "OptimizerInterface" in result.out and "Expects" not in result.out


def test_one_class_is_shown_by_its_name(tmp_path: Path):
    result = run_command("describe", "AdamW", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "AdamW  Adam with decoupled weight decay" in result.out
    assert "  b2: 0.999\n      " in result.out
    assert "at least 0 and below 1." in " ".join(result.out.split())
    assert "Adamax " not in result.out


@pytest.mark.slow
def test_all_of_a_kind_are_shown_by_its_name(tmp_path: Path):
    data = run_command("describe", "Callback", "--json", folder=tmp_path).data
    assert {"ModelCheckpoint", "LearningRateMonitor"} <= {one["name"] for one in data["classes"]}
    assert {one["interface"] for one in data["classes"]} == {"Callback"}


@pytest.mark.slow
def test_the_file_itself_is_described(tmp_path: Path):
    result = run_command("describe", "Experiment", folder=tmp_path)
    assert [key for key in ("trainer  (required)", "num_gpus: 1", "seed: 42") if key not in result.out] == []


def test_a_narrow_terminal_cuts_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    result = run_command("describe", "AdamW", folder=tmp_path)
    assert "WarmupCosineDecaySchedule" in result.out and "log_learning_rate" in result.out and "…" not in result.out
    assert max(map(len, result.out.splitlines())) <= 40


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Adm", "Did you mean `Adam`?"),
        pytest.param("callback", "Did you mean `Callback`?", marks=pytest.mark.slow),
        pytest.param("xyzzy", "Available: AUROC, ", marks=pytest.mark.slow),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_a_similar_one(name: str, expected: str, tmp_path: Path):
    result = run_command("describe", name, folder=tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"class or interface '{name}'" in result.err and expected in result.err


def test_the_schema_is_one(schema: dict[str, Any]):
    Draft202012Validator.check_schema(schema)


@pytest.mark.slow
def test_people_get_the_same_schema(schema: dict[str, Any], tmp_path: Path):
    assert json.loads(run_command("schema", folder=tmp_path).out) == schema


def test_the_schema_accepts_what_ships(schema: dict[str, Any], subtests):
    for file in CONFIGS:
        with subtests.test(file=file):
            assert [error.message for error in Draft202012Validator(schema).iter_errors(read(file.read_text()))] == []


def test_the_schema_refuses_what_reading_refuses(schema: dict[str, Any], subtests):
    for bad in [*WRONG_KEYS, *WRONG_VALUES]:
        with subtests.test(bad=bad):
            is_seen = bad.name not in NOT_IN_A_SCHEMA
            assert Draft202012Validator(schema).is_valid(read(str(bad.content))) is not is_seen


def test_the_schema_accepts_the_tiny_experiment(schema: dict[str, Any]):
    assert Draft202012Validator(schema).is_valid(read(TINY))
