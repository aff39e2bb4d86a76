"""Doing one thing after the other with a checkpoint."""

from collections.abc import Callable
from functools import reduce
from typing import Any


def serial(*processors: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that calls `processors` one after the other, each with what the one before returned.

    One that returns nothing passes on what it was given.

    >>> seen = []
    >>> serial(lambda x: x + 1, seen.append, lambda x: 10 * x)(1), seen
    (20, [2])
    """
    for number, processor in enumerate(processors):
        if not callable(processor):
            raise TypeError(f"Processor {number} is a {type(processor).__name__}, which cannot be called.")

    def process(checkpoint: Any) -> Any:
        return reduce(_passed_on, processors, checkpoint)

    return process


def _passed_on(given: Any, processor: Callable[[Any], Any]) -> Any:
    returned = processor(given)
    return given if returned is None else returned
