"""What is known before training: a dry run, and checks of the data, by tracing, without computing anything."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from jax_trainer.adapters import ModelHandle
from jax_trainer.callbacks import Callback, full_names, merged_names
from jax_trainer.callbacks.monitored import check_names
from jax_trainer.config.registration import full_name
from jax_trainer.config.settings import classes_in
from jax_trainer.core import Batch, CompiledProgram, Metrics, PyTree, TrainState
from jax_trainer.diagnostics.flops import Flops, total
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.diagnostics.user_frame import noting
from jax_trainer.engine import Plan, checked_evals
from jax_trainer.trainer.config import TrainerConfig
from jax_trainer.trainer.eval_sets import SetMetrics
from jax_trainer.trainer.layout_table import LayoutTable, layout_table
from jax_trainer.trainer.run_folder import check_initial

Sets = Mapping[str, Any]  # data or configurations by name
LOG = logging.getLogger("jax_trainer")
OF_EXAMPLE = "This batch is `exmp_input`, which must have all that the batches of the loaders have, also targets."


@dataclass(frozen=True)
class Leaf:
    """One array of a state."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Module:
    """A module of the model: its own parameters, and the FLOPs of its own operations in a step, without submodules."""

    path: str  # "": the model itself, and the loss
    parameters: int
    forward: float
    backward: float


@dataclass(frozen=True)
class DryRun:
    """Parameters, state size, batch, metrics and number of steps of a training."""

    parameters: tuple[Leaf, ...]
    modules: tuple[Module, ...]  # in the order of the computation; together they are the forward and backward pass
    other_flops: float  # of the update, transforms of the batch, and metrics
    state_bytes: Mapping[str, int]
    batch: Mapping[str, str]
    reported: tuple[str, ...]  # training metrics
    evaluated: tuple[str, ...]  # evaluation metrics
    steps: int | None
    devices: str
    layout: LayoutTable | None = None  # None: one device
    classes: Mapping[str, str] = field(default_factory=dict)  # full name of every configured class, by its key

    @property
    def parameter_count(self) -> int:
        """Total number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in self.parameters)

    def data(self) -> dict[str, Any]:
        """The dry run as plain data, for JSON."""
        layout = None if self.layout is None else self.layout.data()
        return {**asdict(self), "parameter_count": self.parameter_count, "layout": layout}


@dataclass(frozen=True, kw_only=True)
class Checks:
    """What is found by tracing before a training: mistakes of its parts, and its dry run.

    Args:
        trainer: the class of the trainer.
        config: its configuration.
        metrics: the metrics that it computes.
        key: returns that of the initial state.
        example: the example batch.
        callbacks: callbacks that were passed as objects; None: what callbacks monitor is not checked, because a method
            of the trainer may add metrics.
    """

    trainer: type[Any]
    config: TrainerConfig
    metrics: SetMetrics
    key: Callable[[], jax.Array]
    example: Batch
    callbacks: Mapping[str, Callback] | None

    def checked_sets(
        self, program: CompiledProgram, evals: Sets, tests: Sets, plan: Plan | None, *, loads: bool
    ) -> tuple[Sets, Sets, dict[str, Batch]]:
        """Traces the steps before anything is written; returns the sets, and the first batches that were read of them.

        Args:
            program: the program.
            evals, tests: validation and test sets by name.
            plan: of the training.
            loads: whether the training starts from the weights of `init_from`: then they are checked, too.
        """
        if self.config.debug:
            return evals, tests, {}
        with noting(OF_EXAMPLE):
            state, trained, evaluated = program.shapes(self.key, self.example)
        if loads:
            check_initial(self.config.initial_weights, state, program.info)
        self._check_metrics(program, state, evals, trained, evaluated)
        if self.config.log_intermediates and not any(name.startswith("intermediate/") for name in trained.by_name):
            LOG.warning(
                "`log_intermediates` is on, but the model sows no values. Sow them: in nnx with "
                "`self.sow(nnx.Intermediate, name, value)`, in linen with `self.sow('intermediates', name, value)`."
            )
        evals, first = checked_evals(program, state, evals, self.example, plan)
        tests, of_tests = checked_evals(program, state, tests, self.example)
        return evals, tests, {**first, **of_tests}

    def dry_run(
        self, program: CompiledProgram, model: ModelHandle, evals: Sets, steps: int | None, configs: Sets
    ) -> DryRun:
        """Traces the initial state and one step, and checks what they need and report."""
        with noting(OF_EXAMPLE):
            state, trained, evaluated = program.shapes(self.key, self.example)
        check_initial(self.config.initial_weights, state, program.info)
        self._check_metrics(program, state, evals, trained, evaluated)
        with model.named_modules():
            flops = program.train_flops(state, self.example, again=True)
        parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state", "extra")}
        if jax.tree.leaves(state.frozen):
            parts["frozen"] = state.frozen
        used = jax.devices()[:1] if program.layout is None else [*program.layout.mesh.devices.flat]
        kinds = [device.device_kind for device in used]
        classes = {path: full_name(cls) for path, cls in classes_in(configs)}
        return DryRun(
            parameters=_leaves(state.params),
            modules=(modules := _modules(model, _leaves(state.params), flops, adapts="frozen" in parts)),
            other_flops=total(flops) - sum(one.forward + one.backward for one in modules),
            state_bytes={name: sum(leaf.bytes for leaf in _leaves(part)) for name, part in parts.items()},
            batch={leaf.path: f"{leaf.dtype}{list(leaf.shape)}" for leaf in _leaves(self.example)},
            reported=tuple(trained.names),
            evaluated=tuple(evaluated.names),
            steps=steps,
            devices=", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)),
            layout=None if program.layout is None else layout_table(program.layout, state),
            classes={**classes, "trainer": full_name(self.trainer)},
        )

    def _check_metrics(
        self, program: CompiledProgram, state: TrainState, evals: Sets, trained: Metrics, evaluated: Metrics
    ) -> None:
        """Refuses configured metrics that are not reported, and callbacks that monitor another one."""
        self.config.check_reported(self.trainer.__name__, {*trained.names, *evaluated.names})
        reported = self.metrics.names_in(program, state, self.example, evals, evaluated.names)
        if self.callbacks is not None:
            known = merged_names({one: dict.fromkeys(names) for one, names in reported.items()})
            of_training = full_names(dict.fromkeys(trained.names), "train")
            callbacks = {**self.config.callbacks, **self.callbacks}
            check_names(callbacks, self.config.progress_metric, known, of_training)


def _modules(
    model: ModelHandle, parameters: Sequence[Leaf], flops: Sequence[Flops], *, adapts: bool
) -> tuple[Module, ...]:
    found: dict[str, list[float]] = {"": [0, 0.0, 0.0]}  # parameters, FLOPs of the forward and of the backward pass
    for one in flops:
        path = model.module_of(one.scopes)
        if path or one.phase != "other":
            found.setdefault(path, [0, 0.0, 0.0])[2 if one.phase == "backward" else 1] += one.flops
    for leaf in parameters:
        parameter = leaf.path.rpartition(".")[0] if adapts else leaf.path
        parent = parameter.rpartition(".")[0] if model.has_modules else ""
        found.setdefault(parent, [0, 0.0, 0.0])[0] += math.prod(leaf.shape)
    return tuple(Module(path, int(count), forward, backward) for path, (count, forward, backward) in found.items())


def _leaves(tree: PyTree) -> tuple[Leaf, ...]:
    return tuple(
        Leaf(leaf_path(path), tuple(leaf.shape), str(leaf.dtype), math.prod(leaf.shape) * leaf.dtype.itemsize)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )
