"""Which run and checkpoint a command selects: by a folder, a checkpoint, or `resume=…`."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jax_trainer.checkpoint.files import shown
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.index import name_of
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.cli.outcomes import WrongInput
from jax_trainer.runs import run_and_step

Which = int | Literal["best", "latest"]

_KEY = "resume"
_VALUES = (
    "`resume=auto` (resumes the newest run with exactly this configuration, or starts a new one), `resume=never` "
    "(starts a new one), or `resume=` with the folder of a run or checkpoint"
)


@dataclass(frozen=True)
class RunSelector:
    """An existing run and one of its checkpoints."""

    folder: RunFolder
    which: Which

    def check_saved(self) -> None:
        """Raises if no checkpoint of this step exists; a damaged one is reported when it is restored."""
        if not isinstance(self.which, int) or (self.folder.checkpoints / name_of(self.which)).is_dir():
            return
        steps = CheckpointStore(self.folder.checkpoints).steps()
        available = f"Saved steps: {', '.join(map(str, steps))}." if steps else "It has no checkpoint at all."
        raise WrongInput(f"{self.folder.path} has no checkpoint of step {self.which}. {available}")

    def path(self, trainer: Any) -> Path:
        """The path that `train_model` resumes from; `trainer` decides which checkpoint is the best."""
        match self.which:
            case "latest":
                return self.folder.path
            case "best":
                return self._best(trainer)
            case step:
                return self.folder.checkpoints / name_of(step)

    def _best(self, trainer: Any) -> Path:
        saver, monitors = trainer.config.saver, not trainer.has_custom_comparison
        options = {} if saver is None else saver.store_options(monitors=monitors)
        better = {} if monitors else {"better": trainer.is_new_model_better}
        best = CheckpointStore(self.folder.checkpoints, **{**options, **better}).best()
        if best is None:
            raise WrongInput(f"{self.folder.path} has no best checkpoint. Use `--which latest`.")
        return best.path


def select_run(args: argparse.Namespace, default: Which) -> RunSelector:
    """The run and checkpoint of RUN and `--which`; `default` if neither names a checkpoint."""
    folder, step = _opened(args.folder)
    if step is not None and args.which is not None:
        raise WrongInput(f"{shown(args.folder)} is already the checkpoint of step {step}. Leave out `--which`.")
    return RunSelector(folder, step if step is not None else args.which if args.which is not None else default)


def without_resume(changes: Sequence[str]) -> tuple[list[str], RunSelector | Literal["auto"] | None]:
    """The overrides without `resume=…`, and the run that it selects; None: a new run. The last one wins."""
    resumes = [change for change in changes if change.partition("=")[0] == _KEY]
    others = [change for change in changes if change not in resumes]
    value = resumes[-1].partition("=")[2] if resumes else "never"
    match value:
        case "never":
            return others, None
        case "auto":
            return others, "auto"
    try:
        folder, step = _opened(value or "no folder")
    except WrongInput as error:
        raise WrongInput(f"expected {_VALUES}, found {shown(value)}. {error}") from None
    return others, RunSelector(folder, "latest" if step is None else step)


def _opened(path: str) -> tuple[RunFolder, int | None]:
    try:
        return run_and_step(Path(path))
    except (OSError, ValueError) as error:
        raise WrongInput(str(error)) from None
