"""A configuration is data: whatever it says, nothing is imported, run, connected to or written."""

from typing import Any

import pytest

from tests.tools.cli.bad_yamls import BAD, FILE
from tests.tools.cli.cli_runs import TINY, watched

SECTIONS = {
    "trainer": "trainer: {{class_name: {name}}}",
    "model": "model: {{class_name: {name}}}",
    "optimizer": "optimizer: {{class_name: {name}}}",
    "schedule": "optimizer: {{class_name: SGD, learning_rate: {{class_name: {name}}}}}",
    "transform": "optimizer: {{class_name: SGD, transforms: {{a: {{class_name: {name}}}}}}}",
    "dataset": "dataset: {{class_name: {name}}}",
    "callback": "trainer: {{class_name: TrainerModule, callbacks: {{a: {{class_name: {name}}}}}}}",
    "tool": "trainer: {{class_name: TrainerModule, logger: {{tool_config: {{class_name: {name}}}}}}}",
}
NAMES = [
    "os.system", "'os:system'", "builtins.eval", "logging.os.system", "../x", '"__import__(1)"', "subprocess.Popen",
    "jax_trainer.trainer.ImgClassifierTrainer", "compoconf.load", "GroupConfig", "__main__", "[AdamW]", "{a: AdamW}",
    "true", "''", '"AdamW\\0"', "antigravity", "AdamW.__init__",
]  # fmt: skip
TEXTS = {
    "a tag that calls": TINY + "seed: !!python/object/apply:os.system ['touch canary']\n",
    "a tag that makes": TINY + "seed: !!python/object/new:subprocess.Popen [[touch, canary]]\n",
    "a tag that names": TINY + "seed: !!python/name:os.system\n",
    "a tag that imports": TINY + "seed: !!python/module:antigravity\n",
    "a tag at the root": "!!python/object/apply:os.system ['touch canary']\n",
    "a tag of one's own": TINY + "seed: !env HOME\n",
    "a bomb of aliases": "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 30)),
    "a bomb of references": TINY
    + "a0: xxxxxxxxxx\n"
    + "".join(f"a{n}: {f'${{a{n - 1}}}' * 10}\n" for n in range(1, 20)),
    "a bomb of lists": "a: " + "[" * 10_000 + "]" * 10_000,
    "a bomb of sections": "\n".join(" " * n + "a:" for n in range(300)),
    "a bomb of keys": "\n".join(f"{'k' * 500}{n}: 1" for n in range(180)),
    "a bomb of wrong keys": "\n".join(f"k{n}: 1" for n in range(9_000)),
    "code in a value": TINY.replace("train_epochs: 2", "train_epochs: \"__import__('os').system('touch canary')\""),
    "code in a reference": TINY.replace("${trainer.num_classes}", "${__import__('os').system('touch canary')}"),
    "the environment in a reference": TINY.replace("${trainer.num_classes}", "${env.HOME}"),
    "a key that other tools obey": TINY.replace("class_name: MLP", "class_name: MLP\n  _target_: os.system"),
    "an inner name as a key": TINY.replace("class_name: MLP", "class_name: MLP\n  __class__: os.system"),
    "a key of the object": TINY.replace("class_name: MLP", "class_name: MLP\n  __post_init__: 1"),
    "an include of a pipe": f"include: [/dev/stdin.yaml, /dev/zero]\n{TINY}",
    "a regular expression that never ends": TINY + "x: '" + "(a+)+" * 50 + "'\n",
}


CONTROL = """
import os, socket, subprocess
import wave  # one that nobody has imported yet
os.system("true")
subprocess.run(["true"])
open("control-was-here", "w").close()
os.mkdir("control-made-this")
try:
    socket.create_connection(("127.0.0.1", 9), timeout=0.1)
except OSError:
    pass
"""


def evil_texts() -> dict[str, str]:
    named = {
        f"{where} {name}": text.format(name=name)
        for where, text in SECTIONS.items()
        for name in (NAMES if where == "model" else NAMES[:5])  # every section finds its classes by the same function
    }
    return {**named, **TEXTS}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process result and did that was given all of them, and all that is merely wrong."""
    folder = tmp_path_factory.mktemp("evil")
    (folder / "good.yaml").write_text(TINY)
    texts = evil_texts()
    for number, text in enumerate(texts.values()):
        (folder / f"{number}.yaml").write_text(text)
    for number, bad in enumerate(BAD):
        (folder / f"bad{number}").mkdir()
        (folder / f"bad{number}" / FILE).write_bytes(bad.as_bytes)
    commands = [["train", f"{number}.yaml"] for number in range(len(texts))]
    commands += [["check", f"bad{number}/{FILE}", *bad.overrides] for number, bad in enumerate(BAD)]
    commands += [["check", "good.yaml", f"model.class_name={name}"] for name in NAMES]
    commands += [["describe", "--import", "control.py"]]
    (folder / "control.py").write_text(CONTROL)
    first = [["describe", "--json"], ["schema", "--json"], ["train", "missing.yaml"], ["train", "good.yaml", "a=1"]]
    jobs = {"first": first, "watched": commands, "writable": "", "forbidden": "import exec compile"}
    before = {path.name for path in folder.iterdir()}
    report = watched(jobs, folder)
    control = report["watched"].pop()
    names = [*texts, *(bad.name for bad in BAD), *(f"override {name}" for name in NAMES)]
    made = {path.name for path in folder.iterdir()} - before - {"__pycache__"}  # of control.py
    return {**report, "by_name": dict(zip(names, report["watched"], strict=True)), "made": made, "control": control}


def test_what_happens_would_be_seen(report: dict[str, Any]):
    kinds = {event.split()[0] for event in report["control"]["events"]}
    assert kinds >= {"exec", "os.system", "open", "import", "subprocess.Popen", "socket.connect", "os.mkdir"}


def test_all_of_it_is_refused_without_a_traceback(report: dict[str, Any]):
    assert {name: one["code"] for name, one in report["by_name"].items() if one["code"] != 2} == {}
    assert [name for name, one in report["by_name"].items() if "Traceback" in one["err"] or one["out"]] == []


def test_nothing_is_imported_run_connected_to_or_written(report: dict[str, Any]):
    assert {name: one["events"] for name, one in report["by_name"].items() if one["events"]} == {}
    assert report["made"] == {"control-was-here", "control-made-this"}  # and no canary


def test_no_device_is_touched(report: dict[str, Any]):
    assert report["devices"] == 0


def test_a_hostile_file_takes_neither_time_nor_memory(report: dict[str, Any]):
    assert {name: one["seconds"] for name, one in report["by_name"].items() if one["seconds"] > 1} == {}
    assert report["grown_kb"] < 50_000


def test_messages_stay_readable(report: dict[str, Any]):
    longest = max(report["by_name"].values(), key=lambda one: len(one["err"]))
    assert len(longest["err"]) < 60_000
    assert [name for name, one in report["by_name"].items() if "\x1b" in one["err"] or "\0" in one["err"]] == []
