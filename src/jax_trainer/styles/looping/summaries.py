"""Reports of checkpoints on stdout and for TensorBoard."""

import weakref
from pathlib import Path
from typing import TypeVar

from jax_trainer.core.output import OUT
from jax_trainer.logger import TensorboardConfig, TensorboardToolLogger
from jax_trainer.styles.looping.checkpoints import Checkpoint, by_full_name, metrics_of

AnyCheckpoint = TypeVar("AnyCheckpoint", bound=Checkpoint)
_GROUP, _LABEL = len("train"), len("seconds_per_step")  # minimum column widths


class SummaryLogger:
    """Prints a report of every checkpoint or summary that it is called with; returns it.

    >>> logger = SummaryLogger()
    """

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Prints the report of `summary`."""
        OUT.write("\n" + "".join(f"{line}\n" for line in report(summary)))
        return summary


def report(checkpoint: Checkpoint) -> list[str]:
    """The lines of a report."""
    metrics, head = metrics_of(checkpoint), f"Step {checkpoint.step:6d}:"
    group_width = max([_GROUP, *map(len, metrics)])
    label_width = max([_LABEL, *(len(label) for named in metrics.values() for label in named)])
    ran = f"{head} Ran {checkpoint.n_completed_steps} train steps in {checkpoint.elapsed_time:.2f} seconds"
    return [ran] + [
        f"{head} {group:<{group_width}} {label:>{label_width}} | {value:.8f}"
        for group, named in metrics.items()
        for label, value in named.items()
    ]


class SummaryWriter:
    """Writes the metrics of every checkpoint or summary that it is called with to TensorBoard; returns it.

    All metrics go to one file, as "group/label", and are on disk when it returns. Needs the extra `tensorboard`.
    """

    def __init__(self, output_dir: str | Path) -> None:
        TensorboardToolLogger.require()
        self._folder = Path(output_dir).absolute()
        self._tool: TensorboardToolLogger | None = None

    def __call__(self, summary: AnyCheckpoint) -> AnyCheckpoint:
        """Writes the metrics of `summary`."""
        if self._tool is None:
            self._tool = TensorboardToolLogger(TensorboardConfig(), self._folder)
            self._close = weakref.finalize(self, self._tool.close, "completed")
        self._tool.write(summary.step, by_full_name(metrics_of(summary)))
        self._tool.flush()
        return summary

    def close(self) -> None:
        """Closes the file; later metrics go to a new one."""
        if self._tool is not None:
            self._close()
            self._tool = None
