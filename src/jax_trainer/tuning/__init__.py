"""Looks for the values with which an experiment does best: a space, trials, and what came out.

Optuna chooses and cuts; it is the extra `tune`, loaded when it is used. Trials are runs like any other. A study is
plain data in a file or a database, which several processes may share, and which goes on where it stopped.
"""

from jax_trainer.tuning.choosing import StudyError
from jax_trainer.tuning.dimensions import Choice, Range, Space
from jax_trainer.tuning.result import TuneResult
from jax_trainer.tuning.space import read_space
from jax_trainer.tuning.storage import StorageError
from jax_trainer.tuning.tuning import tune

__all__ = ["Choice", "Range", "Space", "StorageError", "StudyError", "TuneResult", "read_space", "tune"]
