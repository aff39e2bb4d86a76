"""Classes of the user's own: imported because a person asks for it, by file or by module, and needed again later."""

import shutil
from pathlib import Path

import pytest

from jax_trainer.config.registration import unavailable
from tests.tools.cli.cli_runs import QUICK, CommandResult, run_command, run_process, tiny_file
from tests.tools.cli.own_parts import MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a user has it: an experiment, a file and a package with the same model."""
    folder = tmp_path_factory.mktemp("own")
    before, after = QUICK.index("model:"), QUICK.index("optimizer:")
    tiny_file(folder, f"{QUICK[:before]}model:\n  class_name: OwnWide\n  width: 16\n{QUICK[after:]}")
    (folder / "own_models.py").write_text(MODEL)
    (folder / "own_absent.py").write_text(MODEL.replace("OwnWide", "OwnAbsent"))  # which no test imports
    (folder / "own_package").mkdir()
    (folder / "own_package" / "__init__.py").touch()
    (folder / "own_package" / "models.py").write_text(MODEL)
    return folder


@pytest.fixture(scope="module")
def started(folder: Path) -> CommandResult:
    return run_command("train", "tiny.yaml", "own_models.py", folder=folder)


@pytest.fixture(scope="module")
def run(started: CommandResult, folder: Path) -> Path:
    [run] = (folder / "runs" / "OwnWide").iterdir()
    return run


def test_a_class_that_was_not_imported_is_reported_with_how_to_import_it(folder: Path):
    result = run_command("train", "tiny.yaml", "model.class_name=OwnAbsent", folder=folder)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "command line: model.class_name: " in result.err and "'OwnAbsent'" in result.err and "--import" in result.err


def test_a_model_with_another_constructor_is_reported_with_its_section(tmp_path: Path):
    wrong = MODEL.replace("OwnWide", "OwnNarrow").replace("*, exmp_input: jax.Array, rngs: nnx.Rngs", "width: int")
    (tmp_path / "own_narrow.py").write_text(wrong)
    file = tiny_file(
        tmp_path,
        QUICK.replace("class_name: MLP", "class_name: OwnNarrow")
        .replace("hidden: [16]", "width: 4")
        .replace("  dropout: 0.0\n", ""),
    )
    result = run_command("check", file, "own_narrow.py", folder=tmp_path)
    assert (result.code, "Traceback" in result.err) == (2, False)
    assert f"{file}:8: model: OwnNarrow" in result.err and "`__init__(self, config, *, rngs)`" in result.err


def test_a_class_in_a_file_is_trained(started: CommandResult, run: Path):
    assert started.code == 0
    assert f"jax-trainer test runs/{run.parent.name}/{run.name} --import own_models.py" in started.out


def test_a_run_does_not_import_what_it_needs_by_itself(run: Path, folder: Path):
    theirs = Path(shutil.copytree(run, folder / "theirs"))
    (theirs / "config.yaml").write_text((theirs / "config.yaml").read_text().replace("OwnWide", "OwnAbsent"))
    result = run_command("resume", theirs, folder=folder)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"{theirs}/config.yaml:" in result.err and "'OwnAbsent'" in result.err
    assert "`--import your_package.models`" in result.err


@pytest.mark.slow
def test_the_same_class_in_a_package_tests_the_run(run: Path, folder: Path):
    result = run_process("test", run, "--import", "own_package.models", "--json", folder=folder)
    assert (result.code, result.err) == (0, "")
    assert set(result.data["metrics"]["test"]) == {"test/acc", "test/acc_std", "test/loss"}


def test_the_run_is_resumed_described_and_checked_with_its_file(run: Path, folder: Path):
    result = run_command("resume", run, "own_models.py", "trainer.train_epochs=3", "--json", folder=folder)
    assert (result.code, result.err, list(result.data["metrics"])) == (0, "", ["1", "2", "3", "test"])
    for words in (["OwnWide"], ["OwnWide", "own_models.py"], ["own_models.py", "OwnWide"]):
        assert "  width: 24\n      how many units it has." in run_command("describe", *words, folder=folder).out
    wrong = run_command("check", "tiny.yaml", "own_models.py", "model.width=0", "model.widht=1", folder=folder)
    assert wrong.code == 2
    assert "model.width: " in wrong.err and "at least 1" in wrong.err and "found 0" in wrong.err
    assert "`widht`" in wrong.err and "`width`" in wrong.err


def test_a_deleted_project_ends_no_command_that_does_not_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    unavailable.clear()
    (tmp_path / "deleted-1.dist-info").mkdir()
    (tmp_path / "deleted-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: deleted\nVersion: 1\n")
    (tmp_path / "deleted-1.dist-info" / "entry_points.txt").write_text("[jax_trainer]\nmine = deleted.models\n")
    known = run_command("describe", "AdamW", folder=tmp_path)
    assert known.code == 0 and "learning_rate" in known.out
    assert known.err.count("\n") == 1 and "project deleted" in known.err and "'deleted.models'" in known.err
    unknown = run_command("describe", "OwnDeleted", folder=tmp_path)
    assert unknown.code == 2 and "'OwnDeleted'" in unknown.err and "project deleted" in unknown.err
    unavailable.clear()
