"""`jax-trainer report`: one page about runs, without importing JAX."""

import json
import subprocess
import sys
from pathlib import Path

from tests.tools.cli.cli_runs import run_command

SCRIPT = (
    "import sys; from jax_trainer.tools.cli import main; code = main(sys.argv[1:]); print(code, 'jax' in sys.modules)"
)


def test_a_trained_run_has_a_page(trained: Path, tmp_path: Path):
    result = run_command("report", trained, "--json", folder=tmp_path)
    assert (result.code, result.err) == (0, "")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert result.data["report"] == str(tmp_path / "report.html") and result.data["bytes"] == len(page.encode())
    assert result.data["notes"] == [] and len(result.data["runs"]) == 1
    for text in ("val/acc", "MLP", "completed", "model.hidden", "latest"):
        assert text in page


def test_the_command_needs_no_jax(trained: Path, tmp_path: Path):
    words = ["report", str(trained), "-o", "x.html", "-q"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "False"] and (tmp_path / "x.html").exists()


def test_what_cannot_be_shown_is_said(run: Path, tmp_path: Path, subtests):
    (tmp_path / "empty").mkdir()
    rows: list[tuple[list[str], int, str]] = [
        (["missing"], 2, "missing"),
        (["empty"], 2, "config.yaml"),
        (["run", "-o", "page.txt"], 2, "page.txt"),
        (["run", "-o", "nowhere/page.html"], 1, "nowhere/page.html"),
        (["a\0b"], 2, "a"),
        (["run", "-o", "a\0b.html"], 1, "written"),
        ([], 2, "RUN"),
    ]
    for words, code, named in rows:
        with subtests.test(words=words):
            result = run_command("report", *words, "--json", folder=tmp_path)
            assert result.code == code and named in result.err and "Traceback" not in result.err
            assert json.loads(result.out)["status"] == "failed"
            assert {file.name for file in tmp_path.iterdir()} == {"empty", "run"}
