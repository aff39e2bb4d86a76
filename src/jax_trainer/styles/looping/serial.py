"""`serial`: composes processors of checkpoints."""

from collections.abc import Callable
from functools import reduce
from typing import Any


def serial(*processors: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that calls `processors` in order, each with the result of the previous one.

    A processor that returns None passes its argument on.

    >>> seen = []
    >>> serial(lambda x: x + 1, seen.append, lambda x: 10 * x)(1), seen
    (20, [2])
    """
    for number, processor in enumerate(processors):
        if not callable(processor):
            raise TypeError(f"Processor {number} is a {type(processor).__name__}, which cannot be called.")

    def process(checkpoint: Any) -> Any:
        return reduce(_apply, processors, checkpoint)

    return process


def _apply(value: Any, processor: Callable[[Any], Any]) -> Any:
    returned = processor(value)
    return value if returned is None else returned
