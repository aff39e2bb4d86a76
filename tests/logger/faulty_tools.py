"""A tool that records its entries, and raises or blocks where configured."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from compoconf import register

from jax_trainer.config.settings import Settings
from jax_trainer.logger import ToolLoggerInterface


@dataclass
class FaultyConfig(Settings):
    """Where it raises or blocks ("init", "write", "close"; "" nowhere), and at which of its entries (0: at all).

    `drops`: whether it can drop its entries when a run is resumed.
    """

    raises_in: str = ""
    blocks_in: str = ""
    at: int = 0
    drops: bool = False


@register
class FaultyTool(ToolLoggerInterface):
    """Records its entries, or fails."""

    config: FaultyConfig
    latest: ClassVar[Any] = None
    gate: ClassVar[threading.Event] = threading.Event()  # a blocked tool waits for it

    def __init__(self, config: FaultyConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.entries: list[Any] = []
        self.closed: list[str] = []
        self.resumed_at: int | None = None
        self.threads: set[int] = set()
        self._count = 0
        FaultyTool.latest = self
        self._fail("init")

    def resume_at(self, step: int) -> int | None:
        self.resumed_at = step
        if not self.config.drops:
            return None
        self.entries = []
        return 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._record("row", step, dict(values))

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._record("image", step, name, pixels)

    def figure(self, step: int, name: str, png: bytes) -> None:
        self._record("figure", step, name, png)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._record("histogram", step, name, values)

    def text(self, step: int, name: str, text: str) -> None:
        self._record("text", step, name, text)

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self._record("hparams", step, dict(params), dict(metrics))

    def close(self, status: str) -> None:
        self._fail("close")
        self.closed.append(status)

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """The recorded rows: step and values."""
        return [(step, rest[0]) for kind, step, *rest in self.entries if kind == "row"]

    def _record(self, *entry: Any) -> None:
        self.threads.add(threading.get_ident())
        self._count += 1
        if self.config.at in (0, self._count):
            self._fail("write")
        self.entries.append(entry)

    def _fail(self, place: str) -> None:
        if self.config.blocks_in == place:
            self.gate.wait(60)
        if self.config.raises_in == place:
            raise OSError(f"failed in {place}")


def threads_of_tools() -> list[str]:
    """The names of all tool threads."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jax-trainer log ")]


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits until `holds()`; fails after `seconds`."""
    pause = threading.Event()
    for _ in range(round(seconds / 0.01)):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("timeout")
