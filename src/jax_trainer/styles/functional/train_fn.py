"""`train_fn`: builds a training function from the training and the validation step of an nnx model."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_trainer.adapters.nnx import NnxStep, nnx_step_program
from jax_trainer.callbacks import with_needs_of
from jax_trainer.callbacks.log_metrics import full_names
from jax_trainer.core import (
    Batch,
    CompiledProgram,
    Layout,
    LogMode,
    MeshLike,
    Metrics,
    NonFiniteError,
    Program,
    ProgramOptions,
    TrainState,
    checked_int,
    class_of,
    compile_program,
    explaining,
)
from jax_trainer.core.user_frame import describe_shapes, noting
from jax_trainer.datasets import (
    ArrayLoader,
    Data,
    DeviceTransforms,
    Position,
    common_transforms,
    transforms_of,
    with_transforms,
)
from jax_trainer.datasets.data_source import peeked
from jax_trainer.engine import LoopState, Observer, Plan, is_by_ctrl_c
from jax_trainer.logger.active_wandb import ActiveWandb
from jax_trainer.runs import Run, RunSpec
from jax_trainer.styles.functional.hooks import (
    Hook,
    HookCaller,
    ResumePoint,
    Training,
    TrainingHook,
    checked_hooks,
    warn_about_slow_hooks,
)
from jax_trainer.styles.functional.mirror import Mirror, modes_kept
from jax_trainer.styles.functional.report import EveryAndLast, MetricReport
from jax_trainer.styles.functional.shardings import layout_from
from jax_trainer.suggestions import checks_keywords

LOG = logging.getLogger("jax_trainer")
Train = Callable[..., None]


@checks_keywords
def train_fn(
    *,
    fns: tuple[NnxStep, NnxStep],
    shardings: tuple[NamedSharding, NamedSharding] | None = None,
    mesh: MeshLike | None = None,
    data_partition_spec: PartitionSpec | None = None,
    n_steps: int,
    eval_every_n_steps: int,
    n_eval_batches: int,
    log_to_wandb: bool = False,
    hooks: Iterable[Hook] = (),
    progress: bool = True,
    steps_per_call: int = 1,
    detect_nans: bool = False,
    options: ProgramOptions | None = None,
) -> Train:
    """Returns a function `train(rng_key, model, optimizer, train_itr, val_itr)` that trains an nnx model.

    It trains from the optimizer's step to `n_steps`, compiled, and evaluates every `eval_every_n_steps` steps and after
    the last one. However it ends, `model` and `optimizer` are updated with the trained state. Call
    `train(rng_key, optimizer, train_itr, val_itr)` for an optimizer that has its model. `val_itr` may be None.

    Args:
        fns: `train_step(model, rng_key, batch) -> (loss, grads)` or `((loss, metrics), grads)`, and
            `val_step(model, rng_key, batch) -> loss`, or `(loss, metrics)`, or a dict of metrics.
        shardings: of the model and of the data; None: one device.
        mesh: instead of `shardings`: a mesh, its sizes, or a `Layout`; parameters are sharded by their own partitioning
            metadata.
        data_partition_spec: mesh axes that shard a batch.
        n_steps: total number of steps.
        eval_every_n_steps: steps between two evaluations.
        n_eval_batches: maximum number of batches per evaluation.
        log_to_wandb: log evaluation metrics and training means to the active wandb run.
        hooks: called as `hook(step, model=…, optimizer=…, metrics=…)` after every step, or every
            `hook.every_n_steps` steps, after the evaluation of that step.
        progress: show a progress bar.
        steps_per_call: optimizer steps per dispatch.
        detect_nans: skip the update of a step with a non-finite loss or gradient, so that the model keeps its weights;
            costs a little time. A non-finite loss ends training in any case.
        options: precision, gradient accumulation, clipping, EMA, statistics, and what a non-finite step does; see
            `ProgramOptions`. EMA weights are in the states of hooks and checkpoints; see also `get_ema_hook`.
    """
    n_steps = checked_int("n_steps", n_steps, 1)
    eval_every_n_steps = checked_int("eval_every_n_steps", eval_every_n_steps, 1)
    n_eval_batches = checked_int("n_eval_batches", n_eval_batches, 1)
    steps_per_call = checked_int("steps_per_call", steps_per_call, 1)
    called, training_hooks = checked_hooks(hooks)
    plan = Plan(
        max_steps=n_steps,
        eval_every=EveryAndLast(steps=eval_every_n_steps, last=n_steps),
        eval_batches=n_eval_batches,
        steps_per_call=steps_per_call,
    )
    has_mesh = mesh if shardings is None else shardings
    options = ProgramOptions.of(options, detect_nans=detect_nans, mesh=has_mesh, policies=("raise", "stop", "skip"))
    layout = layout_from(shardings, options.mesh if shardings is None else None, data_partition_spec)
    setup = _Setup(_two_functions(fns), plan, called, training_hooks, log_to_wandb, progress, options)

    @checks_keywords
    def train(
        rng_key: jax.Array, model: Any = None, optimizer: Any = None, train_itr: Any = None, val_itr: Any = None
    ) -> None:
        """Trains `model` in place."""
        if isinstance(model, nnx.Optimizer):  # the form without a model
            model, optimizer, train_itr, val_itr = None, model, optimizer, train_itr
        job = _Job.of(rng_key, model, optimizer, train_itr, val_itr)
        if job.first >= n_steps:
            LOG.warning(
                f"The optimizer is already at step {job.first}, and `n_steps={n_steps}` is the total: nothing to do. "
                "To train further, create a `train_fn` with a larger `n_steps`."
            )
            if not training_hooks:
                return
        with modes_kept(job.model):
            _train(setup, job, layout)

    return train


class _Setup(NamedTuple):
    """The arguments of `train_fn`."""

    fns: tuple[NnxStep, NnxStep]
    plan: Plan
    called: list[Hook]
    training_hooks: list[TrainingHook]
    logs_to_wandb: bool
    progress: bool
    options: ProgramOptions

    @property
    def last(self) -> int:
        assert self.plan.max_steps is not None
        return self.plan.max_steps

    def program(self, job: "_Job") -> Program:
        program = nnx_step_program(job.model, job.optimizer, *self.fns, **self.options.step_options())
        program = with_transforms(program, job.transforms)
        for one in self.training_hooks:
            program = one.wrap(program)
        return self.options.wrap(with_needs_of((), program, log_rate=self.options.log_learning_rate))

    def resume_point(self, state: TrainState, training: Training) -> ResumePoint | None:
        found = [one.resume_point(state, training) for one in self.training_hooks]  # each may refuse
        return next((one for one in found if one is not None), None)

    def savers(self, training: Training) -> list[Observer]:
        return [observer for one in self.training_hooks for observer in one.observers(training)]


class _Job(NamedTuple):
    """The arguments of `train`."""

    key: jax.Array
    model: nnx.Module
    optimizer: nnx.Optimizer
    train: Any
    val: Any

    @classmethod
    def of(cls, key: Any, model: Any, optimizer: Any, train: Any, val: Any) -> "_Job":
        if not hasattr(key, "dtype"):
            raise TypeError(
                f"The first argument of `train` must be a key, such as `jax.random.key(0)`, got a {type(key).__name__}."
            )
        if not isinstance(optimizer, nnx.Optimizer):
            raise TypeError(
                f"`optimizer` must be an nnx.Optimizer, got a {class_of(optimizer)}. Create it from an optax one: "
                "`nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)`."
            )
        known = getattr(optimizer, "model", None)
        model = known if model is None else model
        if model is None:
            raise TypeError("`optimizer` has no model: call `train(key, model, optimizer, train_itr, val_itr)`.")
        if not isinstance(model, nnx.Module):
            kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {class_of(model)}"
            raise TypeError(f"`model` must be an nnx.Module, such as `Network(nnx.Rngs(0))`, got {kind}.")
        if known is not None and known is not model:
            raise ValueError("`optimizer` was created for another model than `model`. Create one for this model.")
        if train is None:
            raise TypeError("`train_itr` is None. Pass the training data.")
        return cls(key, model, optimizer, train, val)

    @property
    def transforms(self) -> DeviceTransforms:
        """The device transforms of the data."""
        return common_transforms(transforms_of(self.train), {"val": self.val})

    @property
    def first(self) -> int:
        """The step of the optimizer when `train` is called."""
        return int(self.optimizer.step.get_value())


def _train(setup: _Setup, job: _Job, layout: Layout | None) -> None:
    writer = ActiveWandb() if setup.logs_to_wandb and jax.process_index() == 0 else None
    (example, train), (val_example, val) = peeked(job.train, "train"), _peeked_or_none(job.val)
    program = setup.program(job)
    compiled = compile_program(program, layout=layout)
    reported = _reported(program, compiled, job.key, example, val_example)
    if val_example is not None:
        _check_labels(compiled, jax.eval_shape(program.init, job.key, example), val, val_example)
    report, callers = MetricReport(setup.plan.eval_every, writer), []
    training = Training(
        evaluations=setup.plan.eval_every,
        last=setup.last,
        report=report,
        key=job.key,
        states=lambda: {"report": report.state_dict(), "hooks": {"called_at": [one.called_at for one in callers]}},
    )
    for one in setup.training_hooks:
        one.check(reported, job.first, training)
    warn_about_slow_hooks(setup.called)
    mirror = Mirror(job.model, job.optimizer, [one.follow for one in setup.training_hooks])
    callers += [HookCaller(hook, mirror, training) for hook in setup.called]
    savers = setup.savers(training)

    def restore(initial: TrainState) -> tuple[TrainState, Position | LoopState] | None:
        found = setup.resume_point(initial, training)
        if found is None:
            return None
        _load_states(found, report, callers)
        return found.state, found.at

    run = Run(
        RunSpec(
            program=compiled,
            plan=setup.plan,
            data=Data(train, {} if val is None else {"val": val}),
            init=partial(compiled.init, job.key, example),
            restore=restore,
            observers=lambda run: [report, *callers, *savers, mirror],
            policy=setup.options.guard or "raise",
            progress=setup.progress,
            in_steps=True,
        )
    )
    if job.first >= setup.last:  # a finished run: hooks still get the state of the checkpoint, such as averages
        run.open()
        for one in setup.training_hooks:
            one.follow(run.state)
        return
    try:
        run.execute()
    except KeyboardInterrupt as end:
        if savers and is_by_ctrl_c(end):
            end.args = (f"{end} The same call again resumes from the latest checkpoint.",)
        raise
    except NonFiniteError as error:
        if setup.options.guard is not None:  # steps after the last finite one only advanced the step counter
            job.optimizer.step.set_value(jnp.asarray(error.step - 1, jnp.uint32))
        raise


def _load_states(found: ResumePoint, report: MetricReport, callers: list[HookCaller]) -> None:
    if "report" in found.hook_states:
        report.load_state_dict(found.hook_states["report"])
        for caller, step in zip(callers, found.hook_states["hooks"]["called_at"], strict=False):
            caller.called_at = step


def _peeked_or_none(data: Any) -> tuple[Any, Any]:
    return (None, None) if data is None else peeked(data, "val")


def _reported(
    program: Program, compiled: CompiledProgram, key: jax.Array, example: Batch, val_example: Batch
) -> list[str] | None:
    """Traces both steps; returns the full names of their metrics, or None without validation data."""
    if val_example is not None and _signature(example) == _signature(val_example):
        _, trained, evaluated = compiled.shapes(key, example)
        return _names(trained, evaluated)
    with explaining(example):
        state = jax.eval_shape(program.init, key, example)
        trained = jax.eval_shape(program.train_step, state, example)[1].metrics
    where = f"This happened on the first batch of the 'val' data: {describe_shapes(val_example)}. "
    with noting(f"{where}The training data has {describe_shapes(example)}."), explaining(val_example):
        evaluated = None if val_example is None else jax.eval_shape(program.eval_step, state, val_example)
    return None if evaluated is None else _names(trained, evaluated)


def _check_labels(compiled: CompiledProgram, state: TrainState, val: Any, example: Batch) -> None:
    examples = val.arrays if isinstance(val, ArrayLoader) and val.in_memory else example
    with noting(f"This happened on the 'val' data: {describe_shapes(example)}."):
        compiled.check_eval_indices(state, example, examples)


def _names(trained: Metrics, evaluated: Metrics) -> list[str]:
    names = full_names(trained.only(LogMode.TRAIN).by_name, "train")
    return [*names, *full_names(evaluated.only(LogMode.VAL).by_name, "val")]


def _signature(batch: Batch) -> Any:
    """Structure, shapes without the batch dimension, and dtypes of a batch."""
    return jax.tree.structure(batch), [(jnp.shape(x)[1:], jnp.asarray(x).dtype) for x in jax.tree.leaves(batch)]


def _two_functions(fns: Any) -> tuple[NnxStep, NnxStep]:
    if not isinstance(fns, tuple | list) or len(fns) != 2 or not all(map(callable, fns)):
        raise TypeError(f"`fns` must be the two functions `(train_step, val_step)`, got {fns!r}.")
    return fns[0], fns[1]
