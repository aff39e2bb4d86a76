"""Every test runs with eight CPU devices, and with warnings as errors (see pyproject.toml)."""

import os

# before jax is imported: later it has no effect
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "16")  # several CPU devices deadlock with fewer threads than this

import jax
import pytest


@pytest.fixture(params=["linen", "nnx"])
def flavour(request: pytest.FixtureRequest) -> str:
    """Both Flax interfaces: a promise holds for each."""
    return request.param


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)
