"""The signals that stop a training after its current step, with a save, and the exit codes that follow."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
STOP_CODES = tuple(128 + number for number in STOP_SIGNALS)


@contextmanager
def handled(handle: Callable[[int, Any], None], numbers: Sequence[int] = STOP_SIGNALS) -> Iterator[dict[int, Any]]:
    """Has `handle` called for the signals of `numbers`; gives the handlers before, which are back afterwards.

    A signal that is ignored stays ignored, as SIGHUP under `nohup`. SIGUSR1, SIGUSR2 and SIGHUP that have a handler
    already keep it: they have no meaning but the one that the program gives them.
    """
    before: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    both = (signal.SIGINT, signal.SIGTERM)
    taken = {n: one for n, one in before.items() if one is signal.SIG_DFL or (n in both and callable(one))}
    try:
        for number in taken:
            signal.signal(number, handle)
        yield taken
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
