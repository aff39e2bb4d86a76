"""Fault injection for tests: see `jax_trainer.core.failpoints` for the format and the actions."""

from collections.abc import Iterator
from contextlib import contextmanager

from jax_trainer.core.failpoints import FaultInjected, arm, failpoint

__all__ = ["FaultInjected", "failpoint", "fault"]


@contextmanager
def fault(spec: str) -> Iterator[None]:
    """Arms one failpoint inside the block: `with fault("step:raise:3"): …` fails at the third step."""
    arm(spec)
    try:
        yield
    finally:
        arm(None)
