"""Multi-process jobs: joining, exchanging strings, detecting failed processes, ending together.

Arrays are reduced by JAX's collectives. Strings (the run folder, the success of a save, failures) are exchanged through
the key-value store of `jax.distributed`, which never waits for a device and works from any thread.

Importing this package gives stores their checkpoint backend for several processes, and runs their peers.
"""

from jax_trainer.multihost.checkpoints import MultiHostBackend
from jax_trainer.multihost.group import (
    HEARTBEAT,
    Job,
    JoinError,
    ProcessGroup,
    ProcessGroupError,
    detect_launcher,
    join,
    leave,
    process_group,
)
from jax_trainer.multihost.together import Together
from jax_trainer.multihost.watchdog import LOST, ProcessFailedError, ProcessLostError, Watchdog

__all__ = [
    "HEARTBEAT",
    "LOST",
    "Job",
    "JoinError",
    "MultiHostBackend",
    "ProcessFailedError",
    "ProcessGroup",
    "ProcessGroupError",
    "ProcessLostError",
    "Together",
    "Watchdog",
    "detect_launcher",
    "join",
    "leave",
    "process_group",
]
