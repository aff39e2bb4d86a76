"""Logs to Comet, online or to an archive in the run folder. Needs the extra `comet`."""

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import uuid4

import numpy as np
from compoconf import register

from jax_trainer.core import from_extra, require_extra
from jax_trainer.logger.run_id import run_id
from jax_trainer.logger.values import png_of
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import Settings

_PRIVATE = (
    *("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details", "log_env_gpu", "log_env_cpu"),
    *("log_env_host", "log_env_network", "log_env_disk", "parse_args", "auto_param_logging", "auto_metric_logging"),
    *("auto_output_logging", "auto_log_co2"),
)


@dataclass
class CometConfig(Settings):
    """The Comet experiment. Log in with `comet login` or COMET_API_KEY, never in a configuration.

    Args:
        project: the Comet project; null: from the settings of Comet.
        workspace: the Comet workspace; null: from the settings of Comet.
        name: the name of the experiment; null: the name of the run folder.
        mode: online, or offline: an archive in `comet` of the run folder, for `comet upload`.
        tags: tags of the experiment.
    """

    project: str | None = None
    workspace: str | None = None
    name: str | None = None
    mode: Literal["online", "offline"] = "online"
    tags: list[str] = field(default_factory=list)


@register
class CometToolLogger(ToolLoggerInterface):
    """Logs to Comet.

    A resumed run continues the same experiment. Offline, the archive is written again, up to the checkpoint, and
    replaces the earlier one: it has every point once. Online, Comet keeps what it has, so points that were logged after
    the checkpoint appear twice. Nothing about the machine, the command line, the code and the environment is logged.
    """

    config: CometConfig
    own_process: ClassVar[bool] = True

    def __init__(self, config: CometConfig, folder: Path) -> None:
        super().__init__(config, folder)
        os.environ |= {"COMET_DISABLE_AUTO_LOGGING": "1", "COMET_ERROR_TRACKING_ENABLE": "false"}
        with from_extra("comet"):
            import comet_ml  # pyright: ignore[reportMissingImports]
        self._comet: Any = comet_ml
        self._key = run_id(folder, "comet", lambda: uuid4().hex)  # Comet wants 32 characters
        self._start()

    def _start(self) -> None:
        config, folder = self.config, self.folder / "comet"
        private = dict.fromkeys(_PRIVATE, False)
        self._experiment = self._comet.start(
            experiment_key=self._key,
            project_name=config.project,
            workspace=config.workspace,
            online=config.mode == "online",
            mode="get_or_create" if config.mode == "online" else "create",
            experiment_config=self._comet.ExperimentConfig(
                name=config.name or self.folder.name,
                tags=config.tags,
                offline_directory=str(folder),
                display_summary_level=0,
                **private,
            ),
        )
        self._is_empty = True

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if comet_ml is missing."""
        require_extra("comet_ml", "comet")

    def resume_at(self, step: int) -> int | None:
        if self.config.mode == "online":
            return None
        if not self._is_empty:
            self._experiment.end()
            self._start()
        for archive in (self.folder / "comet").glob("*.zip"):
            archive.unlink()
        return 0

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._is_empty = False
        self._experiment.log_metrics(dict(values), step=step)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        self._is_empty = False
        self._experiment.log_image(io.BytesIO(png), name=name, step=step)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._is_empty = False
        self._experiment.log_histogram_3d(values[np.isfinite(values)], name=name, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._is_empty = False
        self._experiment.log_text(text, step=step, metadata={"name": name})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Logs parameters, and final metrics as other values."""
        self._experiment.log_parameters(dict(params))
        self._experiment.log_others(dict(metrics))

    def flush(self) -> None:
        self._experiment.flush()

    def close(self, status: str) -> None:
        self._experiment.log_other("status", status)
        self._experiment.end()
