"""`export`: a run folder as a program that runs without this library."""

import json
from typing import Any

import numpy as np
import pytest

from jax_trainer.testing import assert_close
from jax_trainer.tools.exporting import load_export
from jax_trainer.trainer import ImgClassifierTrainer
from tests.tools.cli.cli_runs import run_command, run_process


def test_the_program_is_that_of_the_best_checkpoint(trained, tmp_path):
    result = run_command("export", trained, "-o", "out", "--no-check", "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert result.data["inputs"] == ["input: uint8 [batch, 8, 8, 1]"]
    assert (result.data["formats"], result.data["checks"]) == (["stablehlo"], {})
    trainer: Any = ImgClassifierTrainer.load_from_checkpoint(trained)
    expected = trainer.predict(trainer.dataset.test_loader)
    assert_close(np.asarray(load_export(tmp_path / "out")(trainer.dataset.test.input)), expected)
    source = json.loads((tmp_path / "out" / "export.json").read_text())["source"]
    assert source["run"] == "/".join(trained.parts[-2:]) and source["step"] in (4, 8) and "val/acc" in source["metrics"]


def test_wrong_arguments_are_explained(trained, tmp_path, subtests):
    for number, (arguments, words) in enumerate(
        [
            (["--to", "stablehlo,onnx"], "safetensors"),
            (["--platforms", "gpu"], "cuda"),
            (["--weights", "inside"], "embedded"),
            (["--batch", "0"], "at least 1"),
            (["--tolerance", "-1"], "tolerance"),
            (["-o", "."], "already exists"),
            (["--which", "77"], "77"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(arguments=arguments):
            result = run_command("export", trained, *arguments, folder=folder)
            assert result.code == 2 and words in result.err
            assert [*folder.iterdir()] == [] and not (trained / "export").exists()


@pytest.mark.slow
def test_every_export_is_run_and_an_export_error_fails_the_command(run, tmp_path):
    shown = run_process("export", run, "--to", "stablehlo,safetensors", folder=tmp_path)
    assert shown.code == 0 and "safetensors: differs from the trainer by at most " in shown.out
    assert {file.name for file in (run / "export").iterdir()} == {
        *("export.json", "model.stablehlo", "weights.safetensors"),
    }
    failed = run_process("export", run, "-o", "out", "--to", "stablehlo,hf", "--json", folder=tmp_path)
    assert failed.code == 1 and "mapping" in failed.data["error"]
    assert [*tmp_path.glob("out")] == [*tmp_path.glob(".partial*")] == []
