"""Isolates the logger tests from the service, the folders and the account of wandb."""

import os
import threading
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.logger.faulty_tools import FaultyTool, threads_of_tools, wait_until


@pytest.fixture(scope="session")
def offline_wandb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """wandb without account and network; torn down after all tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        home = tmp_path_factory.mktemp("wandb")
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(home / name))
        patch.setenv("NETRC", str(home / "netrc"))
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        yield
        import_module("wandb").teardown()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Every test must end its tools; opening the gate unblocks a blocked one."""
    FaultyTool.gate, FaultyTool.latest = threading.Event(), None
    yield
    FaultyTool.gate.set()
    wait_until(lambda: not threads_of_tools())
