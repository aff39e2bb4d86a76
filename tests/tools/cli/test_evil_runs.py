"""The folder of a run may come from somebody else: nothing in it runs, and nothing outside of it is read or written."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorstore

from jax_trainer.checkpoint.record import write_manifest
from tests.tools.cli.cli_runs import run_command, watched

STEP, EARLIER = "checkpoints/step_00000008", "checkpoints/step_00000004"


class Evil:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("canary",)


def put(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)


def signed(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """With digests that fit: whoever changes a checkpoint can write those, too."""

    def change_both(run: Path) -> None:
        change(run)
        write_manifest(run / STEP)

    return change_both


def in_config(old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / "config.yaml").read_text()
        assert old in text
        (run / "config.yaml").write_text(text.replace(old, new, 1))

    return change


def in_record(**changed: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = run / STEP / "checkpoint.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed, indent=1))

    return signed(change)


def huge(run: Path) -> None:
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{run / STEP / 'state'}/"}).result()
    name = "(small)/.zarray"
    store[name] = json.dumps(json.loads(store[name]) | {"shape": [10**12]}).encode()


def linked(name: str) -> Callable[[Path], None]:
    """Puts a link to something of the user's in place of a file or folder of the run."""

    def change(run: Path) -> None:
        theirs = run.parent / "theirs"
        if (run / name).is_dir():
            shutil.move(run / name, theirs / run.name)
        else:
            (theirs / run.name).write_text("what somebody else wrote\n")
            (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(theirs / run.name)

    return change


def piped(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return change


def linked_data(run: Path) -> None:
    [file] = (run / STEP / "state" / "d").iterdir()
    file.unlink()
    file.symlink_to("/etc/passwd")


def in_manifest(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        file = run / STEP / "MANIFEST.json"
        content = json.loads(file.read_text())
        content["files"][name] = {"size": 1, "sha256": "0" * 64}
        file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

    return change


# what was done to a run, the exit code, and a part of the message
REFUSED: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "a class name of code": (in_config("class_name: MLP", "class_name: os.system"), 2, "found 'os.system'"),
    "a class name of ours as code": (
        in_config("ImgClassifierTrainer", "jax_trainer.trainer.TrainerModule"),
        2,
        "found 'jax",
    ),
    "a tag": (in_config("seed: 42", "seed: !!python/object/apply:os.mkdir [canary]"), 2, "Tags"),
    "an unknown key": (in_config("seed: 42", "checkpoint_conversion_fn: os.system"), 2, "no key"),
    "a configuration that is a link": (linked("config.yaml"), 2, "link"),
    "a configuration that is a pipe": (piped("config.yaml"), 2, "config.yaml"),
    "numbers that are a link": (linked("metrics.jsonl"), 2, "metrics.jsonl is a link"),
    "numbers on their way that are a link": (linked("metrics.partial"), 2, "metrics.partial is a link"),
    "numbers that are a pipe": (piped("metrics.jsonl"), 2, "metrics.jsonl is a link or a device"),
    "messages that are a link": (linked("run.log"), 2, "run.log is a link"),
    "checkpoints that are a link": (linked("checkpoints"), 2, "checkpoints is a link"),
    "a checkpoint that is a link": (linked(STEP), 1, "step_00000008 is not a folder"),
    "data that is a link": (linked_data, 1, "is a link"),
    "a class path in the record": (in_record(_class_path="os.system"), 1, "has an unknown '_class_path'"),
    "a state with a class path": (in_record(metrics={"val/acc": {"__reduce__": "os.system"}}), 1, "metrics must be"),
    "another format": (in_record(format=999), 1, "format 999"),
    "a shape of 10^12": (signed(huge), 1, "uint8[1000000000000]"),
    "a pickle in the checkpoint": (
        lambda run: put(run, f"{STEP}/x.pkl", pickle.dumps(Evil())),
        1,
        "x.pkl",
    ),
    "digests that are a link": (linked(f"{STEP}/MANIFEST.json"), 1, "MANIFEST.json"),
    "digests of other files": (in_manifest("../../config.yaml"), 1, "missing: ../../config.yaml"),
    "digests of the user's files": (in_manifest("/etc/passwd"), 1, "missing: /etc/passwd"),
    "an array without content of 10^12": (
        in_record(small={"params.x": ["float32", [10**12, 0], 0]}),
        1,
        "index of small arrays",
    ),
}
# what may be there, and is not looked at
FINE: dict[str, Callable[[Path], None]] = {
    "a pickle beside the configuration": lambda run: put(run, "config.pkl", pickle.dumps(Evil())),
    "a pickle that a checkpoint says it has": signed(lambda run: put(run, f"{STEP}/x.pkl", pickle.dumps(Evil()))),
    "a pickle among the arrays": signed(lambda run: put(run, f"{STEP}/state/data.pkl", pickle.dumps(Evil()))),
    "a module": lambda run: put(run, "sitecustomize.py", b"import os; os.mkdir('canary')"),
}


@pytest.fixture(scope="module", params=[pytest.param("", marks=pytest.mark.slow)])
def report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process result and did that tested and resumed all of them."""
    folder = tmp_path_factory.mktemp("evil-runs")
    (folder / "theirs").mkdir()
    for name in ("good", *REFUSED, *FINE):
        shutil.copytree(trained, folder / name)
        shutil.rmtree(folder / name / EARLIER)  # or that would be taken instead
    for name, change in {**{name: row[0] for name, row in REFUSED.items()}, **FINE}.items():
        change(folder / name)
    theirs = contents(folder / "theirs")
    first = [["test", "good"], ["resume", "good", "--quiet"], ["test", "missing"], ["ckpt", "good", "--quiet"]]
    commands = [[command, name] for name in (*REFUSED, *FINE) for command in ("ckpt", "test", "resume")]
    jobs = {"first": first, "watched": commands, "writable": str(folder), "forbidden": "import exec"}
    made = watched(jobs, folder)
    assert [one["code"] for one in made["first"]] == [0, 0, 2, 0]
    named = {f"{command} {name}": one for (command, name), one in zip(commands, made["watched"], strict=True)}
    is_left_alone = contents(folder / "theirs") == theirs and not (folder / "canary").exists()
    return {**made, "by_name": named, "is_left_alone": is_left_alone}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["test", "resume"])
def test_a_run_that_was_tampered_with_is_refused_in_words(command: str, name: str, report: dict[str, Any]):
    _, code, expected = REFUSED[name]
    one = report["by_name"][f"{command} {name}"]
    assert (one["code"], one["out"]) == (code, "")
    assert expected in one["err"]
    assert 'tools/cli/main.py", line' not in one["err"]


@pytest.mark.parametrize("name", FINE)
def test_what_else_is_there_is_not_looked_at(name: str, report: dict[str, Any]):
    assert [report["by_name"][f"{command} {name}"]["code"] for command in ("test", "resume")] == [0, 0]


def test_checkpoints_of_somebody_else_are_listed_or_refused(report: dict[str, Any]):
    listed = {name: one for name, one in report["by_name"].items() if name.startswith("ckpt ")}
    assert {one["code"] for one in listed.values()} == {0, 2}
    refused = {name for name, one in listed.items() if one["code"] == 2}
    assert refused == {"ckpt checkpoints that are a link"}
    damaged = {name for name, one in listed.items() if "damaged:" in one["out"]}
    assert {"ckpt data that is a link", "ckpt a pickle in the checkpoint", "ckpt a class path in the record"} <= damaged
    assert not any(f"ckpt {name}" in damaged for name in FINE)


def test_nothing_is_run_and_nothing_outside_is_touched(report: dict[str, Any]):
    assert {name: one["events"] for name, one in report["by_name"].items() if one["events"]} == {}
    assert report["is_left_alone"]


def test_nothing_large_is_allocated(report: dict[str, Any]):
    assert report["grown_kb"] < 100_000


def test_the_folder_itself_may_be_reached_by_a_link(run: Path, tmp_path: Path):
    (tmp_path / "latest").symlink_to(run)
    assert run_command("test", "latest", "--quiet", folder=tmp_path).code == 0
