"""`predict`: a file of predictions from a run folder, also after a kill."""

import json
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jax_trainer.runs.predictions import FORMATS
from jax_trainer.trainer import ImgClassifierTrainer
from tests.tools.cli.cli_runs import PATIENCE, process_environment, run_command


def test_the_file_has_what_the_trainer_predicts(trained, tmp_path):
    result = run_command("predict", trained, "-o", "out.npz", "--targets", "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    expected = {"run": str(trained), "which": "best", "split": "test", "file": "out.npz", "resumed": 0}
    assert {name: result.data[name] for name in expected} == expected
    trainer: Any = ImgClassifierTrainer.load_from_checkpoint(trained)
    test = trainer.dataset.test
    with np.load(tmp_path / "out.npz", allow_pickle=False) as found:
        np.testing.assert_array_equal(found["prediction"], trainer.predict(trainer.dataset.test_loader))
        np.testing.assert_array_equal(found["target"], test.target)
        np.testing.assert_array_equal(found["id"], np.arange(test.size))


def test_all_training_examples_are_predicted_in_their_order(trained, tmp_path):
    result = run_command("predict", trained, "-o", "out.jsonl", "--split", "train", "--targets", folder=tmp_path)
    assert result.code == 0 and "out.jsonl" in result.out
    trainer: Any = ImgClassifierTrainer.load_from_checkpoint(trained)
    train = trainer.dataset.train
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list(range(train.size))
    assert [row["target"] for row in rows] == train.target.tolist()


def test_wrong_arguments_are_explained(trained, tmp_path, subtests):
    for number, (arguments, words) in enumerate(
        [
            (["-o", "out.csv"], ".parquet"),
            (["-o", "there.npz"], "there.npz"),
            (["-o", "out.npz", "--split", "dev"], "val"),
            (["-o", "out.npz", "--which", "77"], "77"),
            (["-o", "out.npz", "dataset.val_size=0", "--split", "val"], "--split"),
            ([], "--output"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(arguments=arguments):
            (folder / "there.npz").touch()
            result = run_command("predict", trained, *arguments, folder=folder)
            assert result.code == 2 and words in result.err
            assert [file.name for file in folder.iterdir()] == ["there.npz"]


SMALL_GROUPS = """
import sys
from jax_trainer.tools.cli import main
from jax_trainer.runs import predictions
predictions.GROUP_ROWS = 100
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_command_continues_and_writes_the_same_bytes(trained, tmp_path, subtests):
    def run(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
        words = ["predict", str(trained), "--split=train", "--json", "-o", name]
        options = {"cwd": tmp_path, "env": process_environment(**environment), "capture_output": True, "text": True}
        return subprocess.run([sys.executable, "-c", SMALL_GROUPS, *words], **options, timeout=PATIENCE)

    for suffix in FORMATS:
        with subtests.test(suffix=suffix):
            whole, output = tmp_path / f"whole{suffix}", tmp_path / f"out{suffix}"
            assert run(whole.name).returncode == 0
            assert run(output.name, JAXTRAINER_FAILPOINT="prediction_index:kill:3").returncode == -signal.SIGKILL
            assert not output.exists()
            again = run(output.name)
            assert json.loads(again.stdout)["resumed"] == 256  # two groups of four batches
            assert output.read_bytes() == whole.read_bytes()
