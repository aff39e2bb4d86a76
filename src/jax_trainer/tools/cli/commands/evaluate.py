"""`jax-trainer test` and `eval`: evaluate checkpoints of a run, those that exist or those that a training saves."""

import os
import shlex
import time
from collections.abc import Collection, Mapping
from typing import Any

from jax_trainer.checkpoint.folder import RunFolder, is_locked
from jax_trainer.config import redact
from jax_trainer.diagnostics.files import shown
from jax_trainer.diagnostics.output import safe_console
from jax_trainer.diagnostics.suggestions import suggestion
from jax_trainer.tools.cli.command import OfProcesses, OfRun, checkpoint, flag, option
from jax_trainer.tools.cli.outcomes import Outcome, WrongInput, line, reporting, show_metrics, table
from jax_trainer.tools.reports.listing import find_runs

TEST = "test"
_POLL = 1.0  # seconds between two looks for new checkpoints


class Test(OfRun, OfProcesses):
    """Evaluate a checkpoint of a run on the test set of its dataset; by default the best checkpoint.

    The stored configuration of the run is used; overrides (KEY=VALUE) change it for this evaluation only.

    Args:
        which: checkpoint to load: best, latest, or a step number (default: best)

    Examples:
        jax-trainer test runs/CNN/20261115-142311
        jax-trainer test runs/CNN/20261115-142311 --which latest dataset.global_batch_size=256
    """

    summary = "evaluate a checkpoint of a run on the test set"
    starts_devices = True

    which: int | str | None = option(type=checkpoint)

    def run(self) -> Outcome:
        from jax_trainer.checkpoint.store import CheckpointStore
        from jax_trainer.tools.cli.running import stored_trainer

        with stored_trainer(self, "best") as (trainer, source):
            folder = source.folder
            if not CheckpointStore(folder.checkpoints).infos():
                restart = shlex.join(["jax-trainer", "resume", str(folder.path)])
                raise WrongInput(f"{folder.path} has no checkpoint. Train it from the start with `{restart}`.")
            if trainer.dataset.test_loader is None:
                raise WrongInput(f"The dataset of {folder.path} has no test data.")
            saved, metrics = _evaluated(trainer, source.which, {TEST: trainer.dataset.test_loader})
        run = self.redacted(str(folder.path))
        data = {"status": "completed", "run": run, "which": source.which, "metrics": {"test": metrics}}
        # an overridden `load_model` may return nothing
        weights = str(source.which) if saved is None else f"epoch {saved.epoch}, step {saved.step}"
        return Outcome(data, lambda console: show_metrics(console, {weights: metrics}))


class Eval(OfRun):
    """Evaluate the checkpoints of a run on its validation set and its `eval_sets`, each once: the results are in the
    file evaluations.jsonl of the run folder, and what is in there is not evaluated again.

    With --follow, evaluate those that a running training saves, until it has ended. The training neither sees nor waits
    for it; a checkpoint that its retention deletes before it is read is recorded as deleted. Overrides (KEY=VALUE)
    change the stored configuration for this evaluation only. `jax-trainer test` evaluates one checkpoint, and writes
    nothing.

    Args:
        sets: evaluation sets: val, test, and those of eval_sets (default: all but test)
        follow: also evaluate what the run saves, until it has ended

    Examples:
        jax-trainer eval runs/CNN/20261115-142311 --follow
        jax-trainer eval runs/CNN/20261115-142311 --sets val,test dataset.global_batch_size=256
    """

    summary = "evaluate the checkpoints of a run, also while it is training"
    starts_devices = True

    sets: list[str] | None = option("A,B,…", lambda text: text.split(","))
    follow: bool = flag()

    def run(self) -> Outcome:
        from jax_trainer.runs.history import EvaluationRecordError, evaluation_record
        from jax_trainer.tools.cli.running import stored_trainer

        with stored_trainer(self, "latest") as (trainer, source):
            folder, sets = source.folder, _sets(trainer, self.sets)
            only = source.which if isinstance(source.which, int) else None
            values = dict(change.split("=", 1) for change in self.changes)
            overrides = sorted(f"{key}={redact(value, key, self.secrets)}" for key, value in values.items())
            problems: dict[int, str] = {}  # of damaged checkpoints, by step
            with reporting(wrong=EvaluationRecordError), evaluation_record(folder.path) as record:
                while True:
                    is_running = is_locked(folder.path)  # before the last look: a run saves before it ends
                    is_quiet = self.quiet or self.json
                    _evaluate_new(trainer, folder, record, sets, overrides, only, problems, is_quiet=is_quiet)
                    if not self.follow or not (is_running or is_locked(folder.path)):
                        break
                    time.sleep(_POLL)
        run, status = self.redacted(str(folder.path)), next((one.status for one in find_runs(folder.path)), "unknown")
        found = [one for one in record.all if one.overrides == overrides and set(one.sets) <= sets.keys()]
        data = {"status": "failed" if problems else "completed", "run": run, "run_status": status}
        data["evaluations"] = [vars(one) for one in found]
        damaged = " ".join(problems.values())
        problem = f"{run}: {len(problems)} checkpoints cannot be evaluated. {damaged}" if problems else ""
        made = table("epoch", "step", "metrics", rows=[(str(one.epoch), str(one.step), _text(one)) for one in found])
        return Outcome(data, lambda console: console.print(made), problem)


def _evaluate_new(
    trainer: Any,
    folder: RunFolder,
    record: Any,
    sets: Mapping[str, Any],
    overrides: list[str],
    only: int | None,
    problems: dict[int, str],
    *,
    is_quiet: bool,
) -> None:
    """Evaluates the checkpoints that exist and are not in the record, which has each before the next is evaluated.

    Nothing of the run is locked or changed. A checkpoint that its retention deletes while it is read is recorded as
    deleted; damaged ones are added to `problems`. `only` is the step of the one checkpoint to evaluate; None: all.
    """
    from jax_trainer.checkpoint.record import checkpoint_infos
    from jax_trainer.checkpoint.store import CheckpointError
    from jax_trainer.runs.history import Evaluation, json_number

    missing = lambda one: record.missing(one.step, sets, overrides)
    inode = lambda one: os.lstat(one.path).st_ino if os.path.lexists(one.path) else None
    wanted = lambda one: only in (None, one.step) and one.step not in problems and missing(one)
    # those that are saved meanwhile, too
    while one := next(filter(wanted, checkpoint_infos(folder.checkpoints)), None):
        if one.problem:
            problems[one.step] = one.problem
            continue
        before, names, metrics, deleted = inode(one), missing(one), dict[str, Any](), False
        try:
            _, found = _evaluated(trainer, one.step, {name: sets[name] for name in names})
            metrics |= {name: json_number(value) for name, value in found.items()}
        except Exception as error:
            deleted = one.step not in {other.step for other in checkpoint_infos(folder.checkpoints)}
            if not deleted:
                if inode(one) != before:  # it is being rewritten, and is read again
                    continue
                if not isinstance(error, CheckpointError):
                    raise
                problems[one.step] = str(error)
                continue
        record.add(Evaluation(one.step, one.epoch, names, overrides, metrics, deleted))
        if not is_quiet:
            line(safe_console(), f"epoch {one.epoch}, step {one.step}: {_text(record.all[-1])}")


def _text(one: Any) -> str:
    """The metrics of an `Evaluation` in one line."""
    if one.deleted:
        return "deleted by the retention of the run before it was read"
    return ", ".join(f"{name} {float(value):.6g}" for name, value in one.metrics.items())


def _evaluated(trainer: Any, which: int | str, sets: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
    """The checkpoint that was loaded, and its scalar metrics on these sets."""
    from jax_trainer.tools.cli.running import scalars
    from jax_trainer.trainer.training import named_sets

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
    known = {"val": data.val_loader, **{name: one.data for name, one in trainer.eval_sets.items()}}
    known = {name: one for name, one in known.items() if one is not None}
    available = known if data.test_loader is None else {TEST: data.test_loader, **known}
    if unknown := [name for name in names or () if name not in available]:
        hint = suggestion(unknown[0], available)
        raise WrongInput(f"--sets: no evaluation set {shown(unknown[0])}. Sets: {', '.join(available)}.{hint}")
    chosen = known if names is None else {name: available[name] for name in names}
    if not chosen:
        raise WrongInput("The run has no validation set. Set `eval_sets`, or use `--sets test`.")
    return chosen
