"""One run that many tests read."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.cli.cli_runs import run_command, tiny_file


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny experiment: read-only."""
    folder = tmp_path_factory.mktemp("trained")
    result = run_command("train", tiny_file(folder), "--json", folder=folder)
    assert (result.code, result.err) == (0, "")
    return Path(result.data["run"])


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def log_stays_here() -> Iterator[None]:
    """When orbax fails, its threads log errors about the closed event loop a little later."""
    yield
    time.sleep(0.2)
