"""The code in README and docs runs as it stands, top to bottom, and the example does what it says."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from jax_trainer.trainer import load_experiment

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"{page.name}", "exec"), namespace)
    assert blocks


WITH_EXPERIMENTS = [page for page in PAGES if "```yaml" in page.read_text() and "\ntrainer:" in page.read_text()]


@pytest.mark.parametrize("page", WITH_EXPERIMENTS, ids=lambda page: page.name)
def test_the_experiments_of_a_page_can_be_read(page: Path, tmp_path: Path):
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    experiments = [block for block in blocks if "trainer:" in block]
    assert experiments
    for block in experiments:
        file = tmp_path / "experiment.yaml"
        file.write_text(block)
        load_experiment(file)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(((?!https?:)[^)#]+)", page.read_text())
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.slow
def test_the_digits_example_reaches_97_percent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", str(tmp_path)])
    metrics = runpy.run_path(str(ROOT / "examples" / "digits.py"))["main"]()
    assert metrics["test"]["acc"] >= 0.97
    shown = capsys.readouterr().out
    assert "test" in shown
    assert str(tmp_path) in shown.replace("\n", "")
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--resident"]])
def test_the_images_example_learns_the_digits(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["images.py", "--epochs", "12", *options])
    metrics = runpy.run_path(str(ROOT / "examples" / "images.py"))["main"]()
    assert metrics["acc"] >= 0.95
    assert "Digits: test accuracy" in capsys.readouterr().out
