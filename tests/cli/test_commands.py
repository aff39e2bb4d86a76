"""train, test, resume and check."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from cli_runs import TINY, ask, last_state, tiny_file

from jax_trainer.datasets.examples import DigitsDataset
from jax_trainer.engine import Plan
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import TrainerModule


def rows(run: Path) -> list[dict[str, float]]:
    """What was measured, without what the run was made of."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in parsed if "epoch" in row]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_leaves_a_folder_with_all_there_is_to_know(trained: Path):
    assert trained.parent.name == "MLP" and trained.parent.parent.name == "runs"
    named = {"config.yaml", "hparams.json", "metrics.jsonl", "metrics", "run.log", "run.lock", "checkpoints"}
    assert {path.name for path in trained.iterdir()} == named
    stored = yaml.safe_load((trained / "config.yaml").read_text())
    assert stored["model"]["num_classes"] == 10  # the reference is resolved
    assert stored["trainer"]["precision"] == "f32"  # defaults are written out
    assert [row["step"] for row in rows(trained)] == [4, 4, 8, 8, 8]


def test_testing_judges_the_same_weights_as_the_end_of_training(trained: Path, tmp_path: Path):
    said = ask("test", trained, "--json", folder=tmp_path)
    tested = {name: value for name, value in rows(trained)[-1].items() if name.startswith("test/")}
    del tested["test/time"]
    assert (said.code, said.err) == (0, "")
    assert said.data == {"status": "completed", "run": str(trained), "which": "best", "metrics": {"test": tested}}


def test_the_end_of_a_run_says_which_weights_were_the_best_and_which_were_tested(run: Path, tmp_path: Path):
    said = ask("resume", run, "--json", folder=tmp_path)  # it has ended, and is tested once more
    best = said.data["best"]
    assert [(one["epoch"], one["step"]) for one in said.data["validations"]] == [(1, 4), (2, 8)]
    assert said.data["reason"] == ""
    assert said.data["tested"] == "best" and (best["monitor"], best["mode"]) == ("val/acc", "max")
    found = {row["step"]: row["val/acc"] for row in rows(run) if "val/acc" in row}
    assert best["value"] == max(found.values()) == found[best["step"]] and best["step"] == 4 * best["epoch"]
    shown = ask("resume", run, folder=tmp_path).out
    place = f"epoch {best['epoch']}, step {best['step']}"
    assert f"Best weights: {place}: val/acc {best['value']:.6g}, higher is better." in shown
    assert f"the best weights: {place}" in shown
    assert place in ask("test", run, folder=tmp_path).out


def test_testing_changes_nothing_in_the_folder(run: Path, tmp_path: Path):
    before = files(run)
    said = ask("test", run, "--which", "8", folder=tmp_path)
    assert said.code == 0 and "test/acc" in said.out
    assert files(run) == before


def test_the_weights_of_a_step_that_is_not_there_are_not_tested(trained: Path, tmp_path: Path):
    said = ask("test", trained, "--which", "7", folder=tmp_path)
    assert (said.code, said.out) == (2, "")
    assert said.err == f"jax-trainer: {trained} has no checkpoint of step 7. There are 4, 8.\n"


def test_a_run_without_a_checkpoint_is_told_how_to_begin_again(run: Path, tmp_path: Path):
    shutil.rmtree(run / "checkpoints")
    moved = run.rename(tmp_path / "my run")
    said = ask("test", moved, folder=tmp_path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"`jax-trainer resume '{moved}'`" in said.err


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run: Path, tmp_path: Path):
    (run / "checkpoints/step_00000008/state/manifest.ocdbt").write_bytes(b"not what was written")
    said = ask("resume", run, "--json", folder=tmp_path)
    assert (said.code, said.data["status"]) == (0, "completed")
    assert said.err.count("manifest.ocdbt is not of the size that was written") == 1


def test_where_all_checkpoints_are_damaged_nothing_is_trained_and_every_reason_is_told(run: Path, tmp_path: Path):
    for step in ("step_00000004", "step_00000008"):
        (run / "checkpoints" / step / "state/manifest.ocdbt").write_bytes(b"not what was written")
    before = files(run)
    for command in ("test", "resume"):
        said = ask(command, run, folder=tmp_path)
        assert (said.code, said.out, said.err.count("\n")) == (1, "", 1)
        assert "Traceback" not in said.err and "step_00000004 is damaged" in said.err
        assert "step_00000008 is damaged" in said.err
    told = {name: files(run)[name] for name in ("run.lock", "run.log")}  # the log says that nothing was resumed
    assert files(run) == {**before, **told}


def test_resuming_a_finished_run_trains_nothing_and_tests_again(run: Path, tmp_path: Path):
    before, step = last_state(run)
    numbers = rows(run)
    said = ask("resume", run, "--json", folder=tmp_path)
    assert (said.code, said.err, list(said.data["metrics"])) == (0, "", ["1", "2", "test"])  # as it had found
    after, step_after = last_state(run)
    assert step == step_after == 8
    assert_same_bits(before, after)
    without_time = [{name: value for name, value in row.items() if name != "test/time"} for row in rows(run)]
    assert without_time == [{name: value for name, value in row.items() if name != "test/time"} for row in numbers]


def test_resuming_with_more_epochs_goes_on(run: Path, tmp_path: Path):
    said = ask("resume", run, "trainer.train_epochs=3", "--json", folder=tmp_path)
    assert (said.code, said.err, list(said.data["metrics"])) == (0, "", ["1", "2", "3", "test"])
    assert [row["step"] for row in rows(run)] == [4, 4, 8, 8, 12, 12, 12]
    assert last_state(run)[1] == 12


def test_a_run_goes_on_wherever_its_folder_was_moved_to(run: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = run.rename(elsewhere / "my run's folder")
    for command in ("test", "resume"):
        said = ask(command, moved.name, "--json", folder=elsewhere)
        assert (said.code, said.data["run"]) == (0, str(moved))
    assert [path.name for path in elsewhere.iterdir()] == [moved.name]


def test_a_run_without_validation_is_trained_tested_and_resumed(tmp_path: Path):
    file, change = tiny_file(tmp_path), "trainer.check_val_every_n_epoch=0"
    said = ask("train", file, change, "--json", "trainer.max_steps=3", folder=tmp_path)
    assert said.code == 0 and list(said.data["metrics"]) == ["test"]
    assert "no validation" in said.err
    tested = ask("test", said.data["run"], "--json", folder=tmp_path)
    assert (tested.code, tested.data["metrics"]) == (0, said.data["metrics"])


def test_nothing_is_advised_that_cannot_be_done(tmp_path: Path):
    said = ask("train", tiny_file(tmp_path), "trainer.callbacks={}", "trainer.fast_dev_run=1", folder=tmp_path)
    assert said.code == 0
    assert "Run folder: " in said.out and "Next: " not in said.out


def test_a_version_that_is_taken_is_told_with_how_to_go_on(tmp_path: Path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "something").touch()
    tool = "{class_name: TensorboardToolLogger, version: one, save_dir: runs}"
    said = ask("train", tiny_file(tmp_path), f"trainer.logger.tool_config={tool}", folder=tmp_path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "exists already" in said.err and "jax-trainer resume" in said.err


def test_a_place_for_runs_that_cannot_be_made_is_told(tmp_path: Path):
    file = tiny_file(tmp_path)
    said = ask("train", file, f"trainer.logger.log_dir={file}", folder=tmp_path)
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert "The run's folder cannot be made" in said.err and str(file) in said.err


def test_labels_that_the_model_has_no_outputs_for_are_reported_without_a_traceback(tmp_path: Path):
    for command in ("check", "train"):
        said = ask(command, tiny_file(tmp_path), "trainer.num_classes=3", folder=tmp_path)
        assert (said.code, said.out) == (1, "")
        assert "Traceback" not in said.err
        assert "batch.target holds 9" in said.err and "0 to 2" in said.err


def test_checking_shows_what_would_be_trained(tmp_path: Path):
    said = ask("check", tiny_file(tmp_path), folder=tmp_path)
    assert (said.code, said.err) == (0, "")
    assert "out.kernel" in said.out and "16 × 10" in said.out and "float32" in said.out
    assert "1,210 in 4 arrays" in said.out and "params 4.84 kB" in said.out and "steps: 8" in said.out
    assert "uint8[32, 8, 8, 1]" in said.out


def test_checking_gives_scripts_the_same(tmp_path: Path):
    data = ask("check", tiny_file(tmp_path), "--json", folder=tmp_path).data
    in_first, in_last = 8 * 8 * 16 + 16, 16 * 10 + 10
    assert data["parameter_count"] == sum(leaf["bytes"] for leaf in data["parameters"]) // 4 == in_first + in_last
    sizes = data["state_bytes"]
    assert sizes["params"] == 4 * (in_first + in_last)
    assert 2 * sizes["params"] <= sizes["opt_state"] < 2 * sizes["params"] + 100  # two moments, and counters
    assert (data["steps"], data["status"]) == (8, "completed")


def test_checking_shows_which_devices_would_hold_what(tmp_path: Path):
    changes = ("trainer.mesh.fsdp=4", "trainer.sharding.smallest=1")
    said = ask("check", tiny_file(tmp_path), *changes, folder=tmp_path)
    assert (said.code, said.err) == (0, "")
    assert "8 devices: data 2, fsdp 4, tensor 1. Batches are split over data and fsdp." in said.out
    assert "if all were split evenly" in said.out
    data = ask("check", tiny_file(tmp_path), *changes, "--json", folder=tmp_path).data["layout"]
    rows = {row["leaf"]: row for row in data["parameters"]}
    assert (rows["out.kernel"]["spec"], rows["out.kernel"]["bytes_per_device"]) == ("fsdp", 16 * 10 * 4 // 4)
    assert data["shares"]["all"]["per_device"] < data["shares"]["all"]["bytes"] / 3
    assert ask("check", tiny_file(tmp_path), "--json", folder=tmp_path).data["layout"] is None


def test_devices_that_are_not_there_are_told_with_their_line(tmp_path: Path):
    said = ask("check", tiny_file(tmp_path), "trainer.mesh.fsdp=3", folder=tmp_path)
    assert (said.code, said.out) == (2, "")
    assert "trainer.mesh: The mesh {data: -1, fsdp: 3, tensor: 1} needs a multiple of 3 devices" in said.err


def test_checking_trains_nothing_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TrainerModule, "train_model", lambda *_, **__: pytest.fail("it trains"))
    monkeypatch.setattr(Plan, "__init__", lambda *_, **__: pytest.fail("it plans to train"))
    file = tiny_file(tmp_path)
    before = files(tmp_path)
    assert ask("check", file, "--quiet", folder=tmp_path).code == 0
    assert files(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("trainer.max_steps=3", "steps", 3),
        ("trainer.max_steps=0x10", "steps", 8),
        ("trainer={class_name: ImgClassifierTrainer, num_classes: 10, max_steps: 1_0}", "steps", 10),
        ("model.hidden=[8, 8]", "parameter_count", 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10),
        ("dataset.global_batch_size=16", "batch", {"input": "uint8[16, 8, 8, 1]", "target": "int32[16]"}),
        ("optimizer={class_name: SGD, momentum: null}", "steps", 8),
        ("optimizer.learning_rate=1e-2", "steps", 8),
    ],
)
def test_an_override_is_read_like_the_file(change: str, key: str, value: object, tmp_path: Path):
    said = ask("check", tiny_file(tmp_path), "--json", change, folder=tmp_path)
    assert (said.code, said.data.get(key)) == (0, value)


def test_references_see_overrides(tmp_path: Path):
    said = ask("check", tiny_file(tmp_path), "--json", "trainer.num_classes=12", folder=tmp_path)
    shapes = {leaf["path"]: leaf["shape"] for leaf in said.data["parameters"]}
    assert shapes["out.kernel"] == [16, 12]


def test_of_two_overrides_of_one_key_the_last_one_counts(tmp_path: Path):
    changes = ["trainer.max_steps=3", "trainer.max_steps=5"]
    assert ask("check", tiny_file(tmp_path), "--json", *changes, folder=tmp_path).data["steps"] == 5


def test_what_the_data_makes_impossible_is_told_with_its_place(tmp_path: Path):
    file = tiny_file(tmp_path, TINY.replace("num_classes: ${trainer.num_classes}", "num_classes: 7"))
    said = ask("check", file, folder=tmp_path)
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "tiny.yaml:5: trainer.num_classes: The model gives 7 classes" in said.err


@pytest.mark.parametrize("command", ["check", "train", "tune"])
def test_an_experiment_without_any_limit_is_refused_before_its_data_is_loaded(command, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(DigitsDataset, "__init__", lambda self, config: pytest.fail("the data was loaded"))
    file = tiny_file(tmp_path, TINY.replace("  train_epochs: 2\n", ""))
    space = tmp_path / "space.yaml"
    space.write_text("optimizer.learning_rate.peak_value: {low: 1e-4, high: 1e-2}\n")
    options = ["--space", str(space), "--trials", "1"] if command == "tune" else []
    said = ask(command, file, *options, folder=tmp_path)
    assert (said.code, said.out) == (2, "")
    assert "trainer.train_epochs" in said.err and "`max_steps`" in said.err and "`max_time`" in said.err
    assert not [*tmp_path.rglob("config.yaml")]


def test_the_limit_that_was_given_decides(tmp_path: Path):
    file = tiny_file(tmp_path, TINY.replace("train_epochs: 2", "max_steps: 6"))
    said = ask("train", file, "--json", folder=tmp_path)
    assert said.code == 0, said.err
    assert [row["step"] for row in rows(Path(tmp_path / said.data["run"]))] == [4, 4, 6, 6, 6]
