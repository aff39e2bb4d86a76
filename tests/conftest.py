"""Every test runs with eight CPU devices, and with warnings as errors (see pyproject.toml)."""

import os

# before jax is imported: later it has no effect
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "16")  # several CPU devices deadlock with fewer threads than this

import math
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Most of the time of the tests is compiling. What one test compiled, others load, also in other processes and in the
# next run: JAX knows a program by its text, the versions and the flags.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = Path(__file__).parents[1] / ".pytest_cache" / "compiled"
    if _CACHE.exists() and sum(file.stat().st_size for file in _CACHE.iterdir()) > 1 << 30:  # of many older sources
        shutil.rmtree(_CACHE)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_CACHE)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jax.numpy as jnp
import pytest
from jax._src.nn import initializers


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """What tests share holds no tests: looking for doctests in it would import, and register, it a second time."""
    is_shared = collection_path.suffix == ".py" and not collection_path.name.startswith(("test_", "conftest"))
    return True if is_shared and Path(__file__).parent in collection_path.parents else None


@pytest.fixture(params=["linen", "nnx"])
def flavour(request: pytest.FixtureRequest) -> str:
    """Both Flax interfaces: a promise holds for each."""
    return request.param


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture(scope="session", autouse=True)
def quick_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """Initial weights of Flax's initializers differ with the key but are not drawn: that takes long to compile.

    Only where slow tests are left out: many of those compare with runs in other processes.
    """
    if "not slow" not in request.config.getoption("markexpr"):
        yield
        return

    @partial(jax.jit, static_argnums=(1, 2))
    def waves(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        data = jax.random.key_data(key).astype(jnp.float32) * 2.0**-31
        angle = jax.lax.iota(jnp.float32, math.prod(shape)) * 12.9898 + data[0] + 1.7 * data[-1]
        return (1.4 * jnp.sin(angle)).reshape(shape).astype(dtype)  # of variance one, and below two

    normal = lambda key, shape=(), dtype=jnp.float32, **_: waves(key, tuple(shape), dtype)
    truncated = lambda key, lower, upper, shape=(), dtype=jnp.float32, **_: waves(key, tuple(shape), dtype)
    quick = SimpleNamespace(**{**vars(jax.random), "normal": normal, "truncated_normal": truncated})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initializers, "random", quick)
        yield


@pytest.fixture
def drawn_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of initial weights, or of what depends on them: they are drawn, as outside of the tests."""
    monkeypatch.setattr(initializers, "random", jax.random)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a terminal: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
