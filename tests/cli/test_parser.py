"""What needs no JAX to be known is said without importing it."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jax_trainer.cli import command_arguments, parser
from jax_trainer.cli.main import RANKS
from jax_trainer.multihost import HEARTBEAT
from jax_trainer.multihost.group import LAUNCHERS
from jax_trainer.tuning.choosing import PRUNERS, SAMPLERS

SCRIPT = """
import json, sys
from jax_trainer.cli import main
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


def test_they_say_what_is_wrong(said):
    for text in ("'trian'", "--unknown", "missing.yaml", "broken.yaml:2", "including.yaml:1"):
        assert text in said.stderr


def test_the_parser_knows_the_values_of_other_packages():
    known = (command_arguments.HEARTBEAT, command_arguments.SAMPLERS, command_arguments.PRUNERS, RANKS)
    assert known == (HEARTBEAT, SAMPLERS, PRUNERS, tuple(rank for _, rank in LAUNCHERS.values()))


COMMANDS = next(one for one in parser.parser()._actions if isinstance(one, argparse._SubParsersAction)).choices


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_two_examples_that_can_be_given(name: str):
    lines = [line for line in COMMANDS[name].format_help().splitlines() if line.strip()]
    *_, heading, first, second = lines
    assert heading == "examples:" and first != second
    for line in (first, second):
        program, command, *words = shlex.split(line)
        assert (program, command) == ("jax-trainer", name)
        assert parser.parsed([command, *words]).command == name
