"""The run folder of a trainer, and the run that it resumes."""

from pathlib import Path
from typing import Any, Literal

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.config import dump_config
from jax_trainer.logger import run_path_parts
from jax_trainer.runs import RunTarget, run_and_step
from jax_trainer.trainer.stored import configs_of

Resume = bool | Literal["auto"] | str | Path


def resolve_target(trainer: Any, resume: Resume, *, fork: bool) -> RunTarget:
    """The folder to write to and the run to resume; creates the folder of a new run."""
    if fork and not resume:
        raise ValueError("`fork` resumes into a new folder: pass `resume`, the run to resume from.")
    found, step = _run_to_resume(trainer, resume)
    if found is None or fork:
        return RunTarget(RunFolder.create(*_where(trainer)), found, step)
    return RunTarget(found, found, step)


def _run_to_resume(trainer: Any, resume: Resume) -> tuple[RunFolder | None, int | None]:
    if resume == "auto":
        return RunFolder.find(*_where(trainer), config_text=dump_config(configs_of(trainer))), None
    if isinstance(resume, str | Path):
        return run_and_step(Path(resume))
    if resume and trainer.folder is None:
        raise ValueError("`resume=True`: this trainer has no run folder. Pass it, as in `resume='runs/…'`.")
    return (trainer.folder if resume else None), None


def _where(trainer: Any) -> tuple[Path, str, str | None]:
    return run_path_parts(trainer.config.logger, trainer.model_name)
