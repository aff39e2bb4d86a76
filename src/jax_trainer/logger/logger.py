"""`Logger`: writes metrics and messages of a run to its folder and to logging tools."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import numpy as np
from compoconf import RegistrableConfigInterface, Registry, register, register_interface

from jax_trainer.config.settings import AtLeast, Problem, Settings, SettingsError
from jax_trainer.datasets.storage import Store, url_problem
from jax_trainer.diagnostics.files import sync
from jax_trainer.diagnostics.output import reserve_standard_streams
from jax_trainer.logger.jsonl import METRICS_FILE, JSONLConfig, RecordMark, last_row, resume, save_metrics
from jax_trainer.logger.run_log import LOG, RunLog, Verbosity
from jax_trainer.logger.values import drawn, flat, number_of, numbers_of, pixels_of, plain_of
from jax_trainer.logger.writers import BackgroundWriter, DroppedRecords, ToolLoggerInterface
from jax_trainer.sharding import placement

LOG_FILE = "run.log"
CLOSING_SECONDS = 5.0  # timeout for closing all tools, once they have started
# how long `metrics.jsonl` may block training when thousands of rows arrive at once; other tools drop them
RECORD_SECONDS = 2.0
MARK_SECONDS = 30.0  # how long a checkpoint waits for the rows so far to be written
TOOL_SECONDS = 0.5  # how long a checkpoint waits for the tools: what they have not written is lost if the run is killed
Axis = Literal["step", "epoch", "examples", "tokens", "seconds"]
MOST_STEPS = 20_000  # whose counts are kept: entries may be logged some steps late


class XAxis:
    """The x-axis of metrics, and how far the run is on it.

    Examples and tokens are counted when the metrics of their steps have arrived, some steps late: an entry of a later
    step has to wait. Seconds are those of training, without the time between two starts of a run.
    """

    def __init__(self, name: Axis) -> None:
        self.name: Axis = name
        self._epoch: int | None = None
        self._counts: dict[int, tuple[int, int]] = {0: (0, 0)}  # examples and tokens after a step, by ascending step
        self._started: float | None = None  # when training began in this process
        self._earlier = 0.0  # seconds of the run before that

    def count(self, step: int, epoch: int, examples: Sequence[int] = (), tokens: Sequence[int] = ()) -> None:
        """Called at the start, and as the run proceeds: the totals after each of the steps up to `step`."""
        if self.name == "tokens" and any(examples) and not any(tokens):
            raise ValueError(
                "`x_axis: tokens` needs batches with token ids: integers [batch, time] that the model looks up in an "
                "embedding, or predicts. This model has none; use `x_axis: examples`."
            )
        self._started = time.monotonic() if self._started is None else self._started
        self._epoch = epoch
        self._counts.update(
            zip(range(step - len(examples) + 1, step + 1), zip(examples, tokens, strict=True), strict=True)
        )
        for old in [*self._counts][: -MOST_STEPS // 2] if len(self._counts) > MOST_STEPS else ():
            del self._counts[old]

    def rewind(self, step: int, seconds: float) -> None:
        """Continues from a checkpoint, after `step` steps and `seconds`."""
        self._counts = {at: counts for at, counts in self._counts.items() if at <= step}
        self._earlier = seconds
        self._started = None if self._started is None else time.monotonic()

    def at(self, step: int, given: Mapping[str, float], *, late: bool = False) -> float | None:
        """Where an entry of `step` lies; None if that is to be counted.

        Args:
            given: the row, which may have its own place on the axis.
            late: nothing more will be counted: the last count holds.
        """
        if self.name == "step" or self.name in given:
            return step if self.name == "step" else given[self.name]
        if self.name == "seconds":
            return self._earlier + (0.0 if self._started is None else time.monotonic() - self._started)
        if self.name == "epoch":
            if self._epoch is None and step:
                raise self._unknown(step)
            return self._epoch or 0
        if step not in self._counts:
            last = next(reversed(self._counts), 0)
            if not late and step > last and self._started is not None:
                return None
            if not late or last not in self._counts:
                raise self._unknown(step)
            step = last
        return self._counts[step][self.name == "tokens"]

    def _unknown(self, step: int) -> ValueError:
        return ValueError(
            f"`x_axis: {self.name}` needs the {self.name} at step {step}, which the run has not counted. Log them with "
            f"the values, as {self.name!r}."
        )


@dataclass
class LoggerConfig(Settings):
    """What is logged of a run, and where.

    Args:
        log_steps_every: log step metrics every this many training steps; 0: only per epoch.
        log_dir: the parent folder of the run folder, unless a tool has a `save_dir`; empty: "runs/<model>".
        log_file_verbosity: minimum level of the messages in `run.log`.
        tool_config: the logging tool, or a list of tools; null: only `metrics.jsonl`.
        x_axis: the x-axis of metrics in tools: step, epoch, examples, tokens or seconds.
        tool_start_timeout: seconds that a run waits at its end for tools that are still starting, all together.
        mirror: URL of a folder that gets a copy of each run folder, such as `s3://bucket/runs`, and in which
            `resume=auto` finds runs; empty: none.
        mirror_timeout: seconds that a run waits at its end for the copy to be complete.
    """

    log_steps_every: Annotated[int, AtLeast(0)] = 50
    log_dir: str = ""
    log_file_verbosity: Verbosity = "info"
    tool_config: ToolLoggerInterface.cfgtype | list[ToolLoggerInterface.cfgtype] | None = None
    x_axis: Axis = "step"
    tool_start_timeout: Annotated[float, AtLeast(0)] = 60.0
    mirror: str = ""
    mirror_timeout: Annotated[float, AtLeast(0)] = 60.0

    def problems(self) -> Iterator[Problem]:
        """A mirror that is no URL of a folder, or contains secrets."""
        if self.mirror and (problem := url_problem(self.mirror)):
            yield "mirror", f"`mirror`: {problem}"

    def check_mirror(self) -> None:
        """Raises an error if the mirror can never work: a missing package or bucket. Call it before slow work."""
        if self.mirror and (bucket := Store(self.mirror).missing_bucket()):
            text = f"`mirror`: the bucket {bucket!r} of {self.mirror} does not exist. Create it, or name another one."
            raise SettingsError([("trainer.logger.mirror", text)])


@register
@register_interface
class Logger(RegistrableConfigInterface):
    """Writes everything that is logged to `metrics.jsonl` in the run folder, and to the configured tools.

    Every row has its step, and rows of training and evaluation their epoch. All curves of a tool share one x-axis, the
    step, unless `x_axis` says otherwise; "epoch" is a separate curve. After a resume, tools show every point once.

    Each tool runs in its own thread, and so does the writer of `metrics.jsonl`. Logging never ends a run: a tool that
    fails, blocks or is not installed costs one warning, and `failures` counts the dropped entries. Only the primary
    process writes; in others every method does nothing.

    Values may be arrays on a device: logging them waits until they are computed.

    Args:
        config: what is logged.
        folder: the run folder.
        is_primary: whether this process writes; None: the primary process does.
    """

    config: LoggerConfig

    def __init__(self, config: LoggerConfig, folder: Path, *, is_primary: bool | None = None) -> None:
        self.config, self.folder = config, Path(folder)
        self.is_primary = placement.is_primary() if is_primary is None else is_primary
        self.axis = XAxis(config.x_axis)
        self._held: list[Callable[..., None]] = []  # entries of steps that are not counted yet
        self._step = 0
        self._is_closed = not self.is_primary
        self._own = DroppedRecords("Logger", "such values are not logged")
        self._messages: RunLog | None = None
        self._tools: list[BackgroundWriter] = []
        self._flushes: dict[BackgroundWriter, Callable[[float], Any]] = {}  # the last one of each tool by a checkpoint
        if self.is_primary:
            reserve_standard_streams()
            with contextlib.suppress(OSError):  # the writers report it
                self.folder.mkdir(parents=True, exist_ok=True)
            self._step = last_row(self.folder / METRICS_FILE)["step"]  # of a resumed run
            self._messages = RunLog(self.folder / LOG_FILE, config.log_file_verbosity)
            self._tools = _start_tools(config, self.folder)

    @property
    def log_dir(self) -> Path:
        """The run folder."""
        return self.folder

    @property
    def failures(self) -> dict[str, int]:
        """Number of dropped entries by tool, without zeros; "Logger": values that could not be converted."""
        counts = (self._own, *(tool.dropped for tool in self._tools))
        return {dropped.name: dropped.count for dropped in counts if dropped.count}

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the scalars of `values`; an "epoch" among them is the epoch of the row."""
        self._log("a row", lambda: self._row(step, numbers_of(values)))

    def write_edit(self, step: int, edit: Mapping[str, Any]) -> None:
        """Logs an edit of the training state, as plain data."""
        self._log("an edit", lambda: self._take(step, "write_edit", edit, given=edit))

    def log_scalar(self, name: str, value: Any, step: int) -> None:
        """Logs a scalar at `step`, its position on the x-axis."""
        self._log(name, lambda: self._row(step, {name: _single(value)}))

    def log_image(self, name: str, image: Any, step: int) -> None:
        """Logs an image: [height, width] or [height, width, channels], uint8 or floats from 0 to 1."""
        self._log(name, lambda: self._take(step, "image", name, pixels_of(image)))

    def log_figure(self, name: str, figure: Any, step: int) -> None:
        """Logs a matplotlib figure; it is rendered before this returns."""
        self._log(name, lambda: self._take(step, "figure", name, drawn(figure)))

    def log_histogram(self, name: str, values: Any, step: int) -> None:
        """Logs a histogram of `values`, which may have any shape."""
        self._log(name, lambda: self._take(step, "histogram", name, np.array(values)))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Logs a text."""
        self._log(name, lambda: self._take(step, "text", name, str(text)))

    def log_hparams(self, params: Mapping[str, Any], metrics: Mapping[str, Any] | None = None) -> None:
        """Logs hyperparameters, flattened to dotted names, and final metrics."""
        self._log(
            "hparams", lambda: self._take(self._step, "hparams", flat(params), numbers_of(metrics or {}), late=True)
        )

    def save_metrics(self, file_name: str, metrics: Mapping[str, Any]) -> None:
        """Writes metrics, also arrays, to `metrics/<file_name>.json` in the run folder."""

        def save() -> None:
            data = plain_of(metrics)
            self._tools[0].submit(lambda _: save_metrics(self.folder, file_name, data))

        self._log(file_name, save)

    def save_evaluation(self, step: int, epoch: int, name: str, metrics: Mapping[str, Any]) -> None:
        """Writes all metrics of an evaluation, also arrays, to `metrics/<name>.json`, which has those of the latest.

        Its arrays are also a row of `metrics.jsonl`; `write` logs the scalars.
        """
        given, record = {"epoch": epoch}, self._tools[:1]
        take = lambda: self._take(step, "evaluation", epoch, name, plain_of(metrics), given=given, tools=record)
        self._log(name, take)

    def count(self, step: int, epoch: int, examples: Sequence[int] = (), tokens: Sequence[int] = ()) -> None:
        """Counts for the x-axis: the examples and tokens of the run after each of the steps up to `step`."""
        self.axis.count(step, epoch, examples, tokens)
        self._release()

    def flush(self, timeout: float = 5.0) -> bool:
        """Waits at most `timeout` seconds until every tool has written all entries; returns whether they have.

        A tool that blocks is waited for once, and again only after it has made progress.
        """
        deadline = time.monotonic() + timeout
        written = [tool.flush(deadline) for tool in self._tools]  # all of them, also after a False
        is_written = all(written) and not self._own.count and not self._held
        if not is_written or self._is_closed:
            return is_written
        return bool(self._tools[0].ask(lambda tool: not tool.unwritten)(max(0.0, deadline - time.monotonic())))

    def mark(self) -> Callable[[], RecordMark | None]:
        """Marks the current position in `metrics.jsonl`; cheap, and does not wait.

        The returned function, called later in any thread, waits until all earlier rows are on disk and returns the size
        of the file at this position, with the rows that a full disk refused: a run that resumes from here truncates the
        file to that size, and adds these rows. None if that takes over half a minute, if the writer is disabled, or in
        a process that does not write. It also waits for the other tools, half a second at most.
        """
        if self._is_closed:
            return lambda: None
        position = self._tools[0].ask(lambda tool: tool.mark())

        def on_disk() -> RecordMark | None:
            found = position(MARK_SECONDS)
            if found is not None:
                with contextlib.suppress(OSError):  # not every file system can
                    sync(self.folder / METRICS_FILE)
            # a checkpoint does not wait again for a tool that has not done yet what an earlier one waited for
            ready = [tool for tool in self._tools[1:] if tool not in self._flushes or self._flushes[tool](0.0)]
            self._flushes |= {tool: tool.ask(lambda tool: not tool.flush()) for tool in ready}
            deadline = time.monotonic() + TOOL_SECONDS
            for tool in ready:
                self._flushes[tool](max(0.0, deadline - time.monotonic()))
            return found

        return on_disk

    def cut(self, mark: RecordMark | None, step: int = 0, seconds: float = 0.0) -> None:
        """Continues from a checkpoint: drops later rows of `metrics.jsonl`, and what tools have logged since.

        Waits until the file is truncated; the tools follow in their threads.

        Args:
            mark: the position in the file at the checkpoint. If it is unknown (None), everything is kept, with a
                warning.
            step: the step of the checkpoint.
            seconds: seconds of training up to the checkpoint.
        """
        if self._is_closed:
            return
        size = self._tools[0].ask(lambda tool: tool.cut(mark))(MARK_SECONDS)
        last = last_row(self.folder / METRICS_FILE)
        self._step, self._held = last["step"], []
        logged = last.get("seconds", 0.0)  # may be a little more: the clocks of the loop and the log differ
        self.axis.rewind(step, max(seconds, logged) if isinstance(logged, float) else seconds)
        if size is not None:
            for tool in self._tools[1:]:
                tool.submit(lambda tool: resume(tool, self.folder, size, step))

    def close(self, status: str) -> None:
        """Closes all tools; `status` is how the run ended. A second call does nothing.

        Waits for tools that are still starting, `tool_start_timeout` seconds at most, then a few seconds for all. One
        that blocks longer is abandoned.
        """
        if self._is_closed:
            return
        self._release(late=True)
        self._is_closed = True
        try:
            started = time.monotonic() + self.config.tool_start_timeout
            for tool in self._tools:
                tool.wait_for_start(started)
            deadline = time.monotonic() + CLOSING_SECONDS
            for tool in self._tools:
                tool.finish(status)
            for tool in self._tools:
                tool.join(deadline)
            line = f"Run {status}. Metrics: {self.folder / METRICS_FILE}."
            dropped = [f"{name} dropped {count} entries." for name, count in self.failures.items()]
            (LOG.warning if dropped else LOG.info)(" ".join([line, *dropped]))
        finally:
            if self._messages is not None:
                self._messages.close()

    def _log(self, name: str, log: Callable[[], None]) -> None:
        """Calls `log`, which copies the values and queues them; errors are counted."""
        if self._is_closed:
            return
        try:
            log()
        except Exception as failure:
            self._own.add_failure(failure, f"could not log {name!r}")

    def _row(self, step: int, numbers: dict[str, float]) -> None:
        self._step = step
        values = {name: value for name, value in numbers.items() if name != self.axis.name or name == "epoch"}
        self._take(step, "write", values, given=numbers)

    def _take(
        self,
        step: int,
        kind: str,
        *args: Any,
        given: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[BackgroundWriter] | None = None,
        late: bool = False,
    ) -> None:
        """Queues a call of the method `kind` of every tool, once it is known where on the x-axis the entry lies."""
        at = self.axis.at(step, given, late=late)
        if at is None:
            self._held.append(partial(self._take, step, kind, *args, given=given, tools=tools))
            return
        thing = args[-1]
        size = thing.nbytes if isinstance(thing, np.ndarray) else len(thing) if isinstance(thing, bytes | str) else 0
        for tool in self._tools if tools is None else tools:
            tool.submit(lambda tool: tool.take(step, at, kind, *args), size)

    def _release(self, *, late: bool = False) -> None:
        """Queues the entries whose steps are counted by now; with `late`, all of them."""
        held, self._held = self._held, []
        for take in held:
            self._log("an entry", partial(take, late=late))


def _single(value: Any) -> float:
    number = number_of(value)
    if number is None:
        raise ValueError(f"a scalar must be a single number, got a {type(value).__name__}.")
    return number


def _start_tools(config: LoggerConfig, folder: Path) -> list[BackgroundWriter]:
    """The tools in their threads; the writer of `metrics.jsonl` always comes first."""

    def make(kind: Any, own: Any) -> Any:
        tool = kind(own, folder)
        tool.axis = config.x_axis
        return tool

    names: list[str] = []
    tools: list[BackgroundWriter] = []
    for own in [JSONLConfig(), *(one for one in tools_of(config) if not isinstance(one, JSONLConfig))]:
        kind: Any = Registry.get_class(ToolLoggerInterface, own.class_name)  # type: ignore[arg-type]
        names.append(own.class_name)
        twins = names.count(own.class_name)
        name = f"{own.class_name} {twins}" if twins > 1 else own.class_name
        dropped = DroppedRecords(name, f"{METRICS_FILE} has all metrics" if tools else "its entries are lost")
        patience = 0.0 if tools else RECORD_SECONDS
        tools.append(BackgroundWriter(dropped, partial(make, kind, own), check=kind.require, patience=patience))
    tools[0].start()  # the file exists even if nothing is logged
    return tools


def tools_of(config: LoggerConfig) -> list[Any]:
    """The configurations of the tools as a list: none, one or several."""
    tools = config.tool_config
    return list(tools) if isinstance(tools, list | tuple) else [] if tools is None else [tools]


def folder_tool(config: LoggerConfig) -> Any | None:
    """The tool configuration that determines the run folder: the first with `save_dir`, `name` or `version`."""
    tools = [tool for tool in tools_of(config) if hasattr(tool, "save_dir")]
    return next((tool for tool in tools if tool.save_dir or tool.name or tool.version), next(iter(tools), None))


def run_path_parts(config: LoggerConfig, model_name: str) -> tuple[Path, str, str | None]:
    """The parts of the run folder's path: parent folder, experiment name, version (None: the current time).

    `save_dir`, `name` and `version` of the first tool that has them come first, then the logger's `log_dir`, then
    "runs" and the model's name.
    """
    tool = folder_tool(config)
    parent = getattr(tool, "save_dir", "") or config.log_dir
    name = getattr(tool, "name", "") or ("" if parent else model_name)
    version, adds_time = getattr(tool, "version", ""), getattr(tool, "use_timestamp_version", None)
    if version and adds_time:  # a folder of all runs of this version, in which `resume="auto"` finds them
        return Path(parent or "runs"), f"{name}-{version}" if name else version, None
    return Path(parent or "runs"), name, version or ("0" if adds_time is False else None)
