"""What needs no JAX to be known is said without importing it."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jax_trainer import sharding
from jax_trainer.sharding.group import LAUNCHERS
from jax_trainer.tools.cli import main
from jax_trainer.tools.cli.command import COMMANDS, HEARTBEAT, OfRun, integer, option
from jax_trainer.tools.cli.commands import tune
from jax_trainer.tools.cli.main import RANKS, parsed, parser
from jax_trainer.tools.cli.outcomes import Outcome
from jax_trainer.tools.tuning.study import PRUNERS, SAMPLERS

SCRIPT = """
import json, sys
from jax_trainer.tools.cli import main
codes = []
for words in json.loads(sys.argv[1]):
    try:
        codes.append(main(words))
    except SystemExit as end:
        codes.append(end.code)
print(json.dumps({"codes": codes, "jax": "jax" in sys.modules, "numpy": "numpy" in sys.modules}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What light commands said, and whether they have imported JAX."""
    folder: Path = tmp_path_factory.mktemp("light")
    (folder / "broken.yaml").write_text("trainer: {a: 1\nmodel: [")
    (folder / "including.yaml").write_text("include: missing.yaml\n")
    words = [["--help"], ["--version"], ["train", "--help"], ["trian"], ["train"], ["train", "x.yaml", "--unknown"]]
    words += [["train", "missing.yaml"], ["check", "broken.yaml"], ["tune", "including.yaml", "--space", "x.yaml"]]
    # images of containers have settings of Open MPI, although it has started nothing
    environment = {name: value for name, value in os.environ.items() if name not in RANKS} | {"OMPI_MCA_plm": "x"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)


def test_help_wrong_commands_and_unreadable_files_need_no_jax(said):
    report = json.loads(said.stdout.splitlines()[-1])
    assert report == {"codes": [0, 0, 0, 2, 0, 2, 2, 2, 2], "jax": False, "numpy": False}
    for text in ("'trian'", "--unknown", "missing.yaml", "broken.yaml:2", "including.yaml:1"):
        assert text in said.stderr


def test_the_parser_knows_the_values_of_other_packages():
    known = (HEARTBEAT, tune.SAMPLERS, tune.PRUNERS, RANKS)
    assert known == (sharding.HEARTBEAT, SAMPLERS, PRUNERS, tuple(rank for _, rank in LAUNCHERS.values()))


PARSERS = next(one for one in parser()._actions if isinstance(one, argparse._SubParsersAction)).choices


def test_the_help_of_a_command_ends_with_two_examples_that_can_be_given(subtests):
    for name in COMMANDS:
        with subtests.test(name=name):
            lines = [line for line in PARSERS[name].format_help().splitlines() if line.strip()]
            *_, heading, first, second = lines
            assert heading == "examples:" and first != second
            for line in (first, second):
                program, *words = shlex.split(line)
                assert (program, words[0]) == ("jax-trainer", name)
                assert type(parsed(words)) is COMMANDS[name]


def test_a_class_is_a_command_with_its_help_and_its_arguments(monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(COMMANDS, "count-up", None)

        class CountUp(OfRun, name="count-up"):
            """Count the steps of a run.

            Args:
                from_step: the first one (default: 3)

            Examples:
                jax-trainer count-up runs/1
                jax-trainer count-up runs/1 --from-step 5
            """

            summary = "count steps"
            is_light = True
            from_step: int = option("N", integer(1), 3)

            def run(self) -> Outcome:
                return Outcome({"status": "completed", "counted": [self.folder, self.from_step]})

        assert main(["count-up", "runs/1", "--from-step", "5", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["counted"] == ["runs/1", 5]
        assert parsed(["count-up", "runs/1"]).from_step == 3
        with pytest.raises(SystemExit, match="0"):
            main(["count-up", "--help"])
        shown = capsys.readouterr().out
        for text in ("Count the steps of a run.", "the first one (default: 3)", "RUN", "--from-step N"):
            assert text in shown
        assert shown.endswith(
            "\nexamples:\n  jax-trainer count-up runs/1\n  jax-trainer count-up runs/1 --from-step 5\n"
        )
        assert "Args:" not in shown
    assert "count-up" not in COMMANDS
