"""`Logger`: a run's own record of its numbers and messages, and the tool that shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.logger.run_log import LOG, RunLog, Verbosity
from jax_trainer.logger.writers import JsonlWriter, ToolLoggerInterface
from jax_trainer.settings import AtLeast, Settings

METRICS_FILE, LOG_FILE = "metrics.jsonl", "run.log"


@dataclass
class LoggerConfig(Settings):
    """What is recorded of a run, and where.

    Args:
        log_steps_every: training steps between two rows of step metrics; 0: only per epoch.
        log_dir: the folder in which the run's folder is made, unless the tool has a `save_dir`; empty: "runs/<model>".
        log_file_verbosity: from which level on messages are kept in the run's `run.log`.
        tool_config: the tool that shows the numbers; null: only the run's own `metrics.jsonl`.
    """

    log_steps_every: Annotated[int, AtLeast(0)] = 50
    log_dir: str = ""
    log_file_verbosity: Verbosity = "info"
    tool_config: ToolLoggerInterface.cfgtype | None = None


@register
@register_interface
class Logger(RegistrableConfigInterface):
    """Writes every number to `metrics.jsonl` in the run's folder, and to the tool where there is one.

    Rows keep step and epoch. The tool has one x-axis per name: steps for rows in which every name ends in "_step",
    otherwise the row's epoch, where it has one.
    """

    config: LoggerConfig

    def __init__(self, config: LoggerConfig, folder: Path) -> None:
        self.config, self.folder = config, Path(folder)
        self._record = JsonlWriter(self.folder / METRICS_FILE)
        self._messages = RunLog(self.folder / LOG_FILE, config.log_file_verbosity)
        self._rows = 0
        self._is_closed = False
        try:
            self._tool = _Guarded(config.tool_config, self.folder)
        except BaseException:
            self._messages.close()
            self._record.close("failed")
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Records `values` at `step`; an "epoch" among them says which epoch that was."""
        self._rows += 1
        self._record.write(step, values)
        shown = {name: value for name, value in values.items() if name != "epoch"}
        is_of_steps = all(name.endswith("_step") for name in shown)
        if shown:
            self._tool.write(step if is_of_steps else int(values.get("epoch", step)), shown)

    def log_scalar(self, name: str, value: Any, step: int) -> None:
        """Records one number; `step` is where it stands on the x-axis."""
        self.write(step, {name: float(value)})

    def close(self, status: str) -> None:
        """Nothing more will come; `status` says how the run ended. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._tool.close(status)
            self._record.close(status)
            line = f"Run {status}: {self._rows} rows in {self._record.path}."
            if self._tool.failures:
                LOG.warning(f"{line} {self._tool.name} failed {self._tool.failures} times and lacks what it was given.")
            else:
                LOG.info(line)
        finally:
            self._messages.close()


class _Guarded:
    """A tool whose failures cost one warning and are counted; without a tool, nothing."""

    def __init__(self, config: Any, folder: Path) -> None:
        self.name = "" if config is None else config.class_name
        self.failures = 0
        self._tool: ToolLoggerInterface | None = None
        if config is None:
            return
        try:
            self._tool = config.instantiate(ToolLoggerInterface, folder)
        except ImportError:  # the user has to know that the tool is not installed, and before training
            raise
        except Exception as failure:
            self._count(failure)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self._tool is not None:
            try:
                self._tool.write(step, values)
            except Exception as failure:
                self._count(failure)

    def close(self, status: str) -> None:
        if self._tool is not None:
            try:
                self._tool.close(status)
            except Exception as failure:
                self._count(failure)

    def _count(self, failure: Exception) -> None:
        if not self.failures:
            why = f"{type(failure).__name__}: {failure}"
            LOG.warning(f"{self.name} failed, and training goes on; {METRICS_FILE} has every number. {why}")
        self.failures += 1


def run_place(config: LoggerConfig, model_name: str) -> tuple[Path, str, str | None]:
    """Where the run's folder belongs: the folder around it, the experiment's name, the version (None: the time).

    The tool's `save_dir`, `name` and `version` count where it has them, then the logger's `log_dir`, then "runs" and
    the model's name.
    """
    tool = config.tool_config
    parent = getattr(tool, "save_dir", "") or config.log_dir
    name = getattr(tool, "name", "") or ("" if parent else model_name)
    version = getattr(tool, "version", "") or (None if getattr(tool, "use_timestamp_version", True) else "0")
    return Path(parent or "runs"), name, version
