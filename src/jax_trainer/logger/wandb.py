"""Weights & Biases: what a run logs as a run of wandb, with its files in the run's folder. Needs the extra `wandb`."""

import html
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import numpy as np
from compoconf import register

from jax_trainer.core import lazy_import
from jax_trainer.logger.files import write_atomically
from jax_trainer.logger.pictures import png_of
from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import bins_of
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import Above, Settings

ID_FILE, AXIS = "wandb-id.txt", "axis/step"
_ID = re.compile(r"[A-Za-z0-9_\-]{1,64}")


@dataclass
class WandBConfig(Settings):
    """How wandb shows the run. It logs in as `wandb login` or WANDB_API_KEY say, never as a configuration does.

    Args:
        save_dir: the folder in which the run's folder is made; empty: as the logger's `log_dir` says.
        version: the name of the run's own folder; empty: see `use_timestamp_version`.
        name: what wandb calls the run, and a folder in `save_dir`; null: it is called as the run's own folder.
        project: of wandb; null: as its settings say.
        entity: the user or team of wandb; null: as its settings say.
        use_timestamp_version: where `version` is empty, name the run after the time it begins; otherwise it is "0".
        mode: online, offline (files that `wandb sync` uploads) or disabled; null: as WANDB_MODE says, else online.
        group: runs that belong together have the same one.
        tags: words to find the run by.
        timeout: seconds that wandb may take to begin, and to upload the rest when the process ends.
    """

    save_dir: str = ""
    version: str = ""
    name: str | None = None
    project: str | None = None
    entity: str | None = None
    use_timestamp_version: bool = True
    mode: Literal["online", "offline", "disabled"] | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    timeout: Annotated[float, Above(0)] = 30.0


@register
class WandBToolLogger(ToolLoggerInterface):
    """Shows the run in Weights & Biases; also spelled WandbToolLogger.

    wandb has one counter of its own, so every row brings its x-axis along: "axis/step". A run that is resumed
    stays the same run of wandb. Nothing of the machine, the command line and the environment is sent, and wandb shows
    and asks nothing on the screen.
    """

    config: WandBConfig

    def __init__(self, config: WandBConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._wandb = lazy_import("wandb", extra="wandb")
        self._known: set[str] = set()
        if config.mode != "disabled":
            self._silence()
        self._run = self._wandb.init(
            dir=str(folder),
            id=_run_id(folder),
            resume="allow",
            name=config.name or folder.name,
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            settings=self._wandb.Settings(**self._private_settings()),
        )
        if self._run.url:
            LOG.info(f"Weights & Biases: {self._run.url}")

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if wandb is missing."""
        lazy_import("wandb", extra="wandb")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs `values` with their step."""
        for name in values.keys() - self._known:
            self._run.define_metric(AXIS, hidden=True)
            self._run.define_metric(name, step_metric=AXIS)
            self._known.add(name)
        self._run.log({AXIS: step, **values})

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Logs the image."""
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Logs the figure, as an image. Needs pillow, which comes with the extra `plots`."""
        image = lazy_import("PIL.Image", extra="plots").open(io.BytesIO(png))  # wandb would rescale bare numbers
        self.write(step, {name: self._wandb.Image(image)})

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        """Logs counts and edges of bins."""
        bins = bins_of(values)
        self.write(step, {name: self._wandb.Histogram(np_histogram=(bins.counts, bins.edges))})

    def text(self, step: int, name: str, text: str) -> None:
        """Logs the text as a page that shows it as it is."""
        self.write(step, {name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Puts both into the run's config and summary."""
        self._run.config.update(dict(params), allow_val_change=True)
        self._run.summary.update(dict(metrics))

    def close(self, status: str) -> None:
        """Ends the run, in wandb's eyes well unless it failed or was interrupted."""
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)

    def _silence(self) -> None:
        """Without it, wandb would ask on the screen for an account, and wait for an answer."""
        silent = self._wandb.Settings(silent=True)
        self._wandb.setup(silent)
        self._wandb.termsetup(silent, None)  # a session that was there before keeps its voice otherwise

    def _private_settings(self) -> dict[str, Any]:
        """Several runs in a process, no word on the screen, and nothing of the machine or the command line."""
        settings = {
            "silent": True,
            "console": "off",
            "symlink": False,
            "host": "unknown",
            "reinit": "create_new",
            "disable_git": True,
            "disable_code": True,
            "save_code": False,
            "disable_job_creation": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_save_requirements": False,
            "init_timeout": self.config.timeout,
        }
        if "finish_timeout" in self._wandb.Settings.model_fields:  # older ones wait for ever when the network is gone
            settings["finish_timeout"] = self.config.timeout
        return settings


@dataclass
class WandbConfig(WandBConfig):
    """How wandb shows the run."""


@register
class WandbToolLogger(WandBToolLogger):
    """Shows the run in Weights & Biases; another spelling of WandBToolLogger."""

    config: WandbConfig  # pyright: ignore[reportIncompatibleVariableOverride]


def _run_id(folder: Path) -> str:
    """By what wandb knows the run; a run that is resumed finds it in its folder."""
    file = folder / ID_FILE
    known = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if _ID.fullmatch(known):
        return known
    made = uuid4().hex[:12]
    write_atomically(file, f"{made}\n".encode())
    return made
