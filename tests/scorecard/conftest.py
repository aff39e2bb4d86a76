"""The reliability scorecard: real processes, real signals, faults on purpose. `make scorecard` runs all of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import end_children

HOUR = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The ragged last batch is on purpose, and cases of the whole card may take long."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*was compiled again"))
            if item.get_closest_marker("scorecard"):
                item.add_marker(pytest.mark.timeout(HOUR))


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    yield
    end_children()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs are that nobody disturbs."""
    return tmp_path_factory.mktemp("references")


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Trouble for jobs in this process: `trouble.setenv("JOB_TROUBLE", "nan:3")`."""
    return monkeypatch
