"""A copy of a run folder in a store, such as `s3://bucket/runs`: kept up to date while the run trains, and read back.

Checkpoints are written, verified and retained locally. A `Mirror` observes the folder from a thread of its own, and
makes the store agree with it; `pull` brings a run to a machine that does not have it.
"""

from jax_trainer.mirror.mirror import ADDRESS, Mirror, address_of
from jax_trainer.mirror.pulling import pull, remote_records
from jax_trainer.mirror.remote import RemoteRun

__all__ = ["ADDRESS", "Mirror", "RemoteRun", "address_of", "pull", "remote_records"]
