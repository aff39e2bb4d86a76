"""Where a training of a trainer writes, and which run it goes on with."""

from pathlib import Path
from typing import Any, Literal

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.config import dump_config
from jax_trainer.logger import run_place
from jax_trainer.runs import RunTarget, run_and_step
from jax_trainer.trainer.stored import configs_of

Resume = bool | Literal["auto"] | str | Path


def resolve_target(trainer: Any, resume: Resume, *, fork: bool) -> RunTarget:
    """Where a training of `trainer` writes; makes the folder of a new run."""
    if fork and not resume:
        raise ValueError("`fork` goes on in a new folder: say with `resume` what to go on from.")
    found, step = _asked_for(trainer, resume)
    if found is None or fork:
        return RunTarget(RunFolder.create(*_where(trainer)), found, step)
    return RunTarget(found, found, step)


def _asked_for(trainer: Any, resume: Resume) -> tuple[RunFolder | None, int | None]:
    if resume == "auto":
        return RunFolder.find(*_where(trainer), config_text=dump_config(configs_of(trainer))), None
    if isinstance(resume, str | Path):
        return run_and_step(Path(resume))
    if resume and trainer.folder is None:
        raise ValueError("There is nothing to resume: pass the run's folder, as in `resume='runs/…'`.")
    return (trainer.folder if resume else None), None


def _where(trainer: Any) -> tuple[Path, str, str | None]:
    return run_place(trainer.config.logger, trainer.model_name)
