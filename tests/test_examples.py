"""The examples run, shrunk (`make examples`: complete), and do what they say. Older ones are in tests/test_docs.py."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "examples.md").read_text()


def run(name: str, **options: Any) -> Any:
    """What `main` of an example returns."""
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](**options)


# shrunk, and what must be true of the result
SHORT: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "physics_informed": ({"epochs": 1}, lambda found: 0 < found["error"] < 2),
    "own_callback": ({"epochs": 2}, lambda found: found["epochs"] == 2 and len(found["rows"]) == 5),
    "train_loop": ({"steps": 20, "every": 10, "tolerated": 0}, lambda found: found["step"] == 20),
}
# complete, with what their comments promise
COMPLETE: dict[str, tuple[dict[str, Any], Callable[[Any], bool]]] = {
    "physics_informed": ({}, lambda found: found["error"] < 0.1),
    "equinox_model": ({}, lambda found: found["acc"] > 0.93),
    "own_callback": ({}, lambda found: found["epochs"] < 30),
    "train_loop": ({}, lambda found: found["step"] < 600 and found["worst"] <= 3),
    "text": ({"epochs": 1, "characters": 60_000}, lambda found: found["bits"] < 5 and found["text"].startswith("The ")),
    "autoencoder": ({}, lambda found: found["mse"] < 0.02),
    "ensemble_uncertainty": ({}, lambda found: found["rmse"] < 0.9 and found["outside"] > 2 * found["inside"]),
    "flow_matching": ({}, lambda found: found["loss"] < 0.75 and np.isfinite(found["means"]).all()),
    "fine_tuning": ({}, lambda found: found["tuned"] > max(0.85, found["scratch"])),
    "train_fn_sharded": ({}, lambda found: min(found["acc"], found["averaged"]) > 0.9),
    "files_dataset": ({}, lambda found: found["acc"] > 0.9 and found["files"] == 1797),
}


@pytest.mark.parametrize(
    ("name", "options", "is_right"),
    [
        *(pytest.param(name, *case, id=f"short-{name}") for name, case in SHORT.items()),
        *(pytest.param(name, *case, id=name, marks=pytest.mark.example) for name, case in COMPLETE.items()),
    ],
)
def test_an_example_keeps_its_promise(name: str, options: Any, is_right: Any, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = run(name, **options)
    assert is_right(found), found


@pytest.mark.example
def test_the_example_with_several_processes_has_one_loss(tmp_path: Path):
    words = ["--epochs", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "several_processes.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    assert (first["process"], second["process"]) == (0, 1)
    assert first["devices"] == second["devices"] == 2 and first["loss"] == second["loss"]


def test_every_example_is_listed_with_one_line_and_is_tested():
    names = {file.stem for file in (ROOT / "examples").glob("*.py")}
    older = {"cifar10_speedrun", "digits", "gan_digits", "images", "learned_optimizer", "tune_digits"}
    assert names == {*COMPLETE, "several_processes", *older}
    assert [name for name in sorted(names) if f"| [{name}.py](../examples/{name}.py) |" not in PAGE] == []
