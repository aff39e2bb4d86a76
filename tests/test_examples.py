"""The examples run, shrunk (`make examples`: complete), and do what they say. Older ones are in tests/test_docs.py."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest

from jax_trainer.datasets.examples import DigitsConfig, DigitsDataset
from jax_trainer.models import MLPConfig
from jax_trainer.testing import assert_close
from jax_trainer.tools.exporting.exporting import export_run
from jax_trainer.trainer import ImgClassifierTrainer

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


class Served(NamedTuple):
    """A model that `serve_exported` serves, with batches of at most 8."""

    address: str
    trainer: Any

    def ask(self, path: str, body: bytes | None = None) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(self.address + path, body, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def predict(self, images: Any) -> tuple[int, Any]:
        return self.ask("/predict", json.dumps({"inputs": images}).encode())


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served") / "digits"
    model: Any = MLPConfig(num_classes=10, hidden=(8,))
    data = DigitsDataset(DigitsConfig(global_batch_size=32))
    trainer = ImgClassifierTrainer(model_config=model, optimizer=optax.sgd(0.1), dataset=data)
    export_run(trainer, folder, verify=False)
    command = [sys.executable, str(ROOT / "examples" / "serve_exported.py"), str(folder), "--port=0", "--max-batch=8"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log)):
            line = process.stderr.readline()
            assert line, log
            log += line
        yield Served(found[0], trainer)
        process.terminate()


@pytest.mark.example
def test_the_example_that_serves_an_export_answers_what_the_trainer_predicts(served):
    images, parts = served.trainer.dataset.test.input[:20], [0, 1, 4, 12, 20]
    expected = served.trainer.predict(served.trainer.dataset.test_loader)[:20]
    with ThreadPoolExecutor(4) as pool:  # at once, of several sizes
        pieces = [images[start:end].tolist() for start, end in pairwise(parts)]
        answers = list(pool.map(served.predict, pieces))
    assert [status for status, _ in answers] == [200] * 4
    assert_close(np.concatenate([np.asarray(one["outputs"]["output"], np.float32) for _, one in answers]), expected)
    assert served.ask("/health") == (200, {"status": "alive"})
    status, facts = served.ask("/model")
    assert (status, facts["model"], facts["classes"][3]) == (200, "MLP", "3")
    assert facts["inputs"] == [{"name": "input", "dtype": "uint8", "shape": ["batch", 8, 8, 1]}]


@pytest.mark.example
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_request_of_the_page_about_serving_is_answered(served, tmp_path):
    page = (ROOT / "docs/how-to/serve-a-model.md").read_text()
    lines = re.findall(r"^(?:python -c|curl) .*", page, re.MULTILINE)
    script = "\n".join(lines).replace("localhost:8000", served.address.removeprefix("http://"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True)
    assert len(json.loads(done.stdout)["outputs"]["output"][0]) == 10, done


IMAGE = np.zeros((8, 8, 1), int).tolist()
REFUSED: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b"{", 400, "JSON"),
    "nested too deeply": (b"[" * 10_000, 400, "JSON"),
    "no inputs": (b"[]", 400, "inputs"),
    "another input": (b'{"inputs": {"image": []}}', 400, "image"),
    "no examples": (b'{"inputs": []}', 400, "shape.*0"),
    "another shape": (b'{"inputs": [[1, 2]]}', 400, "1, 2"),
    "ragged": (b'{"inputs": [[[[1]], [[1], [2]]]]}', 400, "ragged"),
    "a text": (json.dumps({"inputs": [[[["1"]] * 8] * 8]}).encode(), 400, "no numbers"),
    "a number that is too large": (json.dumps({"inputs": [[[[256]] * 8] * 8]}).encode(), 400, "256"),
    "a fraction": (json.dumps({"inputs": [[[[0.5]] * 8] * 8]}).encode(), 400, "0.5"),
    "NaN": (json.dumps({"inputs": [[[[float("nan")]] * 8] * 8]}).encode(), 400, "nan"),
    "too many examples": (json.dumps({"inputs": [IMAGE] * 9}).encode(), 400, "1 to 8"),
    "a body that is too large": (b" " * (1024 + 32 * 8 * 64 + 1), 413, "17408"),
}


@pytest.mark.example
@pytest.mark.parametrize("name", REFUSED)
def test_the_example_that_serves_an_export_refuses_a_wrong_body_with_a_reason_and_continues(served, name):
    body, status, words = REFUSED[name]
    found, answer = served.ask("/predict", body)
    assert found == status and re.search(words, answer["error"]), answer
    assert served.predict([IMAGE])[0] == 200


@pytest.mark.example
def test_the_example_that_serves_an_export_accepts_the_longest_numbers_of_a_whole_batch(served):
    body = json.dumps({"inputs": np.full((8, 8, 8, 1), 255.0).tolist()}).replace("255.0", "2.5500000000000000e+002")
    assert served.ask("/predict", body.encode())[0] == 200


def test_every_example_is_listed_with_one_line_and_is_tested():
    names = {file.stem for file in (ROOT / "examples").glob("*.py")}
    older = {"cifar10_speedrun", "digits", "gan_digits", "images", "learned_optimizer", "tune_digits"}
    assert names == {*COMPLETE, "serve_exported", "several_processes", *older}
    assert [name for name in sorted(names) if f"| [{name}.py](../examples/{name}.py) |" not in PAGE] == []
