"""`fit`: trains a model on data with a loss, in one call; what it checks, and what the run records."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import optax
import yaml

from jax_trainer.callbacks import ModelCheckpoint, ModelCheckpointConfig, full_names
from jax_trainer.callbacks.monitored import check_names
from jax_trainer.checkpoint.folder import CONFIG
from jax_trainer.checkpoint.ranking import Mode
from jax_trainer.config.dumping import as_data
from jax_trainer.config.redaction import redact
from jax_trainer.core import CompiledProgram
from jax_trainer.core.metrics import BatchSize
from jax_trainer.datasets import ArrayLoader, Data, DataSource
from jax_trainer.datasets.arrays import batch_sizes
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.diagnostics.ledger import DATA, begin, phase
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.engine import Every, Plan, checked_evals, preflight
from jax_trainer.engine.batches import train_source
from jax_trainer.logger import Logger, LoggerConfig, TensorboardConfig
from jax_trainer.logger.values import flat
from jax_trainer.metrics import MetricInterface
from jax_trainer.optimizer.description import described_optimizer
from jax_trainer.runs.assembling import assemble
from jax_trainer.runs.best import Ranking
from jax_trainer.runs.callback_list import CallbacksLike, attached, named_callbacks
from jax_trainer.runs.finding import Resume, find_target
from jax_trainer.runs.fingerprint import Fingerprint
from jax_trainer.runs.options import Options
from jax_trainer.runs.run import Run, before_first_step
from jax_trainer.runs.sections import layout_for
from jax_trainer.runs.spec import Recording, RunSpec, mirror_of
from jax_trainer.runs.vocabulary import WORDS, TrainOptions, options_of, takes_options
from jax_trainer.styles.fit_data import FitData, SplitBatch, as_eval_data, as_fit_data, split_of, with_sample_weight
from jax_trainer.styles.fit_program import ClassWeight, FitTarget, checked_model, data_transforms, fit_target
from jax_trainer.styles.fit_result import FitResult

VAL = "val"  # name of the evaluation set; names with "test" are for the test after training


@takes_options
def fit(
    model: Any,
    train_ds: Any,
    test_ds: Any = None,
    *,
    loss_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
    eval_step: Callable[..., Any] | None = None,
    eval_freq: int = 1,
    num_epochs: int = 10,
    log_name: str = "fit",
    hparams: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    batch_size: int | Mapping[int, int] = 32,
    metrics: Mapping[str, Any] | None = None,
    metric: str | None = None,
    mode: Mode = "auto",
    callbacks: CallbacksLike = (),
    resume: Resume = False,
    allow_changes: Collection[str] = (),
    save: bool | Every = True,
    split_batch: SplitBatch | None = None,
    class_weight: ClassWeight | None = None,
    sample_weight: Any = None,
    batch_size_of: BatchSize | None = None,
    predict_fn: Callable[[Any, Any], Any] | None = None,
    tensorboard: bool = True,
    progress: bool = True,
    steps_per_epoch: int | None = None,
    dry_run: bool = False,
    **options: Unpack[TrainOptions],
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
            metrics. It may also have parameters `train`, `rng` and `step`. The loss may be several, by name; with
            several optimizers, `loss_fn` returns the loss of each by name, or is a dict of one function per optimizer.
        eval_step: `eval_step(state, batch)`, or `eval_step(model, batch)` for nnx: returns a number, logged as
            "accuracy", or a dict of numbers, each a mean over the batch.
        eval_freq: epochs between two evaluations; the final state is always evaluated.
        num_epochs: number of epochs.
        log_name: name of the run: a folder in `log_dir`.
        hparams: hyperparameters (plain data) for TensorBoard and `config.yaml`.
        optimizer: for modules: an optax optimizer, or an optimizer's configuration; or several by name, each also an
            `AlternatingOptimizer`.
        batch_size: batch size of arrays, and of data that yields single examples and has a method `batch`; for arrays
            to train on, also several, by the number of complete epochs after which each is used: `{0: 64, 5: 128}`.
        metrics: metrics by name, `{"f1": F1(average="macro")}`, for `loss_fn(logits, labels)`: each is called with the
            model's outputs, the targets and the mask of the batch. A function of outputs and targets gets no mask.
        metric: selects the best checkpoint; default: "val/accuracy" if it is reported, otherwise "val/loss"; without
            `test_ds`, "train/loss".
        mode: "min" or "max"; "auto" infers it from the metric's name (loss, error, …: min; accuracy, f1, …: max), and
            refuses a name that it does not know.
        callbacks: callbacks or callback configurations, as a list or by name.
        resume: "auto": continue the newest run of this name that computes the same, also to another length, or start a
            new one; True: continue it, or raise; a path: continue the run in that folder, or from that checkpoint.
        allow_changes: parts in which the run to resume may differ from this call: "program" (model, loss, options),
            "optimizer", "callbacks", "start" (seed, initial weights), "data". Anything else that differs is an error
            (`resume="auto"`: a new run).
        save: True: write a checkpoint after every evaluation (after every epoch, without `test_ds`) and at the end, in
            the background; keeps the latest two and the best. `Every(epochs=10)`, `Every(minutes=5)`: save that often.
            False: write none, and keep the best weights in memory; such a run cannot be resumed.
        split_batch: `batch -> (inputs, targets)`, for batches with other names; a tuple of inputs is passed as several
            arguments.
        class_weight: weights of the training loss by class, `{0: 1.0, 1: 5.0}` (other classes: 1) or one per class,
            for a `loss_fn(logits, labels)` that returns one loss per example. Labels are class indices or one-hot. As
            in Keras, the loss is the sum of the weighted losses divided by the number of examples; metrics, and
            evaluations, are not weighted.
        sample_weight: weights of the examples of `train_ds`, which must be arrays, in the same way: an array [n]. With
            `class_weight`, both are multiplied. The examples of `test_ds` are weighted by the `mask` of its batches.
        batch_size_of: `batch -> number of examples`, by which its metrics are weighted in the means of an epoch and an
            evaluation; default: its entry `size`, or the common length of its arrays.
        predict_fn: `predict_fn(state, inputs)`, or `predict_fn(model, inputs)` for nnx: the outputs that
            `result.predict` returns; default: the model, called with the inputs.
        tensorboard: write event files for TensorBoard.
        progress: show a progress bar.
        steps_per_epoch: maximum number of batches per epoch; defines an epoch for an endless generator.
        dry_run: compile the step, and return a `Preflight` instead: memory, FLOPs and its time. Nothing is
            trained or written.
        options: all other options of a training, such as `precision="bf16"`, `clip_norm=1.0`, `accumulate=4`, `ema`,
            `mesh={"data": -1}`, `steps_per_call`, `detect_nans`, `log_dir`, `mirror`: see `Options`. `seed` (here 0) is
            for the weights of a linen module, all randomness in training, and the shuffling of arrays; a state of
            `TrainState.create` has its own key (`rng=`).
    """
    eval_freq, num_epochs = checked_int("eval_freq", eval_freq, 1), checked_int("num_epochs", num_epochs, 1)
    several = batch_sizes(batch_size).get("sizes")
    size = checked_int("batch_size", batch_size, 1) if several is None else several[0]
    words = {"num_epochs": num_epochs, "eval_freq": eval_freq, "steps_per_epoch": steps_per_epoch}
    opts = options_of("fit", options, **words, progress=progress)
    _check_arguments(model, test_ds, eval_step, log_name, save, resume, opts)
    logger = opts.logger_config(LoggerConfig(tool_config=TensorboardConfig() if tensorboard else None))
    logger.check_mirror()
    if sample_weight is not None:
        train_ds = with_sample_weight(train_ds, sample_weight)
    begin()
    plain, named, layout = plain_hparams(hparams), named_callbacks(callbacks), layout_for(opts)
    plan = opts.plan(eval_at_end=True)
    if not is_arrays(train_ds):
        train_source(Data(train_ds), plan)  # refuses data that is too short before any of it is read
    with before_first_step():
        with phase(DATA):
            train, evals = _data(train_ds, test_ds, split_of(split_batch), plan, several or size, opts.seed)
        passed = {
            "loss_fn": loss_fn,
            "eval_step": eval_step,
            "optimizer": optimizer,
            "metrics": metrics,
            "seed": opts.seed,
        }
        passed |= {"class_weight": class_weight, "batch_size_of": batch_size_of, "predict_fn": predict_fn}
        total_steps = plan.ends_at(DataSource(train.data, "train").lengths)[1]

        def built(total_steps: int | None) -> tuple[FitTarget, CompiledProgram]:
            known = {"total_steps": total_steps, "example": train.example}
            target = fit_target(model, split_batch=split_batch, options=opts, **passed, **known)
            transforms = data_transforms(target.program, train_ds, {VAL: test_ds})
            # the last batch of arrays may be smaller, which needs no warning
            more: dict[str, Any] = {"on_recompile": "ignore" if train.from_arrays else "warn"}
            more |= {"transforms": transforms, "layout": layout, "eval_seed": opts.seed_eval}
            return target, assemble(target.program, opts, named.values(), **more)

        target, program = built(total_steps)
        # traced: mistakes in the steps or the data show before anything is written
        arrays = train.data.arrays if isinstance(train.data, ArrayLoader) and train.data.in_memory else None
        state, training, evaluating = program.shapes(target.key, train.example, arrays)
        evals, first = checked_evals(program, state, evals, train.example)
    data = Data(train.data, evals, resident=opts.resident)
    if dry_run:
        return preflight(program, data, plan, train.example, target.key)  # pyright: ignore[reportReturnType] - the one case
    of_training = full_names(dict.fromkeys(training.names), "train")
    known = full_names(dict.fromkeys(evaluating.names), VAL) if evals else {}
    check_names(named, opts.progress_metric, known, of_training)
    best_by = _metric(known or of_training, VAL if evals else "train", metric)
    saver, named = with_saver(named, best_by, mode, save, metric_is_set=metric is not None)
    is_config = not isinstance(optimizer, optax.GradientTransformation | None)  # otherwise it is described
    tx, loss_name = target.program.info.tx if optimizer is None else optimizer, name_of(loss_fn)
    # a lambda has no name of its own
    names = [
        one for one in (target.name, loss_name, log_name) if isinstance(one, str) and one and "<lambda>" not in one
    ]
    metadata: dict[str, Any] = {
        "style": "fit",
        "model": names[0],
        "loss_fn": loss_name,
        "eval_step": name_of(eval_step),
        "optimizer": None if tx is None else described_optimizer(tx, total_steps),
        "num_epochs": num_epochs,
        "eval_freq": eval_freq,
        "steps_per_epoch": plan.steps_per_epoch,
        "batch_size": several or size,
        "seed": opts.seed,
    }
    if class_weight is not None:
        by_class = dict(class_weight if isinstance(class_weight, Mapping) else enumerate(class_weight))
        metadata["class_weight"] = {str(label): float(weight) for label, weight in by_class.items()}
    metadata |= {"metric": saver.monitor, "mode": saver.best_mode, **opts.recorded(WORDS["fit"].values())}
    if metrics:
        is_ours = lambda one: isinstance(one, MetricInterface)
        metadata["metrics"] = {name: repr(one) if is_ours(one) else name_of(one) for name, one in metrics.items()}
    metadata["hparams"] = plain

    def rebuilt(total_steps: int | None) -> CompiledProgram:
        other, program = built(total_steps)
        program.shapes(other.key, train.example)
        return program

    fingerprint = Fingerprint.of(
        program,
        data,
        plan,
        first={"train": train.example, **first},
        words={name: one for name, one in metadata.items() if name != "optimizer" or is_config},
        callbacks=named,
        total_steps=total_steps,
        rebuild=rebuilt,
    )
    spec = RunSpec(
        program=program,
        plan=plan,
        data=data,
        init=partial(program.init, target.key, train.example),  # so that the initial state is not kept in memory
        options=opts,
        progress=opts.enable_progress_bar,
        progress_metric=opts.progress_metric or saver.monitor,
        recording=recording(metadata, named, saver, logger, log_name, saves=save is not False, validates=bool(evals)),
        fingerprint=fingerprint,
    )
    where = Path(logger.log_dir or "runs"), log_name, None
    run = Run(spec, find_target(resume, where, fingerprint, mirror=logger.mirror, allow_changes=allow_changes))
    try:
        return run.execute(lambda run: FitResult(run, target, size))
    except BaseException:
        if run.has_state:
            target.write_back(run.state)
        raise


# arguments


def _check_arguments(
    model: Any, test_ds: Any, eval_step: Any, log_name: Any, save: Any, resume: Any, options: Options
) -> None:
    """Refuses arguments that are swapped or contradict each other, before any data is read."""
    if not isinstance(save, bool | Every) or save == Every():
        raise ValueError(f"`save` must be True, False, or an interval such as `Every(epochs=10)`, got {save!r}.")
    if save is False and resume is not False:
        raise ValueError(f"`save=False` writes no checkpoints, but `resume` is {resume!r}. Leave out one of them.")
    if eval_step is not None and test_ds is None:
        raise ValueError(
            "`eval_step` needs `test_ds`, which is None. Pass the data to evaluate on, or leave out `eval_step`."
        )
    checked_model(model)
    if isinstance(test_ds, optax.GradientTransformation):
        raise TypeError("`test_ds` is an optimizer. Pass it by keyword: `optimizer=optax.adam(1e-3)`.")
    if not isinstance(log_name, str) or not log_name.strip("/. "):
        raise ValueError(f"`log_name` must be a string, the name of a folder in `log_dir`, got {log_name!r}.")
    if save is False and options.on_nonfinite == "rollback":
        raise ValueError("`on_nonfinite='rollback'` restores a checkpoint, but `save=False` writes none. Leave it out.")


def _data(
    train_ds: Any, test_ds: Any, split: SplitBatch, plan: Plan, batch_size: int | dict[int, int], seed: int
) -> tuple[FitData, dict[str, Any]]:
    """The training data with its first batch, and the evaluation data by name."""
    train = as_fit_data(train_ds, "train", split, batch_size=batch_size, shuffle=True, seed=seed)
    if test_ds is None:
        return train, {}
    is_repeated = (plan.max_epochs or 0) > plan.eval_every.epochs
    first = batch_size[0] if isinstance(batch_size, dict) else batch_size
    return train, {VAL: as_eval_data(test_ds, VAL, split, batch_size=first, is_repeated=is_repeated)}


def _metric(names: Collection[str], where: str, metric: str | None) -> str:
    """The metric that selects the best checkpoint, of those that evaluations report, or else the training."""
    if metric is None:
        return f"{VAL}/accuracy" if f"{VAL}/accuracy" in names else f"{where}/loss"
    full = metric if metric in names else f"{where}/{metric}"
    if full not in names:
        more = "" if where == VAL else " Without `test_ds`, only training metrics are reported."
        raise ValueError(
            f"`metric` is {metric!r}, which is not reported. Reported metrics: {', '.join(sorted(names))}.{more}"
        )
    return full


# what the run records


SAVER = "ModelCheckpoint"


def with_saver(
    callbacks: Mapping[str, Any], metric: str, mode: Mode, save: bool | Every, *, metric_is_set: bool
) -> tuple[ModelCheckpointConfig, dict[str, Any]]:
    """The configuration of the checkpoint callback, and `callbacks` with it: the user's, or one for `metric`.

    Args:
        metric_is_set: whether the user passed `metric`.
    """
    found = next((config for config in map(_saver_config, callbacks.values()) if config is not None), None)
    if found is None:
        every = save if isinstance(save, Every) else Every(epochs=1)
        often = {"every_n_epochs": every.epochs, "every_n_steps": every.steps, "every_n_minutes": every.minutes}
        created = ModelCheckpointConfig(monitor=metric, mode=mode, **often)
        return created, {**callbacks, SAVER: created}
    if metric_is_set:
        raise ValueError(
            "`metric` and a `ModelCheckpoint` both select the best checkpoint. Leave out `metric`, and set `monitor`."
        )
    if save is not True:
        raise ValueError(f"`save={save!r}` and a `ModelCheckpoint` both set when to save. Leave out one of them.")
    return found, dict(callbacks)


def _saver_config(callback: Any) -> ModelCheckpointConfig | None:
    config = callback.config if isinstance(callback, ModelCheckpoint) else callback
    return config if isinstance(config, ModelCheckpointConfig) else None


def recording(
    metadata: Mapping[str, Any],
    callbacks: Mapping[str, Any],
    saver: ModelCheckpointConfig,
    logger: LoggerConfig,
    log_name: str,
    *,
    saves: bool,
    validates: bool,
) -> Recording:
    """What the run writes to its folder; `validates`: it has evaluation data."""

    used = {name: one for name, one in callbacks.items() if saves or _saver_config(one) is None}
    arguments = {name: value for name, value in metadata.items() if name != "hparams" and value is not None}
    return Recording(
        logger=lambda folder: logger.instantiate(Logger, folder.path),
        callbacks=lambda run: attached(used, run),
        files={CONFIG: config_text(metadata)},
        hparams={**flat(arguments), **metadata["hparams"]},
        saver=saver if saves else None,
        mirror=lambda folder: mirror_of(folder, logger, log_name),
        ranking=None if saves else Ranking.by(saver.monitor, saver.best_mode),
        monitors=validates,
        resume_call="fit(…, resume={})",
    )


def config_text(metadata: Mapping[str, Any]) -> str:
    """The text of `config.yaml`; equal metadata give equal text."""
    return yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)


def plain_hparams(hparams: Any) -> dict[str, Any]:
    """Returns `hparams` as numbers, strings, lists and dicts, without secrets; refuses other types.

    >>> import numpy as np
    >>> plain_hparams({"lr": np.float32(0.5), "layers": (8, 8), "api_key": "hunter2"})
    {'lr': 0.5, 'layers': [8, 8], 'api_key': '<hidden>'}
    """
    if not isinstance(hparams, Mapping | None):
        raise TypeError(f"`hparams` must be a dict, got a {type(hparams).__name__}.")
    plain = redact(as_data(hparams or {}))
    for name, value in plain.items():
        try:
            config_text({name: value})
        except yaml.YAMLError as error:
            text = f"`hparams[{name!r}]` cannot be saved: {error}. Pass numbers, strings, and lists and dicts of them."
            raise TypeError(text) from None
    return plain


def name_of(function: Any) -> Any:
    """The qualified name of a function, or those of several by name; None for None."""
    if isinstance(function, Mapping):
        return {name: name_of(one) for name, one in function.items()}
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)
