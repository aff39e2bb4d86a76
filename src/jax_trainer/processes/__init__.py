"""Multi-process jobs: joining, exchanging strings, detecting failed processes, ending together.

Arrays are reduced by JAX's collectives. Strings (the run folder, the success of a save, failures) are exchanged through
the key-value store of `jax.distributed`, which never waits for a device and works from any thread.
"""

from jax_trainer.processes.group import ProcessGroup, ProcessGroupError, process_group
from jax_trainer.processes.joining import HEARTBEAT, Job, JoinError, detect_launcher, join, leave
from jax_trainer.processes.watchdog import ProcessFailedError, Watchdog

__all__ = [
    "HEARTBEAT",
    "Job",
    "JoinError",
    "ProcessFailedError",
    "ProcessGroup",
    "ProcessGroupError",
    "Watchdog",
    "detect_launcher",
    "join",
    "leave",
    "process_group",
]
