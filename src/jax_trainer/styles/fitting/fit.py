"""`fit`: a model, data and a loss; everything else of a training is there."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optax

from jax_trainer.callbacks import Callback, full_names
from jax_trainer.callbacks.monitored import Mode, may_add_metrics
from jax_trainer.core import (
    CompiledProgram,
    Layout,
    MeshLike,
    Metrics,
    checked_int,
    compile_program,
    resolve_layout,
    with_finite_check,
    with_finite_guard,
)
from jax_trainer.datasets import Data, DataError, DataSource, transforms_of
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.engine import Every, Plan, checked_evals
from jax_trainer.engine.batches import train_source
from jax_trainer.optimizer.reported import with_learning_rate
from jax_trainer.runs import broadcast_from_primary, named_callbacks
from jax_trainer.runs.callback_list import CallbacksLike
from jax_trainer.styles.fitting.data import SplitBatch, as_fit_data, split_of
from jax_trainer.styles.fitting.fit_run import (
    Resume,
    RunOutputs,
    RunSpec,
    check_save,
    find_saver,
    resolve_target,
    run_fit,
    with_saver,
)
from jax_trainer.styles.fitting.metadata import name_of, plain_hparams
from jax_trainer.styles.fitting.program import FitOptions, FitTarget, fit_target, maker_of, seen_through
from jax_trainer.styles.fitting.result import FitResult
from jax_trainer.suggestions import checks_keywords, suggestion

VAL = "val"  # what the evaluation set is called; names with "test" are for the end of a run
Steps = int | Literal["epoch"]


@checks_keywords
def fit(
    model: Any,
    train_ds: Any,
    test_ds: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    eval_step: Callable[..., Any] | None = None,
    eval_freq: int = 1,
    num_epochs: int = 10,
    log_name: str = "fit",
    hparams: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    batch_size: int = 32,
    metric: str | None = None,
    mode: Mode = "auto",
    callbacks: CallbacksLike = (),
    resume: Resume = False,
    save: bool | Every = True,
    seed: int = 0,
    split_batch: SplitBatch | None = None,
    log_dir: str | Path = "runs",
    tensorboard: bool = True,
    progress: bool = True,
    steps_per_epoch: int | None = None,
    steps_per_call: Steps = 1,
    resident: bool | Literal["auto"] = False,
    detect_nans: bool = False,
    mesh: MeshLike | None = None,
) -> FitResult:
    """Trains `model` on `train_ds`, judges it on `test_ds`, and keeps a record of it in a folder of its own.

    Args:
        model: a state (of `TrainState.create`, or of flax.training), which stays as it is; a linen module; an nnx
            module, which has the trained weights afterwards; or a `Program`, which has its own loss.
        train_ds: a loader, a list of batches, an iterable or a function that returns one, an iterator; or all examples
            as arrays, `(x, y)`, a dict, or one array, which are shuffled anew in every epoch. Batches are pairs
            `(x, y)`, dicts or dataclasses; see `split_batch`.
        test_ds: the same for evaluating; arrays keep their order. None: nothing is judged.
        loss_fn: `loss_fn(logits, labels)`, or one that calls the model itself: `loss_fn(params, batch)` for linen,
            `loss_fn(model, batch)` for nnx. Told apart by names: a first parameter called `model` or `params`, or a
            second one called `batch`, is of the second kind. Returns the loss, or the loss and a dict of what else to
            report. It may ask for `train`, `rng` and `step` by name.
        eval_step: `eval_step(state, batch)`, or `eval_step(model, batch)` for nnx: a number, called "accuracy", or a
            dict of numbers, each a mean over the batch.
        eval_freq: epochs between two evaluations; the last state is always judged.
        num_epochs: how long to train.
        log_name: what the run is called, a folder in `log_dir`.
        hparams: what TensorBoard shows as hyperparameters, and `config.yaml` keeps: plain data.
        optimizer: for modules: an optax optimizer, or an optimizer's configuration.
        batch_size: of arrays, and of data that gives single examples and can batch them.
        metric: by which the best checkpoint is chosen: left out, "val/accuracy" if there is one, or "val/loss"; without
            `test_ds`, "train/loss".
        mode: whether a small value of it is good or a large one; "auto": as its name says (loss, error, …: small;
            accuracy, f1, …: large). A name that does not say needs "min" or "max".
        callbacks: who else watches: callbacks, or configurations of them, in a list or by name.
        resume: True: go on with the newest run of this name that was told the same; "auto": that, or a new one; a path:
            with the run in that folder, or from that checkpoint of it.
        save: True: write a checkpoint after every evaluation (after every epoch, without `test_ds`) and at the end, in
            the background; the latest two and the best stay. `Every(epochs=10)`, `Every(minutes=5)`: that often. False:
            write none, and keep the best weights in memory; such a run cannot be resumed.
        seed: of the weights of a linen module, of what is random in training, and of the order of arrays. A state of
            `TrainState.create` has a key of its own (`rng=`).
        split_batch: `batch -> (inputs, targets)`, for batches that have other names; a tuple of inputs is several
            arguments.
        log_dir: the folder of all runs.
        tensorboard: write event files for TensorBoard.
        progress: show a progress bar.
        steps_per_epoch: an epoch is at most this many batches; makes epochs of a generator that goes on.
        steps_per_call: optimizer steps in one dispatch; "epoch": all of one. Small models train faster.
        resident: keep arrays on the device, where they fit.
        detect_nans: a step whose loss or gradient is not finite changes nothing, and its batch is kept; costs a little
            time. A loss that is not finite ends the run in any case, as soon as it is known.
        mesh: devices that share the work: a mesh, its sizes (`{"data": -1}`, `{"fsdp": 8}`), or a `Layout`; None: one.
    """
    eval_freq, num_epochs = checked_int("eval_freq", eval_freq, 1), checked_int("num_epochs", num_epochs, 1)
    batch_size, seed = checked_int("batch_size", batch_size, 1), checked_int("seed", seed, 0)
    check_save(save, resume)
    if eval_step is not None and test_ds is None:
        raise ValueError(
            "`eval_step` evaluates `test_ds`, and there is none. Pass the data to evaluate on, or leave it out."
        )
    _check_given(model, test_ds, log_name, log_dir)
    told_hparams, named, layout = plain_hparams(hparams), named_callbacks(callbacks), resolve_layout(mesh)
    plan = Plan(
        max_epochs=num_epochs,
        steps_per_epoch=steps_per_epoch,
        eval_every=Every(epochs=eval_freq),
        eval_at_end=True,
        steps_per_call=steps_per_call,
    )
    if not is_arrays(train_ds):
        train_source(Data(train_ds), plan)  # refuses data that would run dry, before any of it is drawn
    split = split_of(split_batch)
    train = as_fit_data(train_ds, "train", split, batch_size=batch_size, shuffle=True, seed=seed)
    evals = {} if test_ds is None else {VAL: _for_evaluation(test_ds, split, batch_size, plan)}
    total = _total_steps(train.data, plan)
    trained = fit_target(model, FitOptions(loss_fn, eval_step, optimizer, split_batch, total, seed, train.example))
    trained = seen_through(trained, transforms_of(train_ds), {VAL: test_ds})
    program = _compiled(trained, layout, is_cut=train.is_cut, guarded=detect_nans)
    # traced: what is wrong with the steps or the data shows before anything is written
    state, training, evaluating = program.shapes(trained.key, train.example)
    evals = checked_evals(program, state, evals, train.example)
    found = _metric(evaluating if evals else training, metric, named, validates=bool(evals))
    saving = with_saver(named, found, mode, save, is_wish=metric is not None)
    saver = find_saver(saving)
    told = {
        "style": "fit",
        "model": trained.name,
        "loss_fn": name_of(loss_fn),
        "eval_step": name_of(eval_step),
        "num_epochs": num_epochs,
        "eval_freq": eval_freq,
        "steps_per_epoch": plan.steps_per_epoch,
        "batch_size": batch_size,
        "seed": seed,
        "metric": saver.monitor,
        "mode": saver.best_mode,
        "hparams": told_hparams,
    }
    begin = partial(program.init, trained.key, train.example)
    work = RunSpec(trained, program, begin, Data(train.data, evals, resident=resident), plan, batch_size)
    recording = RunOutputs(told, saving, tensorboard, progress, writes_checkpoints=save is not False)
    return run_fit(work, recording, broadcast_from_primary(lambda: resolve_target(log_dir, log_name, told, resume)))


def _check_given(model: Any, test_ds: Any, log_name: Any, log_dir: Any) -> None:
    """Refuses arguments that are in each other's place, before any data is drawn."""
    maker_of(model)
    if isinstance(test_ds, optax.GradientTransformation):
        raise TypeError("`test_ds` is an optimizer. Pass it by name: `optimizer=optax.adam(1e-3)`.")
    if not isinstance(log_name, str) or not log_name.strip("/. "):
        raise ValueError(f"`log_name` must be text, the name of a folder in `log_dir`, got {log_name!r}.")
    if not isinstance(log_dir, str | Path):
        raise TypeError(f"`log_dir` must be the path of a folder, got {log_dir!r}.")


def _for_evaluation(test_ds: Any, split: SplitBatch, batch_size: int, plan: Plan) -> Any:
    if is_arrays(test_ds) or callable(getattr(test_ds, "batch", None)):
        return as_fit_data(test_ds, VAL, split, batch_size=batch_size, shuffle=False, seed=0).data
    data_source = DataSource(test_ds, VAL, may_be_empty=True)  # refuses what cannot be iterated
    if data_source.is_one_shot and (plan.max_epochs or 0) > plan.eval_every.epochs:
        raise DataError(
            f"`test_ds` is an iterator that can be used only once ({type(test_ds).__name__}), and there is more than "
            "one evaluation. Pass a list, a loader, or a function that returns a fresh iterator."
        )
    return test_ds


def _check_monitored(callbacks: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses a callback that monitors what evaluations do not report; a callback's hook may add to that."""
    if any(map(may_add_metrics, callbacks.values())):
        return
    for name, one in callbacks.items():
        config = one.config if isinstance(one, Callback) else one
        monitor = getattr(config, "monitor", None)
        if monitor not in (None, *names) and not getattr(config, "check_on_train_epoch_end", False):
            raise ValueError(
                f"`{name}` monitors {monitor!r}, and there are only {', '.join(sorted(names))}."
                f"{suggestion(monitor, names)}"
            )


def _total_steps(data: Any, plan: Plan) -> int | None:
    per_epoch = plan.epoch_steps(0, 0, DataSource(data, "train").length)
    return None if per_epoch is None or plan.max_epochs is None else per_epoch * plan.max_epochs


def _compiled(trained: FitTarget, layout: Layout | None, *, is_cut: bool, guarded: bool) -> CompiledProgram:
    program = with_learning_rate(trained.program)
    if not program.keeps_batches:  # a program that was given may have a guard of its own
        program = with_finite_guard(program, max_consecutive=0) if guarded else with_finite_check(program)
    # the last batch of arrays may be smaller, which nobody need be told of
    return compile_program(program, layout=layout, on_recompile="ignore" if is_cut else "warn")


def _metric(reported: Metrics, metric: str | None, callbacks: Mapping[str, Any], *, validates: bool) -> str:
    """The metric that decides, among those that evaluations report, or training where there are none."""
    where = VAL if validates else "train"
    names = full_names(reported.by_name, where)
    if validates:
        _check_monitored(callbacks, names)
    if metric is None:
        return f"{VAL}/accuracy" if f"{VAL}/accuracy" in names else f"{where}/loss"
    full = metric if metric in names else f"{where}/{metric}"
    if full not in names:
        more = "" if validates else " Without `test_ds` there are only those of training."
        raise ValueError(
            f"No metric {metric!r} to choose the best state by. There are {', '.join(sorted(names))}.{more}"
        )
    return full
