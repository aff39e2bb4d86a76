"""`train_fn`: builds a training function from the training and the validation step of an nnx model."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Unpack

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.adapters.nnx import NnxStep, nnx_step_program
from jax_trainer.adapters.nnx_objects import NnxObjects, is_nnx_optimizer
from jax_trainer.callbacks.log_metrics import full_names
from jax_trainer.core import Batch, CompiledProgram, LogMode, Metrics, NonFiniteError, TrainState
from jax_trainer.datasets import ArrayLoader, Data, DataSource, Position, common_transforms, transforms_of
from jax_trainer.datasets.data_source import peeked
from jax_trainer.diagnostics.ledger import begin
from jax_trainer.diagnostics.returned import checked_int
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.diagnostics.user_frame import describe_shapes, noting
from jax_trainer.engine import LoopState, is_by_ctrl_c
from jax_trainer.logger.wandb import ActiveWandb
from jax_trainer.runs import CallbacksLike, Fingerprint, Run, RunSpec, assemble, loop_state_of, named_callbacks
from jax_trainer.runs.callback_list import attached_without_folder
from jax_trainer.runs.options import Options
from jax_trainer.runs.sections import layout_for
from jax_trainer.runs.vocabulary import WORDS, TrainOptions, options_of, takes_options
from jax_trainer.sharding import Layout
from jax_trainer.sharding.placement import is_primary
from jax_trainer.styles.checkpointer import SaveHook
from jax_trainer.styles.hooks import EmaHook, EveryAndLast, Hook, Training, checked_hooks, warn_about_slow_hooks

LOG = logging.getLogger("jax_trainer")
Train = Callable[..., None]


@takes_options
def train_fn(
    *,
    fns: tuple[NnxStep | Mapping[str, NnxStep], NnxStep],
    shardings: tuple[NamedSharding, NamedSharding] | None = None,
    data_partition_spec: PartitionSpec | None = None,
    n_steps: int,
    eval_every_n_steps: int,
    n_eval_batches: int,
    log_to_wandb: bool = False,
    hooks: Iterable[Hook] = (),
    callbacks: CallbacksLike = (),
    progress: bool = True,
    allow_changes: Collection[str] = (),
    **options: Unpack[TrainOptions],
) -> Train:
    """Returns a function `train(rng_key, model, optimizer, train_itr, val_itr)` that trains an nnx model.

    It trains from the optimizer's step to `n_steps`, compiled, and evaluates every `eval_every_n_steps` steps and after
    the last one. However it ends, `model` and `optimizer` are updated with the trained state. Call
    `train(rng_key, optimizer, train_itr, val_itr)` for an optimizer that has its model. `val_itr` may be None.

    Args:
        fns: `train_step(model, rng_key, batch) -> (loss, grads)` or `((loss, metrics), grads)`, and
            `val_step(model, rng_key, batch) -> loss`, or `(loss, metrics)`, or a dict of metrics. For an optimizer of
            several `Optimizers`, a dict of one training step for each.
        shardings: of the model and of the data; None: one device.
        data_partition_spec: for the option `mesh`: mesh axes that shard a batch.
        n_steps: total number of steps.
        eval_every_n_steps: steps between two evaluations.
        n_eval_batches: maximum number of batches per evaluation.
        log_to_wandb: log evaluation metrics and training means to the active wandb run.
        hooks: called as `hook(step, model=…, optimizer=…, metrics=…)` after every step, or every
            `hook.every_n_steps` steps, after the evaluation of that step.
        callbacks: callbacks that need no run folder, as a list or by name: those that change the training
            (`ReduceLROnPlateau`, `Unfreeze`, `StochasticWeightAveraging`) or stop it (`EarlyStopping`).
        progress: show a progress bar.
        allow_changes: parts in which this training may differ from the one that it resumes: "program" (model, steps,
            options), "optimizer", "callbacks", "start" (the key), "data". Anything else that differs is an error.
        options: all other options of a training, such as `precision="bf16"`, `clip_norm=1.0`, `accumulate=4`,
            `steps_per_call`, `detect_nans` (skip the update of a step that is not finite), `mesh` (instead of
            `shardings`): see `Options`. The averages of `ema` are in the states of hooks and checkpoints; see also
            `get_ema_hook`.
    """
    n_steps = checked_int("n_steps", n_steps, 1)
    own = {"n_steps": n_steps, "eval_every_n_steps": checked_int("eval_every_n_steps", eval_every_n_steps, 1)}
    own["n_eval_batches"] = checked_int("n_eval_batches", n_eval_batches, 1)
    opts = options_of("train_fn", options, **own, progress=progress)
    plan = opts.plan(eval_every=EveryAndLast(steps=opts.val_every_n_steps, last=n_steps))
    (called, own), named = checked_hooks(hooks), named_callbacks(callbacks)
    savers = [one for one in own if isinstance(one, SaveHook)]
    emas = [one for one in own if isinstance(one, EmaHook)]
    if len(emas) > 1:
        raise ValueError("`hooks` has more than one hook of `get_ema_hook`. Pass one.")
    layout = layout_from(opts, shardings, data_partition_spec)
    if not isinstance(fns, tuple | list) or len(fns) != 2 or not (_are_steps(fns[0]) and callable(fns[1])):
        raise TypeError(f"`fns` must be the two functions `(train_step, val_step)`, got {fns!r}.")

    @checks_keywords
    def train(
        rng_key: jax.Array, model: Any = None, optimizer: Any = None, train_itr: Any = None, val_itr: Any = None
    ) -> None:
        """Trains `model` in place."""
        if is_nnx_optimizer(model):  # the form without a model
            model, optimizer, train_itr, val_itr = None, model, optimizer, train_itr
        objects = _checked(rng_key, model, optimizer, train_itr)
        if objects.step >= n_steps:
            LOG.warning(
                f"The optimizer is already at step {objects.step}, and `n_steps={n_steps}` is the total: nothing to "
                "do. To train further, create a `train_fn` with a larger `n_steps`."
            )
            if not own:
                return
        begin()
        with objects.modes_kept():
            (example, data), (val_example, val) = _peeked(train_itr, "train"), _peeked(val_itr, "val")
            program = nnx_step_program(objects.model, objects.optimizer, *fns, **opts.step_options())
            for ema in emas:
                program = ema.wrap(program)
            transforms = common_transforms(transforms_of(train_itr), {"val": val_itr})
            compiled = assemble(program, opts, named.values(), transforms=transforms, layout=layout)
            trained, reported = _reported(compiled, rng_key, example, val, val_example)
            writer = ActiveWandb() if log_to_wandb and is_primary() else None
            epochs, steps = plan.ends_at(DataSource(data, "train").lengths)
            facts: dict[str, Any] = {"epochs": epochs, "steps": steps, "validates": val is not None}
            attached = attached_without_folder(named, "train_fn", ("validation", "end"), **facts)
            training = Training(plan, rng_key, objects, called, writer, trained.computes, attached)
            training.mirror.followers += [ema.follow for ema in emas]
            for saver in savers:
                saver.check(reported)
            warn_about_slow_hooks(called)
            observers = [training.report, *attached.values(), *training.callers, *savers, training.mirror]
            sets = Data(data, {} if val is None else {"val": val}, resident=opts.resident)
            if savers:
                first = {"train": example, "val": val_example}
                words = {"n_steps": n_steps, **opts.recorded(WORDS["train_fn"].values())}
                fingerprint = Fingerprint.of(
                    compiled, sets, plan, first=first, words=words, callbacks=named, starts_from=None
                )
                for saver in savers:
                    saver.fingerprint, saver.allow_changes = fingerprint, allow_changes
            spec = RunSpec(
                program=compiled,
                plan=plan,
                data=sets,
                init=partial(compiled.init, rng_key, example),
                restore=partial(_resume_point, savers, training),
                observers=lambda run: observers,
                options=opts,
                progress=opts.enable_progress_bar,
                in_steps=True,
            )
            run = Run(spec)
            if objects.step >= n_steps:  # a finished run: the averages of the checkpoint are still of use
                run.open()
                for ema in emas:
                    ema.follow(run.state)
            else:
                _execute(run, objects, saves=bool(savers), guarded=opts.guards is not None)

    return train


def _are_steps(step: Any) -> bool:
    return all(map(callable, step.values())) if isinstance(step, Mapping) else callable(step)


def layout_from(
    options: Options, shardings: tuple[NamedSharding, NamedSharding] | None, data_partition_spec: PartitionSpec | None
) -> Layout | None:
    """The layout of the arguments of `train_fn`; None: one device."""
    if shardings is not None and (options.mesh is not None or data_partition_spec is not None):
        raise ValueError("Pass either `shardings`, or `mesh` and `data_partition_spec`, not both.")
    if options.mesh is None and data_partition_spec is not None:
        raise ValueError("`data_partition_spec` needs a `mesh` whose axes it names.")
    return layout_for(options, shardings, batch_spec=data_partition_spec)


def _checked(key: Any, model: Any, optimizer: Any, train: Any) -> NnxObjects:
    if not hasattr(key, "dtype"):
        raise TypeError(
            f"The first argument of `train` must be a key, such as `jax.random.key(0)`, got a {type(key).__name__}."
        )
    objects = NnxObjects.of(model, optimizer)
    if train is None:
        raise TypeError("`train_itr` is None. Pass the training data.")
    return objects


def _peeked(data: Any, name: str) -> tuple[Batch, Any]:
    return (None, None) if data is None else peeked(data, name)


def _reported(
    compiled: CompiledProgram, key: jax.Array, example: Batch, val: Any, val_example: Batch
) -> tuple[Metrics, list[str] | None]:
    """Traces both steps; returns the training metrics, and the full names of all, or None without validation data."""
    state, trained = compiled.train_shapes(key, example)
    if val is None:
        return trained, None
    where = f"This happened on the first batch of the 'val' data: {describe_shapes(val_example)}. "
    with noting(f"{where}The training data has {describe_shapes(example)}."):
        evaluated = compiled.eval_shapes(state, val_example)
    examples = val.arrays if isinstance(val, ArrayLoader) and val.in_memory else val_example
    with noting(f"This happened on the 'val' data: {describe_shapes(val_example)}."):
        compiled.check_eval_indices(state, val_example, examples)
    names = full_names(dict.fromkeys(trained.only(LogMode.TRAIN).names), "train")
    return trained, [*names, *full_names(dict.fromkeys(evaluated.only(LogMode.VAL).names), "val")]


def _resume_point(
    savers: Iterable[SaveHook], training: Training, initial: TrainState
) -> tuple[TrainState, Position | LoopState] | None:
    """The checkpoint that `initial` belongs to, with its position; None: a new training."""
    found = [one for one in [saver.start(initial, training) for saver in savers] if one]  # each may refuse
    if not found:
        return None
    state, saved = found[0]
    training.load_states(saved.callbacks)
    return state, loop_state_of(saved)


def _execute(run: Run, objects: NnxObjects, *, saves: bool, guarded: bool) -> None:
    try:
        run.execute()
    except KeyboardInterrupt as end:
        if saves and is_by_ctrl_c(end):
            end.args = (f"{end} The same call again resumes from the latest checkpoint.",)
        raise
    except NonFiniteError as error:
        if guarded:  # steps after the last finite one only advanced the step counter
            objects.step = error.step - 1
        raise
