"""Hyperparameter search with Optuna: a search space, a study of trials, and its result.

Optuna samples and prunes; it is the extra `tune`, imported lazily. Trials are ordinary runs. A study is stored in a
journal file or a database, can be shared by several processes, and is resumed by calling `tune` again.
"""

from jax_trainer.tools.tuning.space import Choice, Range, Space, StudyError, read_space
from jax_trainer.tools.tuning.storage import StorageError
from jax_trainer.tools.tuning.tuning import TuneResult, tune

__all__ = ["Choice", "Range", "Space", "StorageError", "StudyError", "TuneResult", "read_space", "tune"]
