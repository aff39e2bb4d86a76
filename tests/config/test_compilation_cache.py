"""Compiled programs are kept on disk; whatever is wrong with the folder, training goes on with the right bits."""

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache as jax_cache

from jax_trainer.config import compilation_cache
from jax_trainer.config.compilation_cache import CompilationCache, loaded_notice, set_compilation_cache
from jax_trainer.core import compile_program
from jax_trainer.testing import linear_program


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The cache folder of a user who has configured nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(compilation_cache.VARIABLE, raising=False)
    monkeypatch.setattr(compilation_cache, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(compilation_cache, "_chosen", None)
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    jax_cache.reset_cache()
    yield tmp_path / "jax_trainer" / "compiled"
    compilation_cache._stop()
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def computed(functions: int = 2) -> np.ndarray:
    """A result of functions that JAX has not seen yet, compiled as in a new process."""
    loaded_notice()
    compile_program(linear_program())
    x = np.linspace(0, 1, 8, dtype=np.float32)
    return np.stack([jax.jit(lambda x, power=power: jnp.sin(x**power).sum())(x) for power in range(2, 2 + functions)])


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir())


def test_programs_are_loaded_and_not_compiled_again(folder):
    first = computed()
    assert loaded_notice() == ""
    written = entries(folder)
    assert written
    assert folder.stat().st_mode & 0o777 == 0o700
    again = computed()
    notice = loaded_notice()
    assert f"Loaded {len(written)} " in notice
    assert str(folder) in notice
    assert loaded_notice() == ""  # each is counted once
    assert entries(folder) == written
    np.testing.assert_array_equal(first, again)


def test_damaged_entries_are_compiled_and_written_again(folder, recwarn):
    first = computed(5)
    truncated, empty, random, bit, other = paths = entries(folder)
    contents = {path: path.read_bytes() for path in paths}
    half = len(contents[random]) // 2
    truncated.write_bytes(contents[truncated][:-1])
    empty.write_bytes(b"")
    random.write_bytes(contents[random][:half] + np.random.default_rng(0).bytes(half))
    bit.write_bytes(contents[bit][:-7] + bytes([contents[bit][-7] ^ 1]) + contents[bit][-6:])
    other.write_bytes(contents[bit])  # of another program
    np.testing.assert_array_equal(computed(5), first)
    assert loaded_notice() == ""
    np.testing.assert_array_equal(computed(5), first)
    assert "Loaded 5 " in loaded_notice()
    assert not recwarn.list


@pytest.mark.parametrize("named", ["variable", "function"])
def test_the_cache_can_be_off_or_elsewhere(folder, tmp_path, monkeypatch, named):
    def name(value: str) -> None:
        if named == "variable":
            monkeypatch.setenv(compilation_cache.VARIABLE, value)
        else:
            set_compilation_cache(value)

    name("off")
    computed()
    assert not folder.exists()
    name(str(tmp_path / "other"))
    computed()
    assert not folder.exists()
    assert entries(tmp_path / "other")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_configured_cache_of_jax_is_left_alone(folder, tmp_path, when):
    if when == "after":
        computed()
    before = entries(folder) if folder.exists() else []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    computed()
    computed()
    assert getattr(jax.config, "jax_persistent_cache_min_compile_time_secs") == 1.0  # noqa: B009
    assert Path(jax_cache._cache._path) == tmp_path / "own"  # type: ignore[union-attr]
    assert (entries(folder) if folder.exists() else []) == before


def test_a_disabled_cache_of_jax_stays_disabled(folder):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        computed()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not folder.exists()


@pytest.mark.parametrize("what", ["a file in its place", "writable by others"])
def test_a_folder_that_cannot_be_used_costs_one_warning(folder, caplog, what):
    folder.parent.mkdir()
    if what == "a file in its place":
        folder.write_text("")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        first, again = computed(), computed()
    np.testing.assert_array_equal(first, again)
    assert [str(folder) in record.getMessage() for record in caplog.records] == [True]
    assert not folder.is_dir() or not entries(folder)


def test_a_full_disk_costs_one_warning_and_leaves_no_file(folder, caplog, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        computed()
    assert [("No space left" in record.getMessage()) for record in caplog.records] == [True]
    assert entries(folder) == []


def test_the_entries_used_longest_ago_are_deleted_first(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 1000)
    cache, now = CompilationCache(tmp_path), time.time()
    for number in range(4):
        cache.put(f"entry-{number}", bytes(200))
        os.utime(tmp_path / f"entry-{number}", (now, now - 100 + number))
    assert cache.get("entry-0") == bytes(200)
    left = tmp_path / ".new-killed"
    left.write_bytes(bytes(10))
    os.utime(left, (now, now - 7200))
    cache.put("entry-4", bytes(200))
    assert [path.name for path in entries(tmp_path)] == ["entry-0", "entry-3", "entry-4"]


def test_several_threads_read_and_write_one_folder_while_it_is_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "MOST_BYTES", 40_000)
    values = {f"entry-{number}": bytes([number]) * 5000 for number in range(12)}
    wrong: list[Any] = []

    def work() -> None:
        cache = CompilationCache(tmp_path)  # as of a process
        for _ in range(10):
            for key, value in values.items():
                if (found := cache.get(key)) is None:
                    cache.put(key, value)
                elif found != value:
                    wrong.append(key)
        if not cache._is_writable:
            wrong.append("failed")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not [path for path in entries(tmp_path) if path.name.startswith(".new-")]


@pytest.mark.slow
def test_a_second_process_compiles_nearly_nothing(folder, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment = {name: value for name, value in environment.items() if "CACHE_" not in name or "XDG" in name}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "jax_trainer", "train", str(root / "src/jax_trainer/configs" / "digits.yaml")]
    command += ["trainer.train_epochs=1", f"trainer.logger.log_dir={tmp_path / 'runs'}"]
    done = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [str(folder) in one.stderr for one in done] == [False, True]
    assert [str(folder) in log.read_text() for log in sorted((tmp_path / "runs").rglob("run.log"))] in (
        [False, True],
        [True],
    )
