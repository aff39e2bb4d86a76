"""Files that try to run code, or to use up time and memory, are refused; and an audit hook sees nothing happen."""

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.config import ConfigError, config_from, load_config
from tests.config.config_things import Sketch, written
from tests.rows import each

FORBIDDEN = """
    import exec compile os.system os.exec os.fork os.posix_spawn subprocess.Popen pickle.find_class socket.connect
    socket.getaddrinfo ctypes.dlopen os.remove os.rename os.mkdir os.chmod os.putenv
"""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
_watched: list[int] = []  # the thread that is watched, if any: a hook cannot be taken away again
_seen: list[str] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if threading.get_ident() in _watched:
        writes = event == "open" and isinstance(args[2], int) and args[2] & WRITING
        if event in FORBIDDEN.split() or writes:
            _seen.append(f"{event} {args[:2]}")


sys.addaudithook(_hook)


@contextmanager
def nothing_happens() -> Iterator[None]:
    _seen.clear()
    _watched.append(threading.get_ident())
    try:
        yield
    finally:
        _watched.clear()
    assert not _seen


def test_the_hook_sees_what_it_should(tmp_path: Path):
    with pytest.raises(AssertionError), nothing_happens():
        (tmp_path / "x").write_text("x")
    with pytest.raises(AssertionError), nothing_happens():
        os.system("true")
    with pytest.raises(AssertionError), nothing_happens():
        compile("1", "x", "eval")
    with pytest.raises(AssertionError), nothing_happens(), pytest.raises(ImportError):
        __import__("module_of_nobody")
    with nothing_happens():
        (tmp_path / "x").read_text()


def test_a_good_file_imports_and_runs_nothing(tmp_path: Path):
    written(tmp_path, "pages: 3\n", "base.yaml")
    text = "\ufeffinclude: base.yaml\nshape: {class_name: SketchCircle}\ntitle: a${pages}\npattern: 'a.*'\n"
    file = written(tmp_path, text)
    with nothing_happens():
        assert load_config(file, Sketch, ["paper.width=3"]).value.title == "a3"


CODE = """
    os.system os:system builtins.eval logging.os.system ../x __import__('os') os SketchPen SketchCircle\0
    config_things.SketchCircle SketchCircle.__init__ jax_trainer.config.loading:load_config
"""


@each("name", CODE.split())
def test_a_name_of_code_is_no_class(tmp_path: Path, name: str):
    quoted = '"' + name.replace("\0", "\\0") + '"'
    file = written(tmp_path, f"shape: {{class_name: {quoted}}}\ntool:\n  class_name: {quoted}\n")
    with nothing_happens(), pytest.raises(ConfigError) as caught:
        load_config(file, Sketch, [f"grey.class_name={quoted}"])
    keys = {problem.key for problem in caught.value.problems}
    assert {"shape.class_name", "grey.class_name"} <= keys
    assert ("tool.class_name" in keys) == (name != "SketchPen")


@each("name", [["SketchCircle"], {"SketchCircle": None}, 5, True, None, [["os.system"]]])
def test_only_text_names_a_class(name: Any):
    with nothing_happens(), pytest.raises(ConfigError, match="shape.class_name: expected one of SketchCircle"):
        config_from({"shape": {"class_name": name}}, Sketch)


TAGS = [
    "!!python/object/apply:os.system ['touch {canary}']",
    "!!python/object/new:os.system ['touch {canary}']",
    "!!python/object/apply:subprocess.Popen [[touch, {canary}]]",
    "!!python/object/apply:builtins.exec [\"open('{canary}', 'w')\"]",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!!python/object:config_things.Sketch {{}}",
    "!!python/tuple [1, 2]",
    "!!set {{a, b}}",
    "!!binary aGVsbG8=",
    "!!timestamp 2026-11-15",
    "!<tag:yaml.org,2002:python/object/apply:os.system> ['touch {canary}']",
    "!include /etc/passwd",
    "!ENV ${{HOME}}",
]


@each("tag", TAGS)
def test_a_tag_builds_no_object(tmp_path: Path, tag: str):
    canary = tmp_path / "canary"
    file = written(tmp_path, f"extra: {tag.format(canary=canary)}\n")
    with nothing_happens(), pytest.raises(ConfigError, match=r"sketch.yaml:1: extra: Tags \(`!`\) are not supported"):
        load_config(file, Sketch)
    assert not canary.exists()


def bombs() -> dict[str, str]:
    laughs = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    merges = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    doubling = "".join(f"  k{i}: ${{extra.k{i + 1}}}${{extra.k{i + 1}}}\n" for i in range(40))
    wide = "".join(f"  k{i}: x${{extra.long}}\n" for i in range(4000))
    return {
        "nine levels of aliases": "\n".join(laughs),
        "nine levels of merges": "\n".join(merges),
        "references that double forty times": f"extra:\n{doubling}  k40: lol\n",
        "references that make many long texts": f"extra:\n  long: {'y' * 9000}\n{wide}",
        "references that make one long text": f"extra:\n  long: {'y' * 9000}\n  all: {'${extra.long}' * 6000}\n",
        "references to nothing": "extra:\n" + "".join(f"  k{i}: ${{extra.q{i}}}\n" for i in range(4000)),
        "a chain of references": "extra:\n" + "".join(f"  k{i}: ${{extra.k{i + 1}}}\n" for i in range(3000)),
        "brackets 10,000 deep": "[" * 10_000 + "]" * 10_000,
        "braces 10,000 deep": "{a: " * 10_000 + "}" * 10_000,
        "dashes 10,000 deep": "- " * 10_000 + "x",
        "questions 10,000 deep": "? " * 10_000 + "x",
        "keys 400 deep": "".join(f"{' ' * i}a:\n" for i in range(400)),
        "10 MB": "title: x\n" + "# comment\n" * 1_000_000,
        "10 MB in one line": "title: " + "x" * 10_000_000,
        "many numbers": f"extra: [{'1,' * 45_000}]",
        "many empty lists": f"extra: [{'[],' * 30_000}]",
        "many unknown keys": "".join(f"titl{i}: 1\n" for i in range(7_000)),
        "many wrong values": f"tags: [{'1,' * 9_000}]",
        "many anchors": "extra:\n" + "- &a\n" * 15_000,
        "many keys that are one": "a: 1\n" * 15_000,
        "a long key": f"{'k' * 90_000}: 1\n",
        "a long key with dots": f"{'a.' * 45_000}: 1\n",
        "long keys with much below": f"{'k' * 190}:\n  {'l' * 190}: [{'&a 1,' * 9_000}]\n",
        "a long word where a number belongs": f"pages: {'a' * 90_000}\n",
        "a long word that is nearly a link": f"pages: {'a.' * 20_000}://{'b' * 40_000}\n",
        "brackets in an expression": f"pattern: '{'(' * 20_000}{')' * 20_000}'\n",
        "counts in an expression": "pattern: 'a{99999999999}'\n",
        "a number of 90,000 digits": f"pages: {'9' * 90_000}\n",
        "a float of 90,000 digits": f"scale: 0.{'9' * 90_000}\n",
        "an exponent": f"scale: 1e{'9' * 90}\n",
    }


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Meanwhile Python does not look through what other tests have left in the memory, which takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@each("name", bombs())
def test_a_bomb_costs_little_time(tmp_path: Path, name: str, frozen_heap: None):
    file = written(tmp_path, bombs()[name])
    began = time.thread_time()
    with nothing_happens(), pytest.raises(ConfigError) as caught:
        load_config(file, Sketch)
    assert time.thread_time() - began < 1
    assert len(str(caught.value)) < 300_000


@each("name", [name for name in bombs() if name.startswith(("nine", "references that", "10 MB", "long"))])
def test_a_bomb_costs_little_memory(tmp_path: Path, name: str):
    file = written(tmp_path, bombs()[name])
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError):
            load_config(file, Sketch)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
