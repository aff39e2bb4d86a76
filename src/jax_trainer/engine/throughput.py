"""Rates of a training: steps, examples, tokens and FLOPs per second."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_trainer.core import Batch, MetricWindow, TrainTrace
from jax_trainer.engine.accelerators import memory_of, peak_flops


class Throughput:
    """Counts the examples and tokens of the steps whose metrics were read.

    Attributes:
        token_leaf: the entry of a batch that has token ids; None: there are none, or all batches have one length.
    """

    def __init__(self) -> None:
        self._examples = self._tokens = 0  # since the last call of `rates`
        self._flops = 0.0  # of a step
        self._lengths: deque[tuple[int, int]] = deque()  # tokens of an example, with the first step that has as many
        self.token_leaf: int | None = None

    def expect(self, trace: TrainTrace, batch: Batch, *, one_length: bool) -> None:
        """Steps like the traced one follow, on such batches; `one_length`: all of them have as many tokens."""
        self._flops, leaves = trace.flops, jax.tree.leaves(batch)
        # token ids: rows of integers that index an embedding or are predicted; labels have no second axis
        ids = [use.leaf for use in trace.indices if np.ndim(leaves[use.leaf]) == 2]
        longest = max(ids, key=lambda leaf: np.shape(leaves[leaf])[1], default=None)
        if longest is not None and one_length:
            self._lengths.append((0, np.shape(leaves[longest])[1]))
        elif longest is not None:
            self.token_leaf = longest

    def note_length(self, length: int, first: int) -> None:
        """Notes that examples of the steps from `first` on have `length` tokens: batches may have several lengths."""
        if not self._lengths or length != self._lengths[-1][1]:
            self._lengths.append((first, length))

    def count(self, rows: MetricWindow) -> np.ndarray:
        """Counts these steps; returns the number of tokens in an example of each, 0 without token ids."""
        while len(self._lengths) > 1 and self._lengths[1][0] <= rows.first:
            self._lengths.popleft()
        lengths = np.zeros(rows.last - rows.first + 1, np.int64)
        for start, length in self._lengths:
            lengths[max(0, start - rows.first) :] = length
        self._examples += int(rows.examples.sum())
        self._tokens += int(rows.examples @ lengths)
        return lengths

    def rates(self, steps: int, seconds: float, devices: Sequence[Any]) -> dict[str, float]:
        """Rates of `steps` steps in `seconds`, counted since the last call; memory of the devices."""
        examples, tokens = self._examples, self._tokens
        self._examples = self._tokens = 0
        if not steps or seconds <= 0:
            return {}
        speed = {"steps_per_second": steps / seconds, "examples_per_second": examples / seconds}
        if tokens:
            speed["tokens_per_second"] = tokens / seconds
        if self._flops:
            speed["model_flops_per_second"] = self._flops * steps / seconds
            if (peak := peak_flops(devices[0])) is not None:
                speed["mfu"] = speed["model_flops_per_second"] / (peak * len(devices))
        return speed | memory_of(devices)
