"""`Logger`: a run's own record of its numbers and messages, and the tools that show them."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from compoconf import RegistrableConfigInterface, Registry, register, register_interface

from jax_trainer.core.output import reserve_standard_streams
from jax_trainer.logger.background import BackgroundWriter, DroppedRecords, Entry
from jax_trainer.logger.files import sync
from jax_trainer.logger.jsonl import METRICS_FILE, JSONLConfig, RecordMark
from jax_trainer.logger.pictures import drawn, pixels_of
from jax_trainer.logger.rows import last_step
from jax_trainer.logger.run_log import LOG, RunLog, Verbosity
from jax_trainer.logger.values import flat, number_of, numbers_of, plain_of
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import AtLeast, Settings

LOG_FILE = "run.log"
CLOSING_SECONDS = 5.0  # what all tools together may take to finish
# how long the record may hold up the run when thousands of rows come at once; any other tool drops them
RECORD_SECONDS = 2.0
MARK_SECONDS = 30.0  # how long whoever saves a checkpoint waits for the record to have come so far


@dataclass
class LoggerConfig(Settings):
    """What is recorded of a run, and where.

    Args:
        log_steps_every: training steps between two rows of step metrics; 0: only per epoch.
        log_dir: the folder in which the run's folder is made, unless a tool has a `save_dir`; empty: "runs/<model>".
        log_file_verbosity: from which level on messages are kept in the run's `run.log`.
        tool_config: the tool that shows the numbers, or a list of tools; null: only the run's own `metrics.jsonl`.
    """

    log_steps_every: Annotated[int, AtLeast(0)] = 50
    log_dir: str = ""
    log_file_verbosity: Verbosity = "info"
    tool_config: ToolLoggerInterface.cfgtype | list[ToolLoggerInterface.cfgtype] | None = None


@register
@register_interface
class Logger(RegistrableConfigInterface):
    """Writes all that is logged to `metrics.jsonl` in the run's folder, and to the tools where there are some.

    Every row has its step, and those of training and evaluation their epoch. All curves of a tool share one x-axis, the
    step; "epoch" is a curve of its own.

    Each tool works in a thread of its own, the record, too. Nothing that is logged can end a run: what fails, blocks or
    is not installed costs one warning, and `failures` counts what was lost. Only the lead process writes; elsewhere
    every method does nothing.

    Values may be arrays on a device: logging them waits until they are computed.

    Args:
        config: what is recorded.
        folder: the run's own folder.
        is_primary: whether this process writes; None: the first one does.
    """

    config: LoggerConfig

    def __init__(self, config: LoggerConfig, folder: Path, *, is_primary: bool | None = None) -> None:
        self.config, self.folder = config, Path(folder)
        self.is_primary = jax.process_index() == 0 if is_primary is None else is_primary
        self._step = 0
        self._is_closed = not self.is_primary
        self._own = DroppedRecords("Logger", "what could not be logged is left out")
        self._messages: RunLog | None = None
        self._tools: list[BackgroundWriter] = []
        if self.is_primary:
            reserve_standard_streams()
            with contextlib.suppress(OSError):  # whoever writes there says that it cannot
                self.folder.mkdir(parents=True, exist_ok=True)
            self._step = last_step(self.folder / METRICS_FILE)  # of a run that goes on
            self._messages = RunLog(self.folder / LOG_FILE, config.log_file_verbosity)
            self._tools = _begun(tools_of(config), self.folder)

    @property
    def log_dir(self) -> Path:
        """The run's own folder."""
        return self.folder

    @property
    def failures(self) -> dict[str, int]:
        """How much each tool lost, by its name; "Logger": what could not be handed to any. Nothing lost, no name."""
        return {losses.name: losses.count for losses in self._all_losses() if losses.count}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Records those of `values` that are single numbers; an "epoch" among them says which epoch that was."""
        self._log("a row", lambda: self._row(step, numbers_of(values)))

    def log_scalar(self, name: str, value: Any, step: int) -> None:
        """Records one number; `step` is where it stands on the x-axis."""
        self._log(name, lambda: self._row(step, {name: _single(value)}))

    def log_image(self, name: str, image: Any, step: int) -> None:
        """Records an image: [height, width] or [height, width, channels], bytes or floats from 0 to 1."""
        self._log(name, lambda: self._sized("image", step, name, pixels_of(image)))

    def log_figure(self, name: str, figure: Any, step: int) -> None:
        """Records a figure of matplotlib as it is now; it is drawn before this returns."""
        self._log(name, lambda: self._sized("figure", step, name, drawn(figure)))

    def log_histogram(self, name: str, values: Any, step: int) -> None:
        """Records how `values`, of any shape, are distributed."""
        self._log(name, lambda: self._sized("histogram", step, name, np.array(values)))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Records a text."""
        self._log(name, lambda: self._sized("text", step, name, str(text)))

    def log_hparams(self, params: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Records what the run was made of, nested data by names with dots, and what came out of it."""
        self._log("hparams", lambda: self._hparams(flat(params), numbers_of(metrics or {})))

    def save_metrics(self, file_name: str, metrics: Mapping[str, Any]) -> None:
        """Writes metrics, arrays among them, to a file of their own, `metrics/<file_name>.json` in the run's folder."""
        self._log(file_name, lambda: self._save(file_name, plain_of(metrics)))

    def flush(self, timeout: float = 5.0) -> bool:
        """Whether all that was logged so far is written, by every tool; waits for it at most `timeout` seconds.

        A tool that blocks is waited for once, and again only when it has gone on.
        """
        deadline = time.monotonic() + timeout
        written = [tool.flush(deadline) for tool in self._tools]  # each of them, whatever another one says
        if not all(written) or self._own.count or self._is_closed:
            return all(written) and not self._own.count
        return bool(self._tools[0].ask(lambda tool: tool.is_written())(max(0.0, deadline - time.monotonic())))

    def mark(self) -> Callable[[], RecordMark | None]:
        """Notes where the record stands; costs next to nothing and does not wait.

        The function, called later in any thread, waits until all that was logged before is on the disk, and gives the
        size of `metrics.jsonl` at exactly that point, with the rows for which there was no room: a run that is resumed
        from there cuts it to that size, and adds these. None if the record cannot tell within half a minute or has been
        given up on, or where another process writes.
        """
        if self._is_closed:
            return lambda: None
        record: Any = self._tools[0]
        place = record.ask(lambda tool: tool.mark())

        def on_disk() -> RecordMark | None:
            found = place(MARK_SECONDS)
            if found is not None:
                sync(self.folder / METRICS_FILE)
            return found

        return on_disk

    def cut(self, mark: RecordMark | None) -> None:
        """Takes what was logged after a checkpoint out of `metrics.jsonl`, which stood at `mark` then.

        Waits until that is done. Where the mark is not known (None), the file stays as it is, with a warning.
        """
        if self._is_closed:
            return
        record: Any = self._tools[0]
        record.ask(lambda tool: tool.cut(mark))(MARK_SECONDS)
        self._step = last_step(self.folder / METRICS_FILE)

    def close(self, status: str) -> None:
        """Nothing more will come; `status` says how the run ended. Closing again does nothing.

        Waits a few seconds at most. A tool that blocks longer is left behind.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            deadline = time.monotonic() + CLOSING_SECONDS
            for tool in self._tools:
                tool.finish(status)
            for tool in self._tools:
                tool.join(deadline)
            self._report(status)
        finally:
            if self._messages is not None:
                self._messages.close()

    def _log(self, name: str, log: Callable[[], None]) -> None:
        """Calls `log`, which makes what is logged into something that nobody else changes, and hands it over."""
        if self._is_closed:
            return
        try:
            log()
        except Exception as failure:
            self._own.add_failure(failure, f"could not log {name!r}")

    def _row(self, step: int, numbers: dict[str, float]) -> None:
        self._step = step
        self._hand_over(lambda tool: tool.write(step, numbers))

    def _sized(self, kind: str, step: int, name: str, thing: Any) -> None:
        size = thing.nbytes if isinstance(thing, np.ndarray) else len(thing)
        self._hand_over(lambda tool: getattr(tool, kind)(step, name, thing), size)

    def _hparams(self, params: dict[str, Any], metrics: dict[str, float]) -> None:
        step = self._step
        self._hand_over(lambda tool: tool.hparams(step, params, metrics))

    def _save(self, file_name: str, data: Any) -> None:
        record: Any = self._tools[0]
        record.give(lambda tool: tool.save(file_name, data))

    def _hand_over(self, entry: Entry, size: int = 0) -> None:
        for tool in self._tools:
            tool.give(entry, size)

    def _all_losses(self) -> list[DroppedRecords]:
        return [self._own, *(tool.losses for tool in self._tools)]

    def _report(self, status: str) -> None:
        line = f"Run {status}. Metrics: {self.folder / METRICS_FILE}."
        lost = [f"{name} lost {count} of what it was given." for name, count in self.failures.items()]
        (LOG.warning if lost else LOG.info)(" ".join([line, *lost]))


def _single(value: Any) -> float:
    number = number_of(value)
    if number is None:
        raise ValueError(f"a scalar is a single number, this is of type {type(value).__name__}.")
    return number


def _begun(configs: list[Any], folder: Path) -> list[BackgroundWriter]:
    """The tools at work, the run's own record first, whether it is among them or not."""
    others = [config for config in configs if not isinstance(config, JSONLConfig)]
    names: list[str] = []
    begun: list[BackgroundWriter] = []
    for config in [JSONLConfig(), *others]:
        twins = names.count(config.class_name)
        names.append(config.class_name)
        name = f"{config.class_name} {twins + 1}" if twins else config.class_name
        consolation = f"{METRICS_FILE} has every number" if begun else "what it was given is lost"
        make, check = partial(config.instantiate, ToolLoggerInterface, folder), partial(_require, config)
        patience = 0.0 if begun else RECORD_SECONDS
        begun.append(BackgroundWriter(DroppedRecords(name, consolation), make, check=check, patience=patience))
    begun[0].start()  # the record is there, whether anything is logged or not
    return begun


def _require(config: Any) -> None:
    Registry.get_class(ToolLoggerInterface, config.class_name).require()  # type: ignore[attr-defined]


def tools_of(config: LoggerConfig) -> list[Any]:
    """The configurations of the tools, in order, whether there is none, one or a list of them."""
    tools = config.tool_config
    return list(tools) if isinstance(tools, list | tuple) else [] if tools is None else [tools]


def placing_tool(config: LoggerConfig) -> Any | None:
    """The configuration of the tool that says where the run's folder belongs: the first one that says anything."""
    places = [tool for tool in tools_of(config) if hasattr(tool, "save_dir")]
    return next((tool for tool in places if tool.save_dir or tool.name or tool.version), next(iter(places), None))


def run_place(config: LoggerConfig, model_name: str) -> tuple[Path, str, str | None]:
    """Where the run's folder belongs: the folder around it, the experiment's name, the version (None: the time).

    The first tool's `save_dir`, `name` and `version` count where one has them, then the logger's `log_dir`, then "runs"
    and the model's name.
    """
    tool = placing_tool(config)
    parent = getattr(tool, "save_dir", "") or config.log_dir
    name = getattr(tool, "name", "") or ("" if parent else model_name)
    version = getattr(tool, "version", "") or (None if getattr(tool, "use_timestamp_version", True) else "0")
    return Path(parent or "runs"), name, version
