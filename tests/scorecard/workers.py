"""A faulty record source, in a module that worker processes can import."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from jax_trainer.testing import numbered_data


class Failing:
    """200 examples; reading the 150th raises, kills the process or hangs."""

    def __init__(self, fault: str, mark: str) -> None:
        self._data, self._fault, self._mark = numbered_data(200), fault, Path(mark)

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index == 150:
            self._mark.touch()
            self._fail()
        return {name: array[index] for name, array in self._data.items()}

    def _fail(self) -> Any:
        match self._fault:
            case "raise":
                raise OSError("the disk is gone")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(60)


def stacked(records: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The records as a batch."""
    return {name: np.stack([record[name] for record in records]) for name in records[0]}
