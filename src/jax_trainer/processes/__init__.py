"""The processes of one job: how they find each other, agree, watch each other, and end together.

Numbers are added up by JAX's own collectives. Words (where the run's folder is, whether a save went well, who failed)
go through the key-value store of `jax.distributed`, which never waits for a device and works from any thread.
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
