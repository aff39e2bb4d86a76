"""Starts the processes that train one experiment together: on this machine, or on an engine that the user has.

`Launch` is what every engine needs to know, also about independent workers. `local` and `ray_cluster` start an
`Attempt` and wait for it, `slurm` writes the script of a job and submits it, `kubernetes` writes a manifest. None of
them schedules or stores anything itself.
"""

from jax_trainer.tools.launching.job import RESUMABLE, Attempt, Launch, LaunchError

__all__ = ["RESUMABLE", "Attempt", "Launch", "LaunchError"]
