"""Configurations of the package are found by name, and their headers say what they need and what comes out."""

from pathlib import Path

import pytest

from jax_trainer.config import ConfigError, ReadyConfig, config_path, ready_names
from jax_trainer.config.files import FOLDER
from jax_trainer.tools.tuning import read_space
from jax_trainer.trainer import load_experiment
from tests.rows import each


def test_every_configuration_says_what_it_needs_and_what_comes_out():
    for name in ready_names():
        found = ReadyConfig.of(FOLDER / f"{name}.yaml")
        lines = (found.summary, found.data, found.device, found.expected)
        assert found.name == name and all(lines) and not any(line.endswith((".", ",")) for line in lines), found


def test_a_header_without_its_lines_is_an_error(tmp_path: Path):
    (tmp_path / "some.yaml").write_text("# Some.\n# Data: none.\n# Expected: 1.\ntrainer: {}\n")
    with pytest.raises(ValueError, match=r"some\.yaml.*# Device"):
        ReadyConfig.of(tmp_path / "some.yaml")


def test_a_name_is_a_configuration_of_the_package_unless_the_user_has_such_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # a folder is no configuration
    loaded = load_experiment("digits", ["trainer.train_epochs=3"])
    assert loaded.value.trainer.train_epochs == 3 and loaded.tree.location.source == str(FOLDER / "digits.yaml")
    (tmp_path / "mnist").write_text("a: 1")
    assert config_path("mnist") == Path("mnist")
    assert "model.act_fn" in read_space("digits").data()


@each("name, expected", [("digitz", "`digits`"), ("configs/digits.yaml", "`digits`")])
def test_a_name_that_is_nearly_one_of_the_package_is_suggested(name: str, expected: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"{name}.*{expected}"):
        load_experiment(name)
    (tmp_path / "mine.yaml").write_text(f"include: {Path(name).stem}.yaml\n")
    with pytest.raises(ConfigError) as error:
        load_experiment(tmp_path / "mine.yaml")
    assert "Did you mean" not in str(error.value)  # names of the package cannot be included
