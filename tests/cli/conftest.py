"""One run that many tests look at."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import ask, tiny_file


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the tiny experiment: for looking only."""
    folder = tmp_path_factory.mktemp("trained")
    said = ask("train", tiny_file(folder), "--json", folder=folder)
    assert (said.code, said.err) == (0, "")
    return Path(said.data["run"])


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to do with as one likes."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def complaints_end_here() -> Iterator[None]:
    """When orbax fails, it leaves threads behind that complain about its closed loop a little later."""
    yield
    time.sleep(0.2)
