"""Counters and histograms of a server, in the text format of Prometheus."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Histogram:
    """How many values are at most as large as each of the bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        self._counts[next((n for n, bound in enumerate(self._bounds) if value <= bound), len(self._bounds))] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """The lines of this histogram."""
        total = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum:g}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """What a server has done.

    Args:
        sizes: the batch sizes of the program.
        waiting: returns the number of examples in the queue.
    """

    def __init__(self, sizes: Sequence[int], waiting: Callable[[], int]) -> None:
        self.requests: Counter[int] = Counter()  # by status code
        self.examples = self.padding = 0
        self._waiting = waiting
        self._seconds, self._batches, self._batch_seconds = Histogram(SECONDS), Histogram(sizes), Histogram(SECONDS)

    def add_request(self, status: int, seconds: float) -> None:
        """Counts a request for a prediction."""
        self.requests[status] += 1
        self._seconds.add(seconds)

    def add_batch(self, examples: int, size: int, seconds: float) -> None:
        """Counts a batch of `examples`, padded to `size`."""
        self.examples += examples
        self.padding += size - examples
        self._batches.add(examples)
        self._batch_seconds.add(seconds)

    def text(self) -> str:
        """All of them."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _described("requests_total", "counter", "Requests for predictions, by status code.")
        yield from (f'jax_trainer_requests_total{{code="{code}"}} {n}' for code, n in sorted(self.requests.items()))
        for name, kind, value, text in (
            ("examples_total", "counter", self.examples, "Examples that were predicted."),
            ("padding_total", "counter", self.padding, "Rows of zeros that filled batches."),
            ("queue_examples", "gauge", self._waiting(), "Examples that wait."),
        ):
            yield from _described(name, kind, text)
            yield f"jax_trainer_{name} {value}"
        for name, histogram, text in (
            ("request_seconds", self._seconds, "Time from a request to its answer."),
            ("batch_seconds", self._batch_seconds, "Time of running a batch."),
            ("batch_examples", self._batches, "Examples per batch."),
        ):
            yield from _described(name, "histogram", text)
            yield from histogram.lines(f"jax_trainer_{name}")


def _described(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP jax_trainer_{name} {text}"
    yield f"# TYPE jax_trainer_{name} {kind}"
