"""What tests of callbacks run in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_trainer.callbacks import RunContext
from jax_trainer.logger import Logger, LoggerConfig


@pytest.fixture
def folder_run(tmp_path: Path) -> Iterator[RunContext]:
    """A `Run` in a folder of its own, with a logger that is closed afterwards."""
    logger = Logger(LoggerConfig(), tmp_path)
    yield RunContext(tmp_path, logger)
    logger.close("completed")
