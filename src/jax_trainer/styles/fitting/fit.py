"""`fit`: trains a model on data with a loss, in one call."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import optax

from jax_trainer.callbacks import Callback, full_names, with_needs_of
from jax_trainer.callbacks.monitored import Mode, may_add_metrics
from jax_trainer.core import (
    MeshLike,
    Metrics,
    ProgramOptions,
    checked_int,
    compile_program,
    resolve_layout,
)
from jax_trainer.datasets import Data, DataError, DataSource, transforms_of
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.engine import Every, Plan, checked_evals
from jax_trainer.engine.batches import train_source
from jax_trainer.runs import CallbacksLike, before_first_step, broadcast_from_primary, named_callbacks
from jax_trainer.styles.fitting.data import SplitBatch, as_fit_data, split_of
from jax_trainer.styles.fitting.fit_run import (
    Resume,
    RunOutputs,
    check_save,
    find_saver,
    resolve_target,
    run_fit,
    with_saver,
)
from jax_trainer.styles.fitting.metadata import name_of, plain_hparams
from jax_trainer.styles.fitting.program import FitOptions, checked_model, fit_target, with_data_transforms
from jax_trainer.styles.fitting.result import FitResult
from jax_trainer.suggestions import checks_keywords, suggestion

VAL = "val"  # name of the evaluation set; names with "test" are for the test after training
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
    options: ProgramOptions | None = None,
) -> FitResult:
    """Trains `model` on `train_ds`, evaluates it on `test_ds`, and records the run in a new folder.

    Args:
        model: a state (of `TrainState.create`, or of flax.training), which is not modified; a linen module; an nnx
            module, which is updated with the trained weights; a `FunctionModel` or a callable pytree, such as an
            Equinox module; a model configuration; or a `Program`, which has its own loss.
        train_ds: a loader, a list of batches, an iterable or a function that returns one, an iterator; or the complete
            dataset as arrays, `(x, y)`, a dict, or one array, reshuffled every epoch. Batches are pairs `(x, y)`, dicts
            or dataclasses; see `split_batch`.
        test_ds: the evaluation data, in the same forms; arrays are not shuffled. None: no evaluation.
        loss_fn: `loss_fn(logits, labels)`, or one that calls the model: `loss_fn(params, batch)` for linen,
            `loss_fn(model, batch)` for all others. The second form is recognised by its parameter names: a first
            parameter `model` or `params`, or a second one `batch`. Returns the loss, or the loss and a dict of
            metrics. It may also have parameters `train`, `rng` and `step`.
        eval_step: `eval_step(state, batch)`, or `eval_step(model, batch)` for nnx: returns a number, logged as
            "accuracy", or a dict of numbers, each a mean over the batch.
        eval_freq: epochs between two evaluations; the final state is always evaluated.
        num_epochs: number of epochs.
        log_name: name of the run: a folder in `log_dir`.
        hparams: hyperparameters (plain data) for TensorBoard and `config.yaml`.
        optimizer: for modules: an optax optimizer, or an optimizer's configuration.
        batch_size: batch size of arrays, and of data that yields single examples and has a method `batch`.
        metric: selects the best checkpoint; default: "val/accuracy" if it is reported, otherwise "val/loss"; without
            `test_ds`, "train/loss".
        mode: "min" or "max"; "auto" infers it from the metric's name (loss, error, …: min; accuracy, f1, …: max), and
            refuses a name that it does not know.
        callbacks: callbacks or callback configurations, as a list or by name.
        resume: True: resume the newest run of this name with the same configuration; "auto": resume it, or start a new
            one; a path: resume the run in that folder, or from that checkpoint.
        save: True: write a checkpoint after every evaluation (after every epoch, without `test_ds`) and at the end, in
            the background; keeps the latest two and the best. `Every(epochs=10)`, `Every(minutes=5)`: save that often.
            False: write none, and keep the best weights in memory; such a run cannot be resumed.
        seed: for the weights of a linen module, all randomness in training, and the shuffling of arrays. A state of
            `TrainState.create` has its own key (`rng=`).
        split_batch: `batch -> (inputs, targets)`, for batches with other names; a tuple of inputs is passed as several
            arguments.
        log_dir: the parent folder of all runs.
        tensorboard: write event files for TensorBoard.
        progress: show a progress bar.
        steps_per_epoch: maximum number of batches per epoch; defines an epoch for an endless generator.
        steps_per_call: optimizer steps per dispatch; "epoch": one dispatch per epoch. Speeds up small models.
        resident: keep arrays on the device if they fit.
        detect_nans: skip the update of a step with a non-finite loss or gradient, and keep its batch; costs a little
            time. A non-finite loss ends the run in any case, as soon as it is read.
        mesh: a device mesh, its axis sizes (`{"data": -1}`, `{"fsdp": 8}`), or a `Layout`; None: one device.
        options: precision, gradient accumulation, clipping, EMA, statistics, and what a non-finite step does; see
            `ProgramOptions`.
    """
    eval_freq, num_epochs = checked_int("eval_freq", eval_freq, 1), checked_int("num_epochs", num_epochs, 1)
    batch_size, seed = checked_int("batch_size", batch_size, 1), checked_int("seed", seed, 0)
    check_save(save, resume)
    if eval_step is not None and test_ds is None:
        raise ValueError(
            "`eval_step` needs `test_ds`, which is None. Pass the data to evaluate on, or leave out `eval_step`."
        )
    _check_arguments(model, test_ds, log_name, log_dir)
    policies = ("raise", "stop", "skip", *(("rollback",) if save is not False else ()))
    options = ProgramOptions.of(options, detect_nans=detect_nans, mesh=mesh, policies=policies)
    plain, named, layout = plain_hparams(hparams), named_callbacks(callbacks), resolve_layout(options.mesh)
    plan = Plan(
        max_epochs=num_epochs,
        steps_per_epoch=steps_per_epoch,
        eval_every=Every(epochs=eval_freq),
        eval_at_end=True,
        steps_per_call=steps_per_call,
    )
    if not is_arrays(train_ds):
        train_source(Data(train_ds), plan)  # refuses data that is too short before any of it is read
    split = split_of(split_batch)
    with before_first_step():
        train = as_fit_data(train_ds, "train", split, batch_size=batch_size, shuffle=True, seed=seed)
        evals = {} if test_ds is None else {VAL: _for_evaluation(test_ds, split, batch_size, plan)}
        total = _total_steps(train.data, plan)
        parts = FitOptions(loss_fn, eval_step, optimizer, split_batch, total, seed, train.example, options)
        target = with_data_transforms(fit_target(model, parts), transforms_of(train_ds), {VAL: test_ds})
        needed = with_needs_of(named.values(), target.program, log_rate=options.log_learning_rate)
        # the last batch of arrays may be smaller, which needs no warning
        report: Literal["ignore", "warn"] = "ignore" if train.from_arrays else "warn"
        program = compile_program(options.wrap(needed), layout=layout, on_recompile=report)
        # traced: mistakes in the steps or the data show before anything is written
        state, training, evaluating = program.shapes(target.key, train.example)
        evals = checked_evals(program, state, evals, train.example)
    found = _metric(evaluating if evals else training, metric, named, validates=bool(evals))
    saving = with_saver(named, found, mode, save, metric_is_set=metric is not None)
    saver = find_saver(saving)
    metadata = {
        "style": "fit",
        "model": target.name,
        "loss_fn": name_of(loss_fn),
        "eval_step": name_of(eval_step),
        "num_epochs": num_epochs,
        "eval_freq": eval_freq,
        "steps_per_epoch": plan.steps_per_epoch,
        "batch_size": batch_size,
        "seed": seed,
        "metric": saver.monitor,
        "mode": saver.best_mode,
        "options": options.described() or None,
        "hparams": plain,
    }
    return run_fit(
        target,
        program,
        # a function, so that the initial state is not kept in memory
        partial(program.init, target.key, train.example),
        Data(train.data, evals, resident=resident),
        plan,
        batch_size,
        RunOutputs(metadata, saving, tensorboard, progress, options, writes_checkpoints=save is not False),
        broadcast_from_primary(lambda: resolve_target(log_dir, log_name, metadata, resume)),
    )


def _check_arguments(model: Any, test_ds: Any, log_name: Any, log_dir: Any) -> None:
    """Refuses swapped arguments before any data is read."""
    checked_model(model)
    if isinstance(test_ds, optax.GradientTransformation):
        raise TypeError("`test_ds` is an optimizer. Pass it by keyword: `optimizer=optax.adam(1e-3)`.")
    if not isinstance(log_name, str) or not log_name.strip("/. "):
        raise ValueError(f"`log_name` must be a string, the name of a folder in `log_dir`, got {log_name!r}.")
    if not isinstance(log_dir, str | Path):
        raise TypeError(f"`log_dir` must be the path of a folder, got {log_dir!r}.")


def _for_evaluation(test_ds: Any, split: SplitBatch, batch_size: int, plan: Plan) -> Any:
    if is_arrays(test_ds) or callable(getattr(test_ds, "batch", None)):
        return as_fit_data(test_ds, VAL, split, batch_size=batch_size, shuffle=False, seed=0).data
    data_source = DataSource(test_ds, VAL, may_be_empty=True)  # refuses what cannot be iterated
    if data_source.is_one_shot and (plan.max_epochs or 0) > plan.eval_every.epochs:
        raise DataError(
            f"`test_ds` is an iterator that can be used only once ({type(test_ds).__name__}), but the run evaluates "
            "several times. Pass a list, a loader, or a function that returns a new iterator."
        )
    return test_ds


def _check_monitored(callbacks: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuses a callback that monitors an unknown metric, unless a callback may add metrics."""
    if any(map(may_add_metrics, callbacks.values())):
        return
    for name, one in callbacks.items():
        config = one.config if isinstance(one, Callback) else one
        monitor = getattr(config, "monitor", None)
        if monitor not in (None, *names) and not getattr(config, "check_on_train_epoch_end", False):
            raise ValueError(
                f"`{name}` monitors {monitor!r}, which is not reported. Reported metrics: {', '.join(sorted(names))}."
                f"{suggestion(monitor, names)}"
            )


def _total_steps(data: Any, plan: Plan) -> int | None:
    per_epoch = plan.epoch_steps(0, 0, DataSource(data, "train").length)
    return None if per_epoch is None or plan.max_epochs is None else per_epoch * plan.max_epochs


def _metric(reported: Metrics, metric: str | None, callbacks: Mapping[str, Any], *, validates: bool) -> str:
    """The metric that selects the best checkpoint, from evaluation if there is one, otherwise from training."""
    where = VAL if validates else "train"
    names = full_names(reported.by_name, where)
    if validates:
        _check_monitored(callbacks, names)
    if metric is None:
        return f"{VAL}/accuracy" if f"{VAL}/accuracy" in names else f"{where}/loss"
    full = metric if metric in names else f"{where}/{metric}"
    if full not in names:
        more = "" if validates else " Without `test_ds`, only training metrics are reported."
        raise ValueError(
            f"`metric` is {metric!r}, which is not reported. Reported metrics: {', '.join(sorted(names))}.{more}"
        )
    return full
