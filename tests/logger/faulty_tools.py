"""A tool that records its entries, and raises or blocks where configured."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from compoconf import register

from jax_trainer.logger import ToolLoggerInterface
from jax_trainer.settings import Settings


@dataclass
class FaultyConfig(Settings):
    """Where it raises or blocks ("init", "write", "close"; "" nowhere), and at which of its entries (0: at all)."""

    raises_in: str = ""
    blocks_in: str = ""
    at: int = 0


@register
class FaultyTool(ToolLoggerInterface):
    """Remembers what it is given, or breaks."""

    config: FaultyConfig
    latest: ClassVar[Any] = None
    gate: ClassVar[threading.Event] = threading.Event()  # what it waits for where it blocks

    def __init__(self, config: FaultyConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self.given: list[Any] = []
        self.closed: list[str] = []
        self.threads: set[int] = set()
        self._entries = 0
        FaultyTool.latest = self
        self._break("init")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._take("row", step, dict(values))

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self._take("image", step, name, pixels)

    def figure(self, step: int, name: str, png: bytes) -> None:
        self._take("figure", step, name, png)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._take("histogram", step, name, values)

    def text(self, step: int, name: str, text: str) -> None:
        self._take("text", step, name, text)

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        self._take("hparams", step, dict(params), dict(metrics))

    def close(self, status: str) -> None:
        self._break("close")
        self.closed.append(status)

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """The rows it was given: places on the x-axis, and numbers."""
        return [(step, values) for kind, step, *(values,) in self.given if kind == "row"]

    def _take(self, *entry: Any) -> None:
        self.threads.add(threading.get_ident())
        self._entries += 1
        if self.config.at in (0, self._entries):
            self._break("write")
        self.given.append(entry)

    def _break(self, place: str) -> None:
        if self.config.blocks_in == place:
            self.gate.wait(60)
        if self.config.raises_in == place:
            raise OSError(f"no way to {place}")


def threads_of_tools() -> list[str]:
    """The threads in which tools are at work."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("jax-trainer ")]


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Fails unless something holds before long."""
    patience = threading.Event()
    for _ in range(round(seconds / 0.01)):
        if holds():
            return
        patience.wait(0.01)
    raise AssertionError("it never came")
