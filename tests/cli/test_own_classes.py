"""Classes of the user's own: imported because a person asks for it, by file or by module, and needed again later."""

from pathlib import Path

import pytest
from cli_runs import TINY, Said, ask, ask_process, tiny_file
from own_parts import MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it: an experiment, a file and a package with the same model."""
    folder = tmp_path_factory.mktemp("own")
    before, after = TINY.index("model:"), TINY.index("optimizer:")
    tiny_file(folder, f"{TINY[:before]}model:\n  class_name: OwnWide\n  width: 16\n{TINY[after:]}")
    (folder / "own_models.py").write_text(MODEL)
    (folder / "own_package").mkdir()
    (folder / "own_package" / "__init__.py").touch()
    (folder / "own_package" / "models.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def begun(folder: Path) -> Said:
    return ask_process("train", "tiny.yaml", "own_models.py", folder=folder)


@pytest.fixture(scope="module")
def run(begun: Said, folder: Path) -> Path:
    [run] = (folder / "runs" / "OwnWide").iterdir()
    return run


def test_a_class_that_was_not_imported_is_told_with_how_to_do_so(folder: Path):
    said = ask_process("train", "tiny.yaml", folder=folder)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "tiny.yaml:9: model.class_name: " in said.err and "'OwnWide'" in said.err and "--import" in said.err


def test_a_model_with_another_constructor_is_reported_with_its_section(tmp_path: Path):
    wrong = MODEL.replace("OwnWide", "OwnNarrow").replace("*, exmp_input: jax.Array, rngs: nnx.Rngs", "width: int")
    (tmp_path / "own_narrow.py").write_text(wrong)
    file = tiny_file(
        tmp_path,
        TINY.replace("class_name: MLP", "class_name: OwnNarrow")
        .replace("hidden: [16]", "width: 4")
        .replace("  dropout: 0.1\n", ""),
    )
    said = ask("check", file, "own_narrow.py", folder=tmp_path)
    assert (said.code, "Traceback" in said.err) == (2, False)
    assert f"{file}:8: model: OwnNarrow" in said.err and "`__init__(self, config, *, rngs)`" in said.err


def test_a_class_in_a_file_is_trained(begun: Said, run: Path):
    assert begun.code == 0
    assert f"`jax-trainer test {run} --import own_models.py`" in begun.out


def test_a_run_does_not_import_what_it_needs_by_itself(run: Path, folder: Path):
    said = ask_process("resume", run, folder=folder)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"{run}/config.yaml:" in said.err and "'OwnWide'" in said.err
    assert "A class of your own is registered by importing it: `--import your_package.models`" in said.err


def test_the_same_class_in_a_package_tests_the_run(run: Path, folder: Path):
    said = ask_process("test", run, "--import", "own_package.models", "--json", folder=folder)
    assert (said.code, said.err) == (0, "")
    assert set(said.data["metrics"]["test"]) == {"test/acc", "test/acc_std", "test/loss"}


def test_the_run_is_resumed_described_and_checked_with_its_file(run: Path, folder: Path):
    said = ask("resume", run, "own_models.py", "trainer.train_epochs=3", "--json", folder=folder)
    assert (said.code, said.err, list(said.data["metrics"])) == (0, "", ["1", "2", "3", "test"])
    for words in (["OwnWide"], ["OwnWide", "own_models.py"], ["own_models.py", "OwnWide"]):
        assert "  width: 24\n      how many units it has." in ask("describe", *words, folder=folder).out
    wrong = ask("check", "tiny.yaml", "own_models.py", "model.width=0", "model.widht=1", folder=folder)
    assert wrong.code == 2
    assert "model.width: expected a whole number of at least 1, found 0." in wrong.err
    assert "OwnWide has no key `widht`. Did you mean `width`?" in wrong.err
