"""The reliability scorecard: real processes, real signals, injected faults. `make scorecard` runs all cases."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scorecard.harness import end_children, finished_tests, write_row

HOUR = 3600


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ignores the recompile warning of the ragged last batch, raises the timeout, and leaves out finished tests."""
    finished = finished_tests()
    done = [item for item in items if item.nodeid in finished]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in finished]
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*was compiled again"))
            if item.get_closest_marker("scorecard"):
                item.add_marker(pytest.mark.timeout(HOUR))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Records that a test has finished, passed or not, for `scripts/scorecard.py --resume`."""
    started = time.monotonic()
    result = yield
    write_row(finished=item.nodeid, seconds=time.monotonic() - started)
    return result


@pytest.fixture(autouse=True)
def _end_children() -> Iterator[None]:
    yield
    end_children()


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the undisturbed runs."""
    return tmp_path_factory.mktemp("references")
