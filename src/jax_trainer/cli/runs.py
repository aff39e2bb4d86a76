"""Which run a command means, and where in it: a folder, one of its checkpoints, or the word `resume=…`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.names import shown
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.cli.outcomes import WrongInput
from jax_trainer.runs import run_and_step

Which = int | Literal["best", "latest"]

_WORD = "resume"
_POSSIBLE = (
    "`resume=auto` (goes on with the newest run of exactly this configuration, or begins one), `resume=never` (begins "
    "one), or `resume=` with the folder of a run or of one of its checkpoints"
)


@dataclass(frozen=True)
class RunSelector:
    """A run that was begun before, and which of its checkpoints."""

    folder: RunFolder
    which: Which

    def check_saved(self) -> None:
        """Refuses a step that was never saved; one that is damaged is there, and whoever restores it says how."""
        if not isinstance(self.which, int) or (self.folder.checkpoints / name_of(self.which)).is_dir():
            return
        steps = CheckpointStore(self.folder.checkpoints).steps()
        there = f"There are {', '.join(map(str, steps))}." if steps else "There is none."
        raise WrongInput(f"{self.folder.path} has no checkpoint of step {self.which}. {there}")

    def path(self, trainer: Any) -> Path:
        """What `train_model` is to go on from; `trainer` knows which checkpoint is the best."""
        match self.which:
            case "latest":
                return self.folder.path
            case "best":
                return self._best(trainer)
            case step:
                return self.folder.checkpoints / name_of(step)

    def _best(self, trainer: Any) -> Path:
        saver, monitors = trainer.config.saver, not trainer.compares_itself
        options = {} if saver is None else saver.store_options(monitors=monitors)
        better = {} if monitors else {"better": trainer.is_new_model_better}
        best = CheckpointStore(self.folder.checkpoints, **{**options, **better}).best()
        if best is None:
            raise WrongInput(
                f"{self.folder.path} has no checkpoint that can be called the best. Take `--which latest`."
            )
        return best.path


def select_run(asked: argparse.Namespace, otherwise: Which) -> RunSelector:
    """The run that RUN and `--which` mean; `otherwise`, where neither names a checkpoint. It may be somebody else's."""
    folder, step = _opened(asked.folder)
    if step is not None and asked.which is not None:
        raise WrongInput(f"{shown(asked.folder)} is the checkpoint of step {step} already. Leave out `--which`.")
    return RunSelector(folder, step if step is not None else asked.which if asked.which is not None else otherwise)


def without_resume(changes: Sequence[str]) -> tuple[list[str], RunSelector | Literal["auto"] | None]:
    """The overrides without the word `resume=…`, and what it asks for; None: a new run. Of two, the last one counts."""
    words = [change for change in changes if change.partition("=")[0] == _WORD]
    others = [change for change in changes if change not in words]
    value = words[-1].partition("=")[2] if words else "never"
    match value:
        case "never":
            return others, None
        case "auto":
            return others, "auto"
    try:
        folder, step = _opened(value or "no folder")
    except WrongInput as error:
        raise WrongInput(f"expected {_POSSIBLE}, found {shown(value)}. {error}") from None
    return others, RunSelector(folder, "latest" if step is None else step)


def _opened(path: str) -> tuple[RunFolder, int | None]:
    try:
        return run_and_step(Path(path))
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None
