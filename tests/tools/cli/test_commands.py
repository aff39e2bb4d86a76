"""train, test, resume and check."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from jax_trainer.datasets.examples import DigitsDataset
from jax_trainer.engine import Plan
from jax_trainer.testing import assert_same_bits
from jax_trainer.trainer import TrainerModule
from tests.tools.cli.cli_runs import QUICK, TINY, last_state, run_command, tiny_file


def rows(run: Path) -> list[dict[str, float]]:
    """What was measured, without what the run was made of."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in parsed if "epoch" in row]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_training_leaves_a_folder_with_all_there_is_to_know(trained: Path):
    assert trained.parent.name == "MLP" and trained.parent.parent.name == "runs"
    named = {
        "config.yaml",
        "hparams.json",
        "metrics.jsonl",
        "history.jsonl",
        "time.jsonl",
        "metrics",
        "run.json",
        "run.log",
        "run.lock",
        "checkpoints",
    }
    assert {path.name for path in trained.iterdir()} == named
    stored = yaml.safe_load((trained / "config.yaml").read_text())
    assert stored["model"]["num_classes"] == 10  # the reference is resolved
    assert stored["trainer"]["precision"] is None  # defaults are written out
    assert [row["step"] for row in rows(trained)] == [4, 4, 8, 8, 8]


def test_testing_evaluates_the_same_weights_as_the_end_of_training(trained: Path, tmp_path: Path):
    result = run_command("test", trained, "--json", folder=tmp_path)
    tested = {name: value for name, value in rows(trained)[-1].items() if name.startswith("test/")}
    del tested["test/time"]
    assert (result.code, result.err) == (0, "")
    assert result.data == {"status": "completed", "run": str(trained), "which": "best", "metrics": {"test": tested}}


def test_the_end_of_a_run_says_which_weights_were_the_best_and_which_were_tested(run: Path, tmp_path: Path):
    result = run_command("resume", run, "--json", folder=tmp_path)  # it has ended, and is tested once more
    best = result.data["best"]
    assert [(one["epoch"], one["step"]) for one in result.data["validations"]] == [(1, 4), (2, 8)]
    assert result.data["reason"] == ""
    assert result.data["tested"] == "best" and (best["monitor"], best["mode"]) == ("val/acc", "max")
    found = {row["step"]: row["val/acc"] for row in rows(run) if "val/acc" in row}
    assert best["value"] == max(found.values()) == found[best["step"]] and best["step"] == 4 * best["epoch"]
    shown = run_command("resume", run, folder=tmp_path).out
    place = f"epoch {best['epoch']}, step {best['step']}"
    assert f"Best checkpoint: {place}: val/acc {best['value']:.6g}, higher is better\n" in shown
    assert f"best: {place}" in shown
    assert place in run_command("test", run, folder=tmp_path).out


def test_testing_changes_nothing_in_the_folder(run: Path, tmp_path: Path):
    before = files(run)
    result = run_command("test", run, "--which", "8", folder=tmp_path)
    assert result.code == 0 and re.search("acc .*[01]", result.out)
    assert files(run) == before


def test_the_weights_of_a_step_that_is_not_there_are_not_tested(trained: Path, tmp_path: Path):
    result = run_command("test", trained, "--which", "7", folder=tmp_path)
    assert (result.code, result.out) == (2, "")
    assert str(trained) in result.err and "step 7" in result.err and "4, 8" in result.err


def test_a_run_without_a_checkpoint_is_reported_with_how_to_restart(run: Path, tmp_path: Path):
    shutil.rmtree(run / "checkpoints")
    moved = run.rename(tmp_path / "my run")
    result = run_command("test", moved, folder=tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert f"`jax-trainer resume '{moved}'`" in result.err


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(run: Path, tmp_path: Path):
    (run / "checkpoints/step_00000008/state/manifest.ocdbt").write_bytes(b"not what was written")
    result = run_command("resume", run, "--json", folder=tmp_path)
    assert (result.code, result.data["status"]) == (0, "completed")
    assert result.err.count("manifest.ocdbt") == 1


def test_where_all_checkpoints_are_damaged_nothing_is_trained_and_every_reason_is_reported(run: Path, tmp_path: Path):
    for step in ("step_00000004", "step_00000008"):
        (run / "checkpoints" / step / "state/manifest.ocdbt").write_bytes(b"not what was written")
    before = files(run)
    for command in ("test", "resume"):
        result = run_command(command, run, folder=tmp_path)
        assert (result.code, result.out, result.err.count("\n")) == (1, "", 1)
        assert "Traceback" not in result.err and "step_00000004 is damaged" in result.err
        assert "step_00000008 is damaged" in result.err
    expected = {
        name: files(run)[name] for name in ("run.lock", "run.log", "time.jsonl")
    }  # the log says that nothing was resumed
    assert files(run) == {**before, **expected}


def test_resuming_a_finished_run_trains_nothing_and_tests_again(run: Path, tmp_path: Path):
    before, step = last_state(run)
    numbers = rows(run)
    result = run_command("resume", run, "--json", folder=tmp_path)
    assert (result.code, list(result.data["metrics"])) == (0, ["1", "2", "test"])  # as it had found
    assert result.err.count("\n") == 1 and "step 8" in result.err  # is complete
    after, step_after = last_state(run)
    assert step == step_after == 8
    assert_same_bits(before, after)
    without_time = [{name: value for name, value in row.items() if name != "test/time"} for row in rows(run)]
    assert without_time == [{name: value for name, value in row.items() if name != "test/time"} for row in numbers]


def test_resuming_with_more_epochs_trains_further(run: Path, tmp_path: Path):
    result = run_command("resume", run, "trainer.train_epochs=3", "--json", folder=tmp_path)
    assert (result.code, result.err, list(result.data["metrics"])) == (0, "", ["1", "2", "3", "test"])
    assert [row["step"] for row in rows(run)] == [4, 4, 8, 8, 12, 12, 12]
    assert last_state(run)[1] == 12


def test_a_run_is_resumed_wherever_its_folder_was_moved_to(run: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = run.rename(elsewhere / "my run's folder")
    for command in ("test", "resume"):
        result = run_command(command, moved.name, "--json", folder=elsewhere)
        assert (result.code, result.data["run"]) == (0, str(moved))
    assert [path.name for path in elsewhere.iterdir()] == [moved.name]


def test_a_run_without_validation_is_trained_tested_and_resumed(tmp_path: Path):
    file, change = tiny_file(tmp_path), "trainer.check_val_every_n_epoch=0"
    result = run_command("train", file, change, "--json", "trainer.max_steps=4", folder=tmp_path)
    assert result.code == 0 and list(result.data["metrics"]) == ["1", "test"]
    assert "no validation" in result.err
    tested = run_command("test", result.data["run"], "--json", folder=tmp_path)
    assert (tested.code, tested.data["metrics"]["test"]) == (0, result.data["metrics"]["test"])


def test_nothing_is_advised_that_cannot_be_done(tmp_path: Path):
    result = run_command(
        "train", tiny_file(tmp_path), "trainer.callbacks={}", "trainer.fast_dev_run=1", folder=tmp_path
    )
    assert result.code == 0
    assert "Run folder: runs/MLP/" in result.out and "jax-trainer test" not in result.out
    [command] = re.findall("^Next: jax-trainer (.*?)  #", result.out, re.MULTILINE)
    assert run_command(*command.split(), folder=tmp_path).code == 0


def test_a_version_that_exists_is_reported_with_how_to_resume(tmp_path: Path):
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "something").touch()
    tool = "{class_name: TensorboardToolLogger, version: one, save_dir: runs}"
    result = run_command("train", tiny_file(tmp_path), f"trainer.logger.tool_config={tool}", folder=tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "already exists" in result.err and "jax-trainer resume" in result.err


def test_a_log_dir_that_cannot_be_created_is_reported(tmp_path: Path):
    file = tiny_file(tmp_path)
    result = run_command("train", file, f"trainer.logger.log_dir={file}", folder=tmp_path)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "run folder" in result.err and str(file) in result.err


def test_labels_that_the_model_has_no_outputs_for_are_reported_without_a_traceback(tmp_path: Path):
    for command in ("check", "train"):
        result = run_command(command, tiny_file(tmp_path), "trainer.num_classes=3", folder=tmp_path)
        assert (result.code, result.out) == (1, "")
        assert "Traceback" not in result.err
        assert "batch.target holds 9" in result.err and "0 to 2" in result.err


def test_checking_shows_what_would_be_trained(tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "out.kernel" in result.out and "16 × 10" in result.out and "float32" in result.out
    assert "1,210 in 4 arrays" in result.out and "params 4.84 kB" in result.out and "steps: 8" in result.out
    assert "uint8[32, 8, 8, 1]" in result.out


def test_checking_gives_scripts_the_same(tmp_path: Path):
    data = run_command("check", tiny_file(tmp_path, TINY), "--json", folder=tmp_path).data
    in_first, in_last = 8 * 8 * 16 + 16, 16 * 10 + 10
    assert data["parameter_count"] == sum(leaf["bytes"] for leaf in data["parameters"]) // 4 == in_first + in_last
    sizes = data["state_bytes"]
    assert sizes["params"] == 4 * (in_first + in_last)
    assert 2 * sizes["params"] <= sizes["opt_state"] < 2 * sizes["params"] + 100  # two moments, and counters
    assert (data["steps"], data["status"]) == (8, "completed")


def test_checking_shows_which_devices_would_hold_what(tmp_path: Path):
    changes = ("trainer.mesh.fsdp=4", "trainer.sharding.smallest=1")
    result = run_command("check", tiny_file(tmp_path), *changes, folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    assert "8 devices: data 2, fsdp 4, tensor 1" in result.out
    assert "evenly" in result.out
    data = run_command("check", tiny_file(tmp_path), *changes, "--json", folder=tmp_path).data["layout"]
    rows = {row["leaf"]: row for row in data["parameters"]}
    assert (rows["out.kernel"]["spec"], rows["out.kernel"]["bytes_per_device"]) == ("fsdp", 16 * 10 * 4 // 4)
    assert data["shares"]["all"]["per_device"] < data["shares"]["all"]["bytes"] / 3
    assert run_command("check", tiny_file(tmp_path), "--json", folder=tmp_path).data["layout"] is None


def test_devices_that_are_not_there_are_reported_with_their_line(tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), "trainer.mesh.fsdp=3", folder=tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "trainer.mesh: " in result.err and "fsdp: 3" in result.err and "multiple of 3" in result.err


def test_checking_compiles_the_step_on_request(tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), "--find-batch", "--memory", "100MB", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    lines = dict(line.strip().split(": ", 1) for line in result.out.splitlines() if ": " in line)
    assert lines["memory"].endswith("fits")
    assert {"compiled for", "of the step", "time", "largest batch"} <= lines.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.slow
def test_checking_fails_if_the_training_does_not_fit(tmp_path: Path):
    options = ("--compile", "--memory", "1kB", "--json")
    result = run_command("check", tiny_file(tmp_path), *options, folder=tmp_path)
    found = result.data["preflight"]
    assert (result.code, found["fits"], found["limit"], found["found"]) == (1, False, 1000, None)
    assert "does not fit" in result.err


def test_checking_compiles_for_more_devices(tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), "--compile", "--devices", "4", "--json", folder=tmp_path)
    assert result.data["preflight"]["devices"] == "4 × cpu"
    result = run_command("check", tiny_file(tmp_path), "--devices", "64", folder=tmp_path)
    assert (result.code, "64 devices" in result.err) == (2, True)


def test_checking_refuses_wrong_sizes(tmp_path: Path, subtests):
    for number, option in enumerate([("--memory", "4 apples"), ("--devices", "none")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(option=option):
            result = run_command("check", tiny_file(folder), *option, folder=folder)
            assert result.code == 2
            assert all(word in result.err for word in option)


def test_the_learning_rate_finder_suggests_a_rate_and_writes_only_its_figure(tmp_path: Path):
    file = tiny_file(tmp_path, QUICK)
    before = files(tmp_path)
    command = ("lr-find", file, "dataset.global_batch_size=128", "--min-lr", "1e-5", "--max-lr", "10")
    result = run_command(*command, "--json", "--plot", "curve.svg", folder=tmp_path)
    assert (result.code, result.err) == (0, "") and 1e-3 < result.data["suggestion"] < 10
    assert len(result.data["rates"]) == len(result.data["losses"]) <= 100
    assert files(tmp_path).keys() - before.keys() == {"curve.svg"}
    flat = run_command("lr-find", file, "--min-lr", "1e-9", "--max-lr", "1e-8", "--steps", "20", folder=tmp_path)
    assert flat.code == 1 and "No learning rate can be suggested" in flat.err


def test_the_learning_rate_finder_refuses_wrong_arguments(tmp_path: Path, subtests):
    for number, (options, named) in enumerate(
        [(("--min-lr", "1", "--max-lr", "0.1"), "--min-lr 1"), (("--steps", "3"), "20"), (("--plot", "a.txt"), "a.txt")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(options=options):
            result = run_command("lr-find", tiny_file(folder), *options, folder=folder)
            assert result.code == 2 and named in result.err


def test_checking_trains_nothing_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TrainerModule, "train_model", lambda *_, **__: pytest.fail("it trains"))
    monkeypatch.setattr(Plan, "__init__", lambda *_, **__: pytest.fail("it plans to train"))
    file = tiny_file(tmp_path)
    before = files(tmp_path)
    assert run_command("check", file, "--quiet", folder=tmp_path).code == 0
    assert files(tmp_path) == before and [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("change", "key", "value"),
    [
        ("trainer.max_steps=3", "steps", 3),
        ("trainer.max_steps=0x10", "steps", 8),
        ("trainer={class_name: ImgClassifierTrainer, num_classes: 10, max_steps: 1_0}", "steps", 10),
        pytest.param("model.hidden=[8, 8]", "parameter_count", 682, marks=pytest.mark.slow),
        ("dataset.global_batch_size=16", "batch", {"input": "uint8[16, 8, 8, 1]", "target": "int32[16]"}),
        ("optimizer={class_name: SGD, momentum: null}", "steps", 8),
        ("optimizer.learning_rate=1e-2", "steps", 8),
    ],
)
def test_an_override_is_read_like_the_file(change: str, key: str, value: object, tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), "--json", change, folder=tmp_path)
    assert (result.code, result.data.get(key)) == (0, value)


def test_references_see_overrides(tmp_path: Path):
    result = run_command("check", tiny_file(tmp_path), "--json", "trainer.num_classes=12", folder=tmp_path)
    shapes = {leaf["path"]: leaf["shape"] for leaf in result.data["parameters"]}
    assert shapes["out.kernel"] == [16, 12]


def test_of_two_overrides_of_one_key_the_last_one_counts(tmp_path: Path):
    changes = ["trainer.max_steps=3", "trainer.max_steps=5"]
    assert run_command("check", tiny_file(tmp_path), "--json", *changes, folder=tmp_path).data["steps"] == 5


def test_what_the_data_makes_impossible_is_reported_with_its_line(tmp_path: Path):
    file = tiny_file(tmp_path, QUICK.replace("num_classes: ${trainer.num_classes}", "num_classes: 7"))
    result = run_command("check", file, folder=tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "tiny.yaml:5: trainer.num_classes: " in result.err


def test_an_experiment_without_any_limit_is_refused_before_its_data_is_loaded(tmp_path: Path, monkeypatch, subtests):
    for number, command in enumerate(["check", "train", "tune"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(command=command):
            monkeypatch.setattr(DigitsDataset, "__init__", lambda self, config: pytest.fail("the data was loaded"))
            file = tiny_file(folder, TINY.replace("  train_epochs: 2\n", ""))
            space = folder / "space.yaml"
            space.write_text("optimizer.learning_rate.peak_value: {low: 1e-4, high: 1e-2}\n")
            options = ["--space", str(space), "--trials", "1"] if command == "tune" else []
            result = run_command(command, file, *options, folder=folder)
            assert (result.code, result.out) == (2, "")
            assert "trainer.train_epochs" in result.err and "`max_steps`" in result.err and "`max_time`" in result.err
            assert not [*folder.rglob("config.yaml")]


def test_the_limit_that_was_given_decides(tmp_path: Path):
    file = tiny_file(tmp_path, QUICK.replace("train_epochs: 2", "max_steps: 8"))
    result = run_command("train", file, "--json", folder=tmp_path)
    assert result.code == 0, result.err
    assert [row["step"] for row in rows(Path(tmp_path / result.data["run"]))] == [4, 4, 8, 8, 8]
