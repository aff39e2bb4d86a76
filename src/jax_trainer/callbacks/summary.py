"""Writes a summary of the model."""

import logging
import math
from dataclasses import dataclass

import jax
from compoconf import register

from jax_trainer.callbacks.callback import Callback, CallbackConfig
from jax_trainer.checkpoint.files import write_atomically
from jax_trainer.core import PyTree
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.output import safe_console

LOG = logging.getLogger("jax_trainer")
MODEL_FILE, PARAMS_FILE = "model.txt", "params.txt"


@dataclass
class ModelSummaryConfig(CallbackConfig):
    """Options of the model summary.

    Args:
        every_n_epochs: not used.
        every_n_minutes: not used.
        show: also print it when training starts.
    """

    show: bool = False


@register
class ModelSummary(Callback):
    """Writes the layers to `model.txt` and the parameters to `params.txt`.

    Without a trainer, which logs it itself, it also logs their number as `param/num_model_params`, at step 0.
    """

    config: ModelSummaryConfig

    def on_training_start(self) -> None:
        params = self.state.params
        table = parameter_table(params)
        layers = self._layers() or table  # in all processes: the weights may be sharded over them
        if not self.is_primary:
            return
        write_atomically(self.run.folder / MODEL_FILE, f"{layers.rstrip()}\n")
        write_atomically(self.run.folder / PARAMS_FILE, f"{table}\n")
        if self.event.step == 0 and self.trainer is None:  # a trainer logs it itself
            self.run.logger.log_scalar("param/num_model_params", _count(params), 0)
        if self.config.show:
            safe_console().print(layers.rstrip(), markup=False, highlight=False, soft_wrap=True)

    def _layers(self) -> str:
        """The trainer's table of layers; "" if it has none."""
        if self.trainer is None:
            return ""
        try:
            return self.trainer.tabulate()
        except Exception as failure:  # a summary must not end a run
            LOG.warning(f"ModelSummary lists parameters only. {type(failure).__name__}: {failure}")
            return ""


def parameter_table(params: PyTree) -> str:
    """One line per array of parameters: path, shape, dtype, number; and the sum of all.

    >>> import numpy as np
    >>> print(parameter_table({"dense": {"bias": np.zeros(3), "kernel": np.zeros((2, 3))}}))
    parameter     shape   dtype    number
    dense.bias    [3]     float64       3
    dense.kernel  [2, 3]  float64       6
    total                               9
    """
    rows = [("parameter", "shape", "dtype", "number")]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        rows.append((leaf_path(path), str(list(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"))
    rows.append(("total", "", "", f"{_count(params):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_aligned(row, widths) for row in rows)


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    *words, number = row
    left = (word.ljust(width) for word, width in zip(words, widths[:-1], strict=True))
    return "  ".join([*left, number.rjust(widths[-1])])


def _count(params: PyTree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
