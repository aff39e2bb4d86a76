"""Logs to ClearML, online or to a session in the run folder. Needs the extra `clearml`."""

import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from compoconf import register

from jax_trainer.core import from_extra, require_extra
from jax_trainer.logger.jsonl import file_name_of
from jax_trainer.logger.run_id import known_id, run_id
from jax_trainer.logger.values import bins_of, png_of
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import Settings


@dataclass
class ClearMLConfig(Settings):
    """The ClearML task. Log in with `clearml-init` or CLEARML_API_ACCESS_KEY, never in a configuration.

    Args:
        project: the ClearML project; null: the name of the folder that contains the run folder.
        name: the name of the task; null: the name of the run folder.
        mode: online, or offline: a session in `clearml` of the run folder, for `Task.import_offline_session`.
        tags: tags of the task.
    """

    project: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"
    tags: list[str] = field(default_factory=list)


@register
class ClearMLToolLogger(ToolLoggerInterface):
    """Logs to ClearML; values that are not finite are left out, as ClearML would show zeros.

    A resumed run continues the same task. Offline, its session is written again up to the checkpoint: it has every
    point once. Online, ClearML keeps what it has, so points that were logged after the checkpoint appear twice. Nothing
    about the machine, the command line, the code and the environment is logged.
    """

    config: ClearMLConfig
    own_process: ClassVar[bool] = True

    def __init__(self, config: ClearMLConfig, folder: Path) -> None:
        super().__init__(config, folder)
        os.environ |= {"CLEARML_WORKER_NAME": "unknown", "CLEARML_SUPPRESS_UPDATE_MESSAGE": "1"}
        if config.mode == "offline":
            home = str(folder / "clearml")
            os.environ |= {"CLEARML_OFFLINE_MODE": "1", "CLEARML_CACHE_DIR": home, "HOME": home}
        with from_extra("clearml"):
            import clearml  # pyright: ignore[reportMissingImports]
        known = known_id(folder, "clearml")
        self._task: Any = clearml.Task.init(
            project_name=config.project or folder.parent.name or "runs",
            task_name=config.name or folder.name,
            tags=config.tags,
            reuse_last_task_id=known or False,
            continue_last_task=0 if known else False,  # steps are ours, not counted on from the last one
            auto_connect_arg_parser=False,
            auto_connect_frameworks={"detect_repository": False},
            auto_resource_monitoring=False,
            auto_connect_streams=False,
        )
        run_id(folder, "clearml", lambda: self._task.id)
        if config.mode == "online":
            self._task.set_comment("")  # has the names of the user and the host
        self._logger = self._task.get_logger()
        self._is_empty = True

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if clearml is missing."""
        require_extra("clearml", "clearml")

    def resume_at(self, step: int) -> int | None:
        if self.config.mode == "online":
            return None
        if not self._is_empty:
            self._task.flush(wait_for_uploads=True)
        session = Path(str(self._task.get_offline_mode_folder()))
        for name in ("metrics.jsonl", "log.jsonl"):
            (session / name).unlink(missing_ok=True)
        shutil.rmtree(session / "data", ignore_errors=True)
        session.with_name(f"{session.name}.zip").unlink(missing_ok=True)
        return 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._is_empty = False
        for name, value in values.items():
            if math.isfinite(value):
                self._logger.report_scalar(name, name, value, step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        self._is_empty = False
        file = Path(tempfile.mkdtemp()) / f"{file_name_of(name)}_{step}.png"
        file.write_bytes(png)
        self._logger.report_image(name, name, step, local_path=str(file), delete_after_upload=True)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._is_empty = False
        bins = bins_of(values)
        labels = [f"{edge:.4g}" for edge in bins.edges[:-1]]
        self._logger.report_histogram(name, name, bins.counts, iteration=step, xlabels=labels)

    def text(self, step: int, name: str, text: str) -> None:
        """Adds the text, with its name and step, to the console of the task."""
        self._is_empty = False
        self._logger.report_text(f"{name} (step {step}): {text}", print_console=False)

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Logs parameters, and final metrics as single values."""
        self._task.set_parameters(dict(params))
        for name, value in metrics.items():
            if math.isfinite(value):
                self._logger.report_single_value(name, value)

    def close(self, status: str) -> None:
        if status == "failed":
            self._task.mark_failed()
        self._task.close()
