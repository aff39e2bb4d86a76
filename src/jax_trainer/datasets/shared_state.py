"""The positions of loaders that keep their own, in several processes: each has another one, and all are kept."""

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
    """What of `state` belongs to process `index` of `count`; all of it where it is of another number of processes."""
    return state[_KEY][index] if _is_joined(state) and len(state[_KEY]) == count else state


def check_own(state: Any, name: str, count: int) -> None:
    """Refuses a position that was kept by another number of processes."""
    if _is_joined(state):
        raise DataError(
            f"The position in the {name!r} data was kept by {len(state[_KEY])} processes, each with its own, and there "
            f"are {count} now. Go on with {len(state[_KEY])}, or use a loader whose order does not depend on that: an "
            "`ArrayLoader`, a `GrainLoader`."
        )


def _is_joined(state: Any) -> bool:
    return isinstance(state, dict) and state.keys() == {_KEY}
