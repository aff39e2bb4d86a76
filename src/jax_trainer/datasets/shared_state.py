"""States of stateful loaders in several processes: each process has its own, and a checkpoint holds all of them."""

from collections.abc import Sequence
from typing import Any

from jax_trainer.datasets.foreign import DataError

_KEY = "of each process"


def joined_states(states: Sequence[Any]) -> dict[str, Any]:
    """The states of all processes as one.

    >>> own_state(joined_states(["first", "second"]), 1, 2)
    'second'
    """
    return {_KEY: list(states)}


def own_state(state: Any, index: int, count: int) -> Any:
    """The part of `state` for process `index` of `count`; `state` itself if it is of another number of processes."""
    return state[_KEY][index] if _is_joined(state) and len(state[_KEY]) == count else state


def check_process_count(state: Any, name: str, count: int) -> None:
    """Raises a `DataError` if `state` was saved by another number of processes."""
    if _is_joined(state):
        raise DataError(
            f"The state of the {name!r} data was saved by {len(state[_KEY])} processes, and {count} are running. "
            f"Resume with {len(state[_KEY])}, or use a loader whose order does not depend on the number of processes: "
            "an `ArrayLoader` or a `GrainLoader`."
        )


def _is_joined(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() == {_KEY}
