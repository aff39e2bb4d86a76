"""The commands `eval` and `test`: evaluate checkpoints of a run, those that exist or those that a training saves."""

import argparse
import os
import shlex
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.files import read_json, shown
from jax_trainer.checkpoint.folder import RECORD, RunFolder
from jax_trainer.checkpoint.index import CheckpointInfo, checkpoint_infos
from jax_trainer.checkpoint.lock import is_locked
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore
from jax_trainer.cli import commands, tables
from jax_trainer.cli.commands import Which, changes_of, located_errors, scalars, select_run
from jax_trainer.cli.outcomes import Failure, Outcome, WrongInput
from jax_trainer.config import redact
from jax_trainer.output import safe_console
from jax_trainer.runs.evaluations import (
    Evaluation,
    EvaluationRecord,
    EvaluationRecordError,
    Number,
    evaluation_record,
    json_number,
)
from jax_trainer.suggestions import suggestion
from jax_trainer.trainer import EvalSet
from jax_trainer.trainer.training import named_sets

TEST = "test"
_MAX_RECORD = 1 << 24


def test(args: argparse.Namespace) -> Outcome:
    """Evaluate a checkpoint of a run on the test set of its dataset; by default the best checkpoint."""
    changes, source = changes_of(args), select_run(args, "best")
    loaded, folder = commands.stored(source, changes), source.folder
    if not CheckpointStore(folder.checkpoints).infos():
        restart = shlex.join(["jax-trainer", "resume", str(folder.path)])
        raise WrongInput(f"{folder.path} has no checkpoint. Train it from the start with `{restart}`.")
    source.check_saved()
    with located_errors(args, loaded):
        trainer = commands.built(loaded, folder)
        if trainer.dataset.test_loader is None:
            raise WrongInput(f"The dataset of {folder.path} has no test data.")
        saved, metrics = _evaluated(trainer, source.which, {TEST: trainer.dataset.test_loader})
    run = redact(str(folder.path), secrets=args.secrets)
    data = {"status": "completed", "run": run, "which": source.which, "metrics": {"test": metrics}}
    # an overridden `load_model` may return nothing
    weights = str(source.which) if saved is None else f"epoch {saved.epoch}, step {saved.step}"
    return Outcome(data, lambda console: tables.metrics(console, {weights: metrics}))


def eval_(args: argparse.Namespace) -> Outcome:
    """Evaluate the checkpoints of a run that are not in its record; with --follow, also those that it will save."""
    changes, source = changes_of(args), select_run(args, "latest")
    loaded, folder = commands.stored(source, changes), source.folder
    only = source.which if isinstance(source.which, int) else None
    if only is not None:
        source.check_saved()
    with located_errors(args, loaded):
        trainer = commands.built(loaded, folder)
        sets = _sets(trainer, args.sets)
        overrides = sorted(_without_secrets(change, args.secrets) for change in changes)
        try:
            with evaluation_record(folder.path) as record:
                follower = Follower(trainer, folder, record, sets, overrides, only=only, quiet=args.quiet or args.json)
                problems = follower.follow(args.poll) if args.follow else follower.evaluate_new()
        except EvaluationRecordError as error:
            raise WrongInput(str(error)) from None
    run, status = redact(str(folder.path), secrets=args.secrets), _status(folder)
    found = [vars(one) for one in record.all if one.overrides == overrides and set(one.sets) <= sets.keys()]
    data = {"status": "failed" if problems else "completed", "run": run, "run_status": status, "evaluations": found}
    problem = "" if not problems else f"{run}: {len(problems)} checkpoints cannot be evaluated. {' '.join(problems)}"
    return Outcome(data, lambda console: tables.evaluations(console, found), problem)


class Follower:
    """Evaluates the checkpoints of a run, each once, and records every evaluation before the next.

    Nothing of the run is locked or changed. A checkpoint that its retention deletes while it is read is recorded as
    deleted.

    Args:
        trainer: the trainer of the run.
        folder: the run folder.
        record: what was evaluated before; new evaluations are added.
        sets: the evaluation sets by name.
        overrides: of the stored configuration, which the record has.
        only: the step of the one checkpoint to evaluate; None: all.
        quiet: show nothing.
    """

    def __init__(
        self,
        trainer: Any,
        folder: RunFolder,
        record: EvaluationRecord,
        sets: Mapping[str, Any],
        overrides: list[str],
        *,
        only: int | None = None,
        quiet: bool = False,
    ) -> None:
        self._trainer, self._folder, self._record, self._sets = trainer, folder, record, sets
        self._overrides, self._only, self._quiet = overrides, only, quiet
        self._problems: dict[int, str] = {}  # of damaged checkpoints, by step

    def follow(self, poll: float) -> list[str]:
        """Evaluates new checkpoints until the run has ended; looks for them every `poll` seconds."""
        while True:
            is_running = is_locked(self._folder.path)  # before the last look: a run saves before it ends
            problems = self.evaluate_new()
            if not is_running and not is_locked(self._folder.path):
                return problems
            time.sleep(poll)

    def evaluate_new(self) -> list[str]:
        """Evaluates the checkpoints that exist and are not in the record; returns the problems of damaged ones."""
        while (one := next(self._new(), None)) is not None:  # those that are saved meanwhile, too
            missing = self._record.missing(one.step, self._sets, self._overrides)
            if one.problem:
                self._problems[one.step] = one.problem
            elif (found := self._read(one, missing)) is not None:
                self._record.add(found)
                self._show(found)
        return [*self._problems.values()]

    def _new(self) -> Iterator[CheckpointInfo]:
        for one in checkpoint_infos(self._folder.checkpoints):
            is_chosen = self._only in (None, one.step) and one.step not in self._problems
            if is_chosen and self._record.missing(one.step, self._sets, self._overrides):
                yield one

    def _read(self, one: CheckpointInfo, missing: list[str]) -> Evaluation | None:
        """The evaluation of a checkpoint; None if it is being rewritten, and must be read again, or is damaged."""
        before = _inode(one.path)
        try:
            _, metrics = _evaluated(self._trainer, one.step, {name: self._sets[name] for name in missing})
        except Exception as error:
            if one.step not in {other.step for other in checkpoint_infos(self._folder.checkpoints)}:
                return Evaluation(one.step, one.epoch, missing, self._overrides, {}, deleted=True)
            if _inode(one.path) != before:
                return None
            if isinstance(error, CheckpointError):
                self._problems[one.step] = str(error)
                return None
            raise
        numbers: dict[str, Number] = {name: json_number(value) for name, value in metrics.items()}
        return Evaluation(one.step, one.epoch, missing, self._overrides, numbers)

    def _show(self, one: Evaluation) -> None:
        if self._quiet:
            return
        text = "deleted by the retention of the run before it was read" if one.deleted else tables.values(one.metrics)
        safe_console().print(f"epoch {one.epoch}, step {one.step}: {text}", markup=False, highlight=False)


def _evaluated(trainer: Any, which: Which, sets: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """The checkpoint that was loaded, and its scalar metrics on these sets."""
    saved, metrics = trainer.load_model(which=which), {}
    for name, one in sets.items():
        if name == TEST:
            metrics |= trainer.test_model(one)
        else:
            ((full, loader),) = named_sets("val", {name: one}).items()
            metrics |= trainer.eval_model(loader, full)
    return saved, scalars(metrics)


def _sets(trainer: Any, names: Collection[str] | None) -> dict[str, Any]:
    """The chosen evaluation sets by name; by default those that are evaluated in training."""
    data = trainer.dataset
    known = {"val": data.val_loader, **trainer.eval_sets}
    known = {name: one.data if isinstance(one, EvalSet) else one for name, one in known.items() if one is not None}
    chosen = known if names is None else {name: {TEST: data.test_loader, **known}.get(name) for name in names}
    if unknown := [name for name, one in chosen.items() if one is None]:
        available = [*known, *([TEST] if data.test_loader is not None else [])]
        hint = suggestion(unknown[0], available)
        raise WrongInput(f"--sets: no evaluation set {shown(unknown[0])}. Sets: {', '.join(available)}.{hint}")
    if not chosen:
        raise WrongInput("The run has no validation set. Set `eval_sets`, or use `--sets test`.")
    return chosen


def _without_secrets(change: str, secrets: Collection[str]) -> str:
    key, _, value = change.partition("=")
    return f"{key}={redact({key.rpartition('.')[2]: value}, secrets=secrets)[key.rpartition('.')[2]]}"


def _status(folder: RunFolder) -> str:
    """The status of the run in `run.json`; one without an end that no process trains was killed."""
    if is_locked(folder.path):
        return "running"
    if not (folder.path / RECORD).exists():
        return "unknown"
    try:
        found = read_json(folder.path / RECORD, _MAX_RECORD)
    except ValueError as error:
        raise Failure(str(error)) from None
    starts = found.get("starts")
    status = starts[-1].get("status") if isinstance(starts, list) and starts and isinstance(starts[-1], dict) else None
    return "killed" if status == "running" else str(status or "unknown")


def _inode(path: Path) -> int | None:
    """Identifies the folder of a checkpoint; None if there is none."""
    try:
        return os.lstat(path).st_ino
    except FileNotFoundError:
        return None
