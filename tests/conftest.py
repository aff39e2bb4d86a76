"""Every test runs with eight CPU devices, and with warnings as errors (see pyproject.toml)."""

import os
from pathlib import Path

# before jax is imported: later it has no effect
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_TRAINER_GIT"] = "off"  # hundreds of short runs need no record of this repository
# processes that tests start import what they share in the same way
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
)
os.environ.setdefault("NPROC", "16")  # several CPU devices deadlock with fewer threads than this

import gc
import shutil
import signal
import sys
from collections.abc import Generator, Iterator

# Most of the time of the tests is compiling. What one test compiled, others load, also in other processes and in the
# next run: JAX knows a program by its text, the versions and the flags.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
    if _CACHE.exists() and sum(file.stat().st_size for file in _CACHE.iterdir()) > 1 << 30:  # of many older sources
        shutil.rmtree(_CACHE)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Tests write tens of thousands of small files, and sync many: where memory has room for them, none waits for the disk.
if Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 2 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

import absl.logging
import hypothesis
import jax
import pytest

# Without the streams with which pytest captures output no test can run: what closes them takes all later tests along.
for _stream in (sys.stdout, sys.stderr):
    _stream.close = lambda: None

# Where a library configures logging, all handlers are closed, and absl's closes the stream of pytest that it found when
# it was imported, unless it is the one in place: all later tests would fail. It never closes this one.
absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)

# `nohup` and a shell with `&` ignore some signals, and so would all processes that tests start: a run ignores them, too
for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# a deadline would fail on a busy machine: the first example may compile, or wait for a core
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Tests have no doctests, and looking for them in what tests share would import, and register, it a second time."""
    collectors = yield
    return [one for one in collectors if type(one) is pytest.Module]


def pytest_collection_finish() -> None:
    """What is imported stays: a garbage collection that visits it, and all that JAX keeps, takes seconds."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """So does what JAX keeps of a file of tests, when its garbage is gone."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(params=["linen", "nnx"])
def flavour(request: pytest.FixtureRequest) -> str:
    """Both Flax interfaces: a promise holds for each."""
    return request.param


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
