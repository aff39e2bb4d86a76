"""ckpt: what was saved, and whether it is whole."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import fit
from jax_trainer.checkpoint.record import write_manifest
from jax_trainer.tools.cli import running
from tests.tools.cli.cli_runs import CommandResult, run_command

FIRST, LAST = "checkpoints/step_00000004", "checkpoints/step_00000008"


def of_step(result: CommandResult, step: int) -> dict[str, object]:
    [found] = [one for one in result.data["checkpoints"] if one["step"] == step]
    return found


def largest_file(checkpoint: Path) -> Path:
    return max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_scripts_get_all_that_is_known(trained: Path, tmp_path: Path):
    result = run_command("ckpt", trained, "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    top = {"status": "completed", "run": str(trained), "verified": False}
    assert {**result.data, "checkpoints": []} == {**top, "monitor": "val/acc", "mode": "max", "checkpoints": []}
    record = json.loads((trained / LAST / "checkpoint.json").read_text())
    found = of_step(result, 8)
    size = sum(file.stat().st_size for file in (trained / LAST).rglob("*") if file.is_file())
    assert found["metrics"] == record["metrics"] and found["bytes"] == size
    assert (found["epoch"], found["path"], found["without"], found["problem"]) == (2, str(trained / LAST), [], "")
    values = {one["step"]: one["metrics"]["val/acc"] for one in result.data["checkpoints"]}
    best = max(values, key=lambda step: (values[step], -step))
    kept = {one["step"]: one["kept_as"] for one in result.data["checkpoints"]}
    assert "latest" in kept[8] and [step for step in kept if "best" in kept[step]] == [best]


def test_people_get_a_table(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = run_command("ckpt", trained, folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    header, *rows = [line for line in result.out.splitlines() if line.startswith(("┃", "│"))]
    names = [name.strip() for name in header.strip("┃").split("┃")]
    assert names == ["step", "epoch", "metric", "size", "lacks", "kept as", "state"]
    assert [row.split()[1] for row in rows] == ["4", "8"]
    assert "val/acc 0." in rows[1] and "latest" in rows[1] and "kB" in rows[1] and rows[1].endswith("ok    │")
    assert re.search(r"best: epoch [12], step [48], by 'val/acc' \(higher is better\)", result.out)


def test_a_bit_that_changed_is_found_with_verify(run: Path, tmp_path: Path):
    whole = run_command("ckpt", run, "--verify", "--json", folder=tmp_path)
    assert (whole.code, whole.err, whole.data["status"], whole.data["verified"]) == (0, "", "completed", True)
    flip_a_bit(largest_file(run / LAST))
    assert run_command("ckpt", run, folder=tmp_path).code == 0  # names and sizes are as they were
    result = run_command("ckpt", run, "--verify", "--json", folder=tmp_path)
    assert (result.code, result.data["status"], result.err.count("\n")) == (1, "failed", 1)
    assert of_step(result, 8)["problem"] and of_step(result, 8)["kept_as"] == []
    assert of_step(result, 4)["problem"] == "" and of_step(result, 4)["kept_as"] == ["latest", "best"]
    assert "1 of 2 " in result.err and "step_00000008" in result.err
    assert run_command("ckpt", run / FIRST, "--verify", "--quiet", folder=tmp_path) == CommandResult(
        0, "", ""
    )  # only what was asked for


def test_a_file_that_is_cut_off_is_seen_at_once(run: Path, tmp_path: Path):
    file = largest_file(run / LAST)
    file.write_bytes(file.read_bytes()[:-1])
    result = run_command("ckpt", run, folder=tmp_path)
    assert result.code == 0 and "damaged: " in result.out
    assert of_step(run_command("ckpt", run, "--json", folder=tmp_path), 8)["problem"]


def test_nothing_is_written_built_or_computed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("a device was looked for"))
    monkeypatch.setattr(running, "build", lambda *_, **__: pytest.fail("it builds"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run_command("ckpt", run, "--verify", folder=tmp_path).code == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_one_checkpoint_can_be_listed_or_the_folder_of_all(trained: Path, tmp_path: Path, subtests):
    for number, where in enumerate([FIRST, "checkpoints"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(where=where):
            data = run_command("ckpt", trained / where, "--json", folder=folder).data
            assert [one["step"] for one in data["checkpoints"]] == ([4] if where == FIRST else [4, 8])
            assert (data["run"], data["monitor"]) == (str(trained / where), "val/acc")


def test_neither_classes_nor_the_configuration_are_needed(run: Path, tmp_path: Path):
    text = (run / "config.yaml").read_text()
    assert "class_name: MLP" in text and "class_name: DigitsDataset" in text
    (run / "config.yaml").write_text(text.replace("MLP", "Theirs").replace("ImgClassifierTrainer", "Theirs"))
    moved = run.rename(tmp_path / "moved")
    data = run_command("ckpt", moved, "--json", folder=tmp_path).data
    assert (data["monitor"], len(data["checkpoints"])) == ("val/acc", 2)
    for text in ("trainer: {callbacks: {ModelCheckpoint: {monitor: [1]}}}", "no yaml: [", None):
        (moved / "config.yaml").write_text(text) if text else (moved / "config.yaml").unlink()
        result = run_command("ckpt", moved, "--json", folder=tmp_path)
        assert (result.code, result.data["monitor"], len(result.data["checkpoints"])) == (0, "val/acc", 2)


def test_names_of_metrics_of_somebody_else_are_tamed(run: Path, tmp_path: Path):
    record = run / LAST / "checkpoint.json"
    metrics = {"\x1b[2J[red]x": 1.0, "y" * 5000: 2.0}
    record.write_text(json.dumps(json.loads(record.read_text()) | {"metrics": metrics}, indent=1))
    write_manifest(run / LAST)
    shutil.rmtree(run / FIRST)
    result = run_command("ckpt", run, "--verify", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out and len(result.out) < 5000
    assert "".join(result.out.split()).count("\\x1b[2J[red]x") == 1


def test_a_run_that_saved_nothing_says_so(run: Path, tmp_path: Path):
    shutil.rmtree(run / "checkpoints")
    result = run_command("ckpt", run, "--verify", folder=tmp_path)
    assert (result.code, result.out, result.err) == (0, "Nothing was saved.\n", "")


def test_what_is_neither_a_run_nor_a_checkpoint_is_refused(run: Path, tmp_path: Path):
    for path, expected in (("rnu", str(run)), (run / "checkpoints" / "step_00000007", "step_00000004, step_00000008")):
        result = run_command("ckpt", path, folder=tmp_path)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert expected in result.err
    shutil.move(run / "checkpoints", tmp_path / "theirs")
    (run / "checkpoints").symlink_to(tmp_path / "theirs")
    assert "link" in run_command("ckpt", run, folder=tmp_path).err


def test_a_run_of_fit_is_listed_and_resumed_in_python(tmp_path: Path):
    x = np.random.default_rng(0).standard_normal((32, 4), np.float32)
    options = {"optimizer": optax.sgd(0.1), "num_epochs": 2, "log_dir": tmp_path, "tensorboard": False}
    loss = optax.softmax_cross_entropy_with_integer_labels
    data = (x, x[:, :2].argmax(-1))
    fitted = fit(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), data, data, loss_fn=loss, progress=False, **options)
    result = run_command("ckpt", fitted.folder, "--verify", "--json", folder=tmp_path)
    assert (result.code, result.data["monitor"], result.data["mode"]) == (0, "val/loss", "min")
    for command in ("resume", "test"):
        result = run_command(command, fitted.folder, folder=tmp_path)
        assert result.code == 2 and "`fit`" in result.err
