"""How fast a run is, and how long the rest of it takes."""

from collections import deque

from jax_trainer.engine import Every

WINDOW = 60.0  # seconds over which a rate is measured


class Pace:
    """Steps per second over the last minute, without pauses.

    >>> pace = Pace()
    >>> pace.count(1, now=30.0)  # after the first step, which compiles
    >>> pace.count(5, now=32.0)
    >>> pace.pause(now=32.0)
    >>> pace.resume(now=100.0)
    68.0
    >>> pace.count(9, now=102.0)
    >>> pace.rate
    2.0
    """

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()  # seconds without pauses, and steps
        self._paused, self._since = 0.0, 0.0  # seconds so far, and since when, if it is paused

    def count(self, steps: int, now: float) -> None:
        """Notes that so many steps are done. The first call starts the measurement."""
        at = now - self._paused
        if not self._points or steps > self._points[-1][1]:
            self._points.append((at, steps))
        while len(self._points) > 2 and self._points[1][0] <= at - WINDOW:
            self._points.popleft()

    def pause(self, now: float) -> None:
        """Excludes the time from now on."""
        self._since = self._since or now

    def resume(self, now: float) -> float:
        """Ends the pause; returns its seconds."""
        seconds, self._since = now - self._since if self._since else 0.0, 0.0
        self._paused += seconds
        return seconds

    @property
    def rate(self) -> float:
        """Steps per second; 0 if it is not known yet."""
        if len(self._points) < 2:
            return 0.0
        (start, before), (end, done) = self._points[0], self._points[-1]
        return (done - before) / (end - start) if end > start else 0.0


class TimeLeft:
    """How long the rest of a run takes: its steps, and its evaluations.

    Args:
        epochs: total number of epochs, if known.
        steps: the last step of training, if known.
        eval_every: when evaluations happen.
    """

    def __init__(self, epochs: int | None, steps: int | None, eval_every: Every = Every()) -> None:
        self._epochs, self._steps, self._eval_every = epochs, steps, eval_every
        self.evaluation = 0.0  # seconds of the latest one

    def seconds(self, step: int, complete_epochs: int, rate: float) -> float | None:
        """Seconds from here to the end; None if that is not known."""
        if not rate or self._steps is None:
            return None
        every, training = self._eval_every, max(0, self._steps - step) / rate
        rounds = training / (60 * every.minutes) if every.minutes else 0.0
        if every.steps:
            rounds += self._steps // every.steps - step // every.steps
        if every.epochs and self._epochs is not None:
            rounds += self._epochs // every.epochs - complete_epochs // every.epochs
        return training + rounds * self.evaluation


def clock(seconds: float) -> str:
    """Seconds as minutes and hours.

    >>> clock(75), clock(3675), clock(200_000)
    ('1:15', '1:01:15', '2 d 7:33:20')
    """
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{hours}:{minutes:02}:{seconds:02}" if hours or days else f"{minutes}:{seconds:02}"
    return f"{days} d {text}" if days else text


def speed(rate: float, unit: str = "step") -> str:
    """A rate as text: so many per second, or the seconds of each if they are slow.

    >>> speed(2124.4), speed(2.124), speed(0.25), speed(0.25, "batch")
    ('2,124/s', '2.12/s', '4 s/step', '4 s/batch')
    """
    if rate < 1:
        return f"{1 / rate:.3g} s/{unit}"
    return f"{rate:.3g}/s" if rate < 100 else f"{rate:,.0f}/s"
