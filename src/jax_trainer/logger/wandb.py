"""Logs to Weights & Biases, with its files in the run folder. Needs the extra `wandb`."""

import html
import io
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from compoconf import register

from jax_trainer.config.settings import Above, Settings
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.logger.jsonl import run_id
from jax_trainer.logger.run_log import LOG
from jax_trainer.logger.values import bins_of
from jax_trainer.logger.writers import ToolLoggerInterface

_PRIVATE: dict[str, Any] = {  # several runs per process, no output, no metadata of the machine or the command line
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
}


@dataclass
class WandBConfig(Settings):
    """Options of the wandb run. Log in with `wandb login` or WANDB_API_KEY, never in a configuration.

    Args:
        save_dir: the parent folder of the run folder; empty: the logger's `log_dir`.
        version: the name of the run folder; empty: see `use_timestamp_version`.
        name: the name of the run in wandb, and a folder in `save_dir`; null: the name of the run folder.
        project: the wandb project; null: from the settings of wandb.
        entity: the wandb user or team; null: from the settings of wandb.
        use_timestamp_version: true: the run folder is the start time, in a folder of the name and version, such as
            `mine-7`; false: it is the version, "0" if that is empty; null: the start time only if it is empty.
        mode: online, offline (files for `wandb sync`) or disabled; null: WANDB_MODE, else online.
        group: the group of runs that this run belongs to.
        tags: tags of the run.
        timeout: seconds that wandb may take to start, and to upload the rest when the process ends.
    """

    save_dir: str = ""
    version: str = ""
    name: str | None = None
    project: str | None = None
    entity: str | None = None
    use_timestamp_version: bool | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    timeout: Annotated[float, Above(0)] = 30.0


@register
class WandBToolLogger(ToolLoggerInterface):
    """Logs to Weights & Biases; also spelled WandbToolLogger.

    wandb's step counter cannot go back, so every row has its own x-axis, such as "axis/step". A resumed run continues
    the same wandb run. Offline, its files are written again, up to the checkpoint, and replace the earlier ones: what
    `wandb sync` uploads has every point once. Online, points that were logged after the checkpoint appear twice: wandb
    can rewind a run only by its own step counter. Nothing about the machine, the command line and the environment is
    uploaded, and wandb prints and asks nothing on the terminal.
    """

    config: WandBConfig
    whole_steps: ClassVar[bool] = False

    def __init__(self, config: WandBConfig, folder: Path) -> None:
        super().__init__(config, folder)
        self._wandb = _wandb()
        if config.mode != "disabled":
            silent = self._wandb.Settings(silent=True)  # it would prompt for an account
            self._wandb.setup(silent)
            self._wandb.termsetup(silent, None)  # applies it to an existing wandb session
        self._start()

    def _start(self) -> None:
        config, folder = self.config, self.folder
        settings = {**_PRIVATE, "init_timeout": config.timeout}
        if "finish_timeout" in self._wandb.Settings.model_fields:  # older versions wait forever without network
            settings["finish_timeout"] = config.timeout
        self._known: set[str] = set()
        self._run = self._wandb.init(
            dir=str(folder),
            id=run_id(folder, "wandb"),
            resume="allow",
            name=config.name or folder.name,
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            settings=self._wandb.Settings(**settings),
        )
        if self._run.url:
            LOG.info(f"Weights & Biases: {self._run.url}")

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if wandb is missing."""
        _wandb()

    def resume_at(self, step: int) -> int | None:
        if not self._run.offline:
            return None
        if self._known:
            self._run.finish()
            self._start()
        current = Path(self._run.dir).parent
        for files in self.folder.glob(f"wandb/offline-run-*-{self._run.id}"):
            if files.name != current.name:
                shutil.rmtree(files)
        return 0

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        axis = f"axis/{self.axis}"
        for name in values.keys() - self._known:
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(name, step_metric=axis)
            self._known.add(name)
        self._run.log({axis: step, **values})

    def figure(self, step: int, name: str, png: bytes) -> None:
        """Logs the figure as an image. Needs pillow, which comes with the extra `plots`."""
        with from_extra("plots"):
            from PIL import Image
        self.write(step, {name: self._wandb.Image(Image.open(io.BytesIO(png)))})  # it would rescale bare numbers

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        bins = bins_of(values)
        self.write(step, {name: self._wandb.Histogram(np_histogram=(bins.counts, bins.edges))})

    def text(self, step: int, name: str, text: str) -> None:
        """Logs the text as preformatted HTML."""
        self.write(step, {name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)})

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Adds both to the wandb run's config and summary."""
        self._run.config.update(dict(params), allow_val_change=True)
        self._run.summary.update(dict(metrics))

    def close(self, status: str) -> None:
        """Finishes the wandb run, with exit code 1 if it failed or was interrupted."""
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)


@dataclass
class WandbConfig(WandBConfig):
    """Options of the wandb run."""


@register
class WandbToolLogger(WandBToolLogger):
    """Logs to Weights & Biases; another spelling of WandBToolLogger."""

    config: WandbConfig  # pyright: ignore[reportIncompatibleVariableOverride]


def _wandb() -> Any:
    with from_extra("wandb"):
        import wandb
    return wandb


class ActiveWandb:
    """Logs to the active run, which the user starts and finishes."""

    def __init__(self) -> None:
        self._run = _wandb().run
        if self._run is None:
            raise ValueError("`log_to_wandb=True` needs an active run of wandb: call `wandb.init(…)` before training.")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs `values` at `step`; wandb ignores steps before its current one."""
        self._run.log(dict(values), step=step)
