"""The options of the command line, its errors and exit codes."""

import logging
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jax_trainer.tools.cli import main
from jax_trainer.tools.cli.main import _one_line_messages
from tests.tools.cli.cli_runs import CommandResult, run_command, tiny_file

FAILING = '''\
from dataclasses import dataclass

from compoconf import register
from jax_trainer.trainer import ImgClassifierTrainer, ImgClassifierTrainerConfig


@dataclass
class FailingTrainerConfig(ImgClassifierTrainerConfig):
    """Nothing of its own."""


@register
class FailingTrainer(ImgClassifierTrainer):
    """Never trains."""

    config: FailingTrainerConfig

    def loss_function(self, model, batch, train=True):
        raise RuntimeError("this loss never works")
'''


def own_file(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return name


def test_a_wrong_command_is_reported_in_one_line_that_points_at_the_help(tmp_path: Path, subtests):
    for number, (arguments, expected) in enumerate(
        [
            ([], "COMMAND"),
            (["trian"], "invalid choice: 'trian'. Did you mean `train`?"),
            (["xyzzyx"], "invalid choice: 'xyzzyx' (choose from"),
            (["serve", "digits"], "invalid choice: 'serve'"),
            (["init", "p", "--task", "textt"], "invalid choice: 'textt'. Did you mean `text`?"),
            (["check"], "CONFIG"),
            (["train", "x.yaml", "--nope"], "unknown option --nope"),
            (["train", "x.yaml", "--qui"], "unknown option --qui"),
            (["describe", "Adam", "AdamW"], "one NAME, got 2: 'Adam', 'AdamW'"),
            (["test", "runs", "--which"], "--which"),
            (["test", "runs", "--which", "worst"], "found 'worst'"),
            (["test", "runs", "--which", "²"], "found '²'"),
            (["test", "runs", "--which", "9" * 5000], "expected best, latest or a step"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(arguments=arguments):
            result = run_command(*arguments, folder=folder)
            assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
            assert result.err.startswith("jax-trainer: ")
            assert expected in result.err and "--help`" in result.err


def test_sections_that_are_no_classes_are_described_too(tmp_path: Path):
    result = run_command("describe", "LoRA", folder=tmp_path)
    assert (result.code, result.err) == (0, "") and "rank: 16" in result.out


def test_scripts_get_wrong_commands_as_json_too(tmp_path: Path):
    result = run_command("train", "x.yaml", "--json", "--nope", folder=tmp_path)
    assert (result.code, result.data["status"]) == (2, "failed")
    assert "--nope" in result.data["error"]


def test_options_stand_anywhere(tmp_path: Path):
    file = tiny_file(tmp_path)
    result = run_command(
        "check", "-q", file, "trainer.train_epochs=9", "--json", "trainer.max_steps=5", folder=tmp_path
    )
    assert (result.code, result.data["steps"]) == (0, 5)


def test_the_value_of_an_unknown_option_is_not_repeated(tmp_path: Path):
    for option in (["--login", "hunter2"], ["--login=hunter2"]):
        result = run_command("train", "x.yaml", *option, folder=tmp_path)
        assert "unknown option --login." in result.err and "hunter2" not in result.err


def test_help_says_what_there_is_and_what_exit_codes_mean(capsys: pytest.CaptureFixture[str], subtests):
    for command in [[], ["train"], ["test"], ["resume"], ["ckpt"], ["check"], ["describe"], ["schema"]]:
        with subtests.test(command=command):
            with pytest.raises(SystemExit, match="0"):
                main([*command, "--help"])
            shown = capsys.readouterr().out
            assert "130 Ctrl-C, 129 SIGHUP, 138 SIGUSR1, 140 SIGUSR2, 143 SIGTERM" in shown
            assert "train" in shown if not command else "--json" in shown and "--import" in shown


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("jax-trainer ")


def test_a_missing_data_file_is_a_sentence_and_not_a_traceback(tmp_path: Path):
    result = run_command("train", "mnist", "dataset.data_dir=nowhere", folder=tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
    assert "nowhere" in result.err and "train-images-idx3-ubyte" in result.err and "download: true" in result.err
    assert not list(tmp_path.iterdir())


def test_an_error_in_the_users_loss_comes_with_its_traceback_and_leaves_no_folder(tmp_path: Path):
    mine = own_file(tmp_path, "failing_trainer.py", FAILING)
    changes = ["trainer.class_name=FailingTrainer", "trainer.callbacks={}"]
    result = run_command("train", tiny_file(tmp_path), mine, *changes, "--json", folder=tmp_path)
    assert result.code == 1
    assert result.data == {"status": "failed", "error": "RuntimeError: this loss never works"}
    assert "Traceback" in result.err and 'failing_trainer.py", line 19' in result.err
    assert not (tmp_path / "runs").exists()  # it is found by tracing, before anything is written


def test_an_import_that_is_not_there_is_a_wrong_command(tmp_path: Path, subtests):
    for number, (what, expected) in enumerate(
        [
            ("no_such_module_of_mine", "No module 'no_such_module_of_mine'"),
            ("no_such_file.py", "not found: no_such_file.py"),
            ("os.system('id')", "No module"),
            ("../up.py", "not found: ../up.py"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(what=what):
            result = run_command("train", tiny_file(folder), "--import", what, folder=folder)
            assert (result.code, result.err.count("\n")) == (2, 1)
            assert expected in result.err


def test_an_import_that_fails_shows_where(tmp_path: Path):
    mine = own_file(tmp_path, "import_that_fails.py", "import json\n\nprint(1 / 0)\n")
    result = run_command("describe", "--import", mine, folder=tmp_path)
    assert result.code == 1
    assert 'import_that_fails.py", line 3' in result.err and "ZeroDivisionError" in result.err


def test_what_is_no_run_is_reported_with_similar_runs(run: Path, tmp_path: Path):
    for command in ("test", "resume"):
        result = run_command(command, "rnu", folder=tmp_path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "does not exist" in result.err and str(run) in result.err


def test_a_name_that_would_move_the_cursor_is_printed_escaped(run: Path, tmp_path: Path):
    run.rename(tmp_path / "run\x1b[2J")
    result = run_command("test", "rnu", "--json", folder=tmp_path)
    assert "/run\\x1b[2J." in result.err and "/run\\x1b[2J." in result.data["error"]


def test_quiet_prints_nothing_on_success(run: Path, tmp_path: Path):
    assert run_command("test", run, "--quiet", folder=tmp_path) == CommandResult(0, "", "")


def test_numbers_that_json_does_not_have_become_text(tmp_path: Path):
    changes = ["trainer.fast_dev_run=2", "optimizer.learning_rate=1e17", "trainer.on_nonfinite=ignore"]
    result = run_command("train", tiny_file(tmp_path), "--json", *changes, folder=tmp_path)
    assert (result.code, "Traceback" in result.err) == (0, False)
    assert result.data["metrics"]["test"]["test/loss"] == "nan"


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line_without_the_line_of_our_code(tmp_path: Path):
    file = tiny_file(tmp_path)
    result = run_command("check", file, "dataset.num_workers=3", "--json", folder=tmp_path)
    assert result.code == 0 and result.data
    assert result.err.startswith("jax-trainer: `num_workers: 3` ")
    assert result.err.count("\n") == 1 and ".py" not in result.err
    assert run_command("check", file, "dataset.num_workers=3", "--quiet", folder=tmp_path) == CommandResult(0, "", "")


@pytest.mark.filterwarnings("default")
def test_a_warning_of_several_lines_becomes_one(tmp_path: Path):
    mine = own_file(tmp_path, "warns_in_lines.py", "import warnings\n\nwarnings.warn('one\\n  two\\x1b[31m')\n")
    result = run_command("describe", "Adam", "--import", mine, folder=tmp_path)
    assert (result.code, result.err) == (0, "jax-trainer: one two\\x1b[31m\n")


def test_a_message_that_comes_twice_is_printed_once(capsys: pytest.CaptureFixture[str]):
    args: Any = SimpleNamespace(secrets=set(), quiet=False)
    with _one_line_messages(args):
        for _ in range(2):
            logging.getLogger("jax_trainer").warning("a \x1b[31mstray\nline")
    found = capsys.readouterr().err
    assert found.count("\n") == found.count("stray") == 1 and "\x1b" not in found


def test_nothing_of_the_process_stays_changed(tmp_path: Path):
    log = logging.getLogger("jax_trainer")
    before = ([*log.handlers], [*log.filters], log.propagate, log.level, warnings.showwarning, [*sys.path])
    run_command("check", tiny_file(tmp_path), folder=tmp_path)
    run_command("check", "missing.yaml", folder=tmp_path)
    assert before == ([*log.handlers], [*log.filters], log.propagate, log.level, warnings.showwarning, [*sys.path])
