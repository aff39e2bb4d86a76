"""The reliability scorecard: real processes, real signals, injected faults. `make scorecard` runs all cases."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import end_children

HOUR = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignores the recompile warning of the ragged last batch, and raises the timeout of the cases."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:.*was compiled again"))
            if item.get_closest_marker("scorecard"):
                item.add_marker(pytest.mark.timeout(HOUR))


@pytest.fixture(autouse=True)
def _end_children() -> Iterator[None]:
    yield
    end_children()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the undisturbed runs."""
    return tmp_path_factory.mktemp("references")
