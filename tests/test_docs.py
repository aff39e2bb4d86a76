"""The code in README and docs runs as it stands, top to bottom; links, anchors and toctrees are right."""

import ast
import importlib
import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from compoconf import registered

from jax_trainer.config import config_path
from jax_trainer.engine import events
from jax_trainer.trainer import load_experiment
from tests.rows import each

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SITE = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
PAGES = [ROOT / "README.md", *SITE]
JAX_TRAINER = [sys.executable, "-m", "jax_trainer"]
# the first pages that a reader meets, and those of which nearly nothing is compiled
USUAL = ("README", "index", "resume", "log-metrics")
WITH_CODE = [
    pytest.param(page, marks=() if page.stem in USUAL else pytest.mark.example)
    for page in PAGES
    if "```python" in page.read_text()
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"{page.name}", "exec"), namespace)
    assert blocks


# not run: placeholders, other systems, data that is not there, and commands that do not end
NOT_RUN = re.compile(
    r"\bRUN\b|…|<|s3://|env:|--on |--coordinator|srun|gpt2|cifar10|finetune|resnet50|my_package|tune\.yaml|config\.yaml"
    r"|--watch|--follow"
)
COMMAND = re.compile(r"^(?:\w+=\S+ )?jax-trainer ", re.MULTILINE)
RUN, OTHER = "runs/CNN/20261115-142311", "runs/CNN/20261115-150102"  # as the pages call the reader's runs


def commands_of(page: Path) -> list[str]:
    """The commands of a page that can run, in order; a training takes six epochs, more than the warm-up."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    runnable = [line for line in lines if COMMAND.match(line) and not NOT_RUN.search(line)]
    return [
        re.sub(r"(jax-trainer (?:train|cv|tune) [^#]*?)( *#|$)", r"\1 trainer.train_epochs=6\2", one)
        for one in runnable
    ]


WITH_COMMANDS = [page for page in PAGES if commands_of(page)]


@pytest.fixture(scope="module")
def run_of_the_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the digits with a checkpoint every 20 steps: read-only."""
    folder = tmp_path_factory.mktemp("reader")
    short = "trainer.train_epochs=7 trainer.max_steps_per_epoch=20 trainer.callbacks.ModelCheckpoint.save_top_k=7"
    done = subprocess.run([*JAX_TRAINER, "train", "digits", *short.split(), "--json"], cwd=folder, capture_output=True)
    return Path(json.loads(done.stdout)["run"])


@pytest.mark.example
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_commands_of_a_page_run(page: Path, run_of_the_reader: Path, tmp_path: Path):
    for copy in (RUN, OTHER, "experiments/1"):
        shutil.copytree(run_of_the_reader, tmp_path / copy)
    text = page.read_text()
    experiment = yaml.safe_load(config_path("digits").read_text())
    for block in re.findall(r"```yaml\n(model:.*?)```", text, re.DOTALL):  # of the class in the page
        experiment |= yaml.safe_load(block)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(experiment))
    for name in ("my_models.py", "my_data.py"):  # up to the class that the page registers
        code = "".join(re.findall(r"```python\n(.*?)```", text.partition("```bash")[0], re.DOTALL))
        (tmp_path / name).write_text(code)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    for line in commands_of(page):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
        assert done.returncode == (2 if "misspelled" in line else 0), f"{line}\n{done.stdout}{done.stderr}"


def test_what_the_code_of_all_pages_imports_is_there():
    missing = []
    for page in PAGES:
        trees = [ast.parse(block) for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]
        imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for node in imports:
            names = [alias.name for alias in node.names if (node.module or "").startswith("jax_trainer")]
            found = importlib.import_module(node.module) if names and node.module else None
            missing += [(name_of(page), node.module, name) for name in names if not hasattr(found, name)]
    assert missing == []


WITH_EXPERIMENTS = [page for page in PAGES if "```yaml" in page.read_text() and "\ntrainer:" in page.read_text()]


@each("page", WITH_EXPERIMENTS)
def test_the_experiments_of_a_page_can_be_read(page: Path, tmp_path: Path):
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    experiments = [block for block in blocks if "trainer:" in block]
    assert experiments
    for block in experiments:
        file = tmp_path / "experiment.yaml"
        file.write_text(block)
        load_experiment(file)


def test_links_between_pages_lead_somewhere():
    dead = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", prose(page.read_text()))
        targets = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
        dead += [(name_of(page), str(target)) for target, _ in targets if not target.exists()]
        anchored = [(target, anchor) for target, anchor in targets if anchor and target.exists()]
        dead += [(name_of(page), name_of(at), anchor) for at, anchor in anchored if anchor not in anchors(at)]
    assert dead == []


def test_every_page_of_the_site_is_in_a_toctree():
    listed = Counter(page for index in SITE for page in toctree(index))
    assert not set(listed) - set(SITE)
    assert set(SITE) - set(listed) == {DOCS / "index.md"}
    assert max(listed.values()) == 1


def test_every_public_module_and_every_registered_class_has_a_page():
    text = "\n".join(page.read_text() for page in SITE)
    marks = re.findall(r"^<!-- reference: (\w+) ?(.*?) *-->$", text, re.MULTILINE)
    shown = {kind: sorted(" ".join(rest for of, rest in marks if of == kind).split()) for kind, _ in marks}
    assert shown["api"] == sorted(reference().api_modules())
    # other tests in this process may have registered interfaces of their own
    foreign = {one.__name__ for one in registered() if not one.__module__.startswith("jax_trainer")}
    foreign.add("BaseModelFunction")  # its classes are users' own
    assert shown["configuration"] == sorted({one["interface"] for one in reference().described()} - foreign)


def test_the_page_about_events_has_all_of_them():
    found = {
        name for name, thing in vars(events).items() if isinstance(thing, type) and issubclass(thing, events.Event)
    }
    page = (DOCS / "reference" / "events.md").read_text()
    assert not {name for name in found - {"Event"} if f"| `{name}` |" not in page}


def test_the_pictures_load_nothing_from_elsewhere():
    for picture in (DOCS / "images").glob("*.svg"):
        assert not re.findall(r"(?:href|src)=[\"']http|url\([\"']?http", picture.read_text())


def prose(text: str) -> str:
    """Markdown without its code, in which brackets and hashes mean something else."""
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^(```+)[^\n]*\n.*?^\1`*$", "", text, flags=re.DOTALL | re.MULTILINE))


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MyST make them."""
    text = reference().filled_in(page.read_text())
    without_code = re.sub(r"^(```+)[^\n]*\n.*?^\1`*$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", without_code, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]
    return {slug if index == 0 else f"{slug}-{index}" for slug in slugs for index in range(slugs.count(slug))}


def toctree(page: Path) -> Iterator[Path]:
    """The pages that a page lists."""
    for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
        entries = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
        for entry in entries:
            name = re.sub(r"^.*<(.*)>$", r"\1", entry)
            if ":glob:" in block:
                yield from (found for found in page.parent.glob(f"{name}.md") if found != page)
            else:
                yield (page.parent / f"{name}.md").resolve()


@cache
def reference() -> ModuleType:
    """What fills in the pages of the reference."""
    spec = importlib.util.spec_from_file_location("docs_reference", DOCS / "_ext" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.example
def test_the_digits_example_reaches_97_percent(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits.py", "--out", str(tmp_path)])
    metrics = runpy.run_path(str(ROOT / "examples" / "digits.py"))["main"]()
    assert metrics["test"]["acc"] >= 0.97
    shown = capsys.readouterr().out
    assert "test" in shown
    assert str(tmp_path) in shown.replace("\n", "")
    assert len(list(tmp_path.rglob("metrics.jsonl"))) == 1


@pytest.mark.example
@pytest.mark.parametrize("options", [[], ["--resident"]])
def test_the_images_example_learns_the_digits(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["images.py", "--epochs", "12", *options])
    metrics = runpy.run_path(str(ROOT / "examples" / "images.py"))["main"]()
    assert metrics["acc"] >= 0.95
    assert "Digits: test accuracy" in capsys.readouterr().out


@pytest.mark.example
def test_the_gan_example_draws_digits_of_all_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gan_digits.py", "--epochs", "60", "--out", str(tmp_path)])
    found = runpy.run_path(str(ROOT / "examples" / "gan_digits.py"))["main"]()
    assert found["recognised"] >= 0.5 and found["rarest"] >= 0.02, found
    assert len(list(tmp_path.rglob("samples.png"))) == 1


@pytest.mark.example
def test_the_learned_optimizer_is_better_than_adam_and_the_same_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["learned_optimizer.py", "--epochs", "3", "--out", str(tmp_path)])
    found = runpy.run_path(str(ROOT / "examples" / "learned_optimizer.py"))["main"]()
    assert found["learned"] == found["by name"] < found["adam"]
