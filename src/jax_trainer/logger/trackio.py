"""Logs to trackio, a local dashboard with the interface of wandb. Needs the extra `trackio`."""

import contextlib
import io
import os
import sqlite3
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from compoconf import register

from jax_trainer.core import from_extra, require_extra
from jax_trainer.logger.run_id import run_id
from jax_trainer.logger.values import bins_of
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import Settings


@dataclass
class TrackioConfig(Settings):
    """The trackio run.

    Args:
        project: the trackio project; null: the name of the folder that contains the run folder.
        name: the name of the run, to which a part of its id is added; null: the name of the run folder.
    """

    project: str | None = None
    name: str | None = None


@register
class TrackioToolLogger(ToolLoggerInterface):
    """Logs to the database of trackio: in `trackio` of the run folder, or in TRACKIO_DIR, where runs share it.

    `TRACKIO_DIR=<run folder>/trackio trackio show` shows a run. A resumed run continues the same trackio run, without
    the points after the checkpoint. Nothing about the machine and the user is logged, and nothing is uploaded.
    """

    config: TrackioConfig
    own_process: ClassVar[bool] = True

    def __init__(self, config: TrackioConfig, folder: Path) -> None:
        super().__init__(config, folder)
        os.environ.setdefault("TRACKIO_DIR", str(folder / "trackio"))
        os.environ["TRACKIO_STORAGE_MODE"] = "sqlite"  # else, on some file systems, nothing could be dropped
        os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask for the name of the user
        for remote in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
            os.environ.pop(remote, None)
        Path(os.environ["TRACKIO_DIR"]).mkdir(parents=True, exist_ok=True)
        with from_extra("trackio"):
            import trackio  # pyright: ignore[reportMissingImports]
            from PIL import Image
            from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]
        self._trackio: Any = trackio
        self._storage, self._image = SQLiteStorage, Image
        self._problems: list[str] = []
        warnings.filterwarnings("always", ".*trackio.*")
        warnings.showwarning = self._note  # trackio reports errors as warnings, in a thread
        self._project = config.project or folder.parent.name or "runs"
        self._name = f"{config.name or folder.name}-{run_id(folder, 'trackio')[:6]}"
        self._start()

    def _start(self, params: Mapping[str, Any] | None = None) -> None:
        options: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        config = None if params is None else dict(params)
        self._run = self._trackio.init(self._project, self._name, resume="allow", config=config, **options)
        self._check()

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if trackio is missing."""
        require_extra("trackio", "trackio")

    def resume_at(self, step: int) -> int:
        self.close("interrupted")  # writes what is queued
        database = self._storage.get_project_db_path(self._project)
        dropped = 0
        if database.exists():
            with contextlib.closing(sqlite3.connect(database, timeout=30)) as opened, opened:
                [(dropped,)] = opened.execute("SELECT COUNT(*) FROM metrics WHERE run_name = ?", (self._name,))
                opened.execute("DELETE FROM metrics WHERE run_name = ? AND step >= ?", (self._name, step))
        self._start()
        return step if dropped else 0

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)
        self._check()

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        squeezed = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        self.write(step, {name: self._trackio.Image(squeezed)})

    def figure(self, step: int, name: str, png: bytes) -> None:
        self.write(step, {name: self._trackio.Image(self._image.open(io.BytesIO(png)))})

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        bins = bins_of(values)
        self.write(step, {name: self._trackio.Histogram(np_histogram=(bins.counts, bins.edges))})

    def text(self, step: int, name: str, text: str) -> None:
        """Logs the text, which trackio renders as Markdown."""
        self.write(step, {name: self._trackio.Markdown(text)})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Sets the configuration of the run, which is possible when it starts, and logs final metrics as "hparam/…"."""
        self._run.finish()
        self._start(params)
        self.write(step, {f"hparam/{name}": value for name, value in metrics.items()})

    def close(self, status: str) -> None:
        self._run.finish()
        self._check()

    def _note(self, message: Any, *_: Any, **__: Any) -> None:
        if "trackio" in str(message):
            self._problems.append(str(message))

    def _check(self) -> None:
        if self._problems:
            raise RuntimeError(self._problems.pop(0))
