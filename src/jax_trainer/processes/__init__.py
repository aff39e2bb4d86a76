"""The processes of one job: how they find each other, agree, watch each other, and end together.

Numbers are added up by JAX's own collectives. Words (where the run's folder is, whether a save went well, who failed)
go through the key-value store of `jax.distributed`, which never waits for a device and works from any thread.
"""

from jax_trainer.processes.joining import HEARTBEAT, Job, JoiningError, join, leave, started_together
from jax_trainer.processes.peers import Peers, PeersError, peers
from jax_trainer.processes.watch import PeerFailedError, Watch

__all__ = [
    "HEARTBEAT",
    "Job",
    "JoiningError",
    "PeerFailedError",
    "Peers",
    "PeersError",
    "Watch",
    "join",
    "leave",
    "peers",
    "started_together",
]
