"""Tab completion of commands, configurations, keys, values and class names, in a real bash."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from jax_trainer.config import json_schema
from jax_trainer.config.files import FOLDER, read_tree
from jax_trainer.config.problems import Problems
from jax_trainer.tools.cli.completion import class_names, keys_and_values
from jax_trainer.trainer import Experiment

schema = cache(lambda: json_schema(Experiment))
DIGITS = read_tree(FOLDER / "digits.yaml", [], Problems())
ASK = """
eval "$(register-python-argcomplete jax-trainer)"
while read -r line; do
    COMP_LINE="jax-trainer $line" COMP_TYPE=9 COMPREPLY=()
    COMP_POINT=${#COMP_LINE}
    _python_argcomplete jax-trainer
    echo "${COMPREPLY[*]}"
done
"""


def test_keys_and_values_are_those_of_the_classes_that_the_file_names(subtests):
    for prefix, expected in [
        ("trainer.train_ep", ["trainer.train_epochs="]),
        ("model.drop", ["model.dropout="]),  # of the CNN, which the file names
        ("model.class_name=C", ["model.class_name=CNN", "model.class_name=ConditionalMLP"]),  # of all models
        ("optimizer.learning_rate.peak", ["optimizer.learning_rate.peak_value="]),
        ("trainer.callbacks.ModelCheckpoint.moni", ["trainer.callbacks.ModelCheckpoint.monitor="]),
        ("trainer.debug=", ["trainer.debug=false", "trainer.debug=true"]),
        ("trainer.precis", ["trainer.precision="]),
        ("nothing.like.this", []),
        ("trainer.seed.deeper", []),
    ]:
        with subtests.test(prefix=prefix):
            assert [one for one in keys_and_values(schema(), DIGITS, prefix) if one.startswith(prefix)] == expected


def test_every_key_of_the_ready_configurations_can_be_completed():
    for file in FOLDER.glob("*.yaml"):
        if file.stem == "cifar10_speedrun":  # has classes of an example
            continue
        tree = read_tree(file, [], Problems())
        sections = [(name, node) for name, node in tree.children() if node.is_section]
        keys = [f"{name}.{key}" for name, node in sections for key, _ in node.children()]
        for key in keys:
            found = keys_and_values(schema(), tree, key)
            assert any(one.startswith((f"{key}=", f"{key}.")) for one in found), (file.name, key)


def test_the_names_of_classes_are_completed():
    assert {"AdamW", "CNN", "ModelCheckpoint", "DigitsDataset"} <= set(class_names(schema()))


@pytest.mark.slow
def test_bash_completes_and_later_without_jax(tmp_path: Path):
    lines = {
        "tra": "train",
        "train digits_f": "digits_flow",
        "train digits trainer.train_ep": "trainer.train_epochs=",
        "train digits model.class_name=CN": "CNN",
        "train digits model.class_name=ViT model.pat": "model.patch=",
        "describe ModelCh": "ModelCheckpoint",
        "init mine --task ima": "image",
    }
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["bash", "-c", ASK]
    done = subprocess.run(
        command,
        input="\n".join(lines) + "\n",
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.strip() for line in done.stdout.splitlines()] == list(lines.values()), done.stderr
    assert len(list(tmp_path.rglob("schema-*.json"))) == 1
    probe = (
        "import sys; from jax_trainer.tools.cli import completion; completion.schema(); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], env=environment, check=True)
