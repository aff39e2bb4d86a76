"""How every style makes the program of a run."""

from collections.abc import Iterable
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig
from jax_trainer.config.compilation_cache import set_compilation_cache
from jax_trainer.config.registration import implementation_of
from jax_trainer.core import CompiledProgram, Program, compile_program, wrappers
from jax_trainer.core.extra_args import Around, freezes_of
from jax_trainer.datasets import with_transforms
from jax_trainer.diagnostics.leaves import parameter_paths
from jax_trainer.optimizer.reported import with_learning_rate
from jax_trainer.runs.options import Options
from jax_trainer.sharding import Layout


def assemble(
    program: Program,
    options: Options,
    callbacks: Iterable[Callback | CallbackConfig] = (),
    *,
    transforms: Any = None,
    layout: Layout | None = None,
    **compiling: Any,
) -> CompiledProgram:
    """The compiled program of a run, from the inside out.

    1. The steps of `program`, with the options of the step: gradients, clipping, precision.
    2. Device transforms, so that whatever follows sees the batches that the model sees.
    3. Callbacks, the first one innermost: they may wrap the program and its optimizer.
    4. Statistics of frozen modules, EMA and statistics of arrays, which see the update of all of these.
    5. The guard against values that are not finite, outermost: it undoes everything inside of it.

    Args:
        program: the steps of a style.
        options: all options of the training.
        callbacks: callbacks or configurations, which may wrap the program and its optimizer.
        transforms: device transforms of batches; None: none.
        layout: the layout of the devices; None: one device.
        compiling: of `compile_program`.
    """
    if options.compilation_cache is not None:
        set_compilation_cache(options.compilation_cache)
    if transforms is not None:
        program = with_transforms(program, transforms)
    program = with_needs_of(callbacks, program, log_rate=options.log_learning_rate)
    program = _with_frozen_stats(program, options)
    if options.ema is not None:
        program = wrappers.with_ema(program, options.ema)
    parameters, gradients = options.log_param_stats, options.log_grad_stats
    program = wrappers.with_statistics(
        program, params=options.param_log_modes if parameters else (), grads=options.grad_log_modes if gradients else ()
    )
    return compile_program(_guarded(program, options), layout=layout, debug=options.debug, **compiling)


def _with_frozen_stats(program: Program, options: Options) -> Program:
    """`program` that keeps the statistics of modules none of whose parameters train."""
    lora = options.adapters
    if lora is not None and not lora.train_bn:
        return wrappers.with_frozen_stats(program, lora.trains)
    freezes = None if program.info.tx is None else freezes_of(program.info.tx)
    if freezes is None:
        return program
    trains = lambda state: {path: not freezes.statistics(path) for path in parameter_paths(state.params)}
    return wrappers.with_frozen_stats(program, trains)


def _guarded(program: Program, options: Options) -> Program:
    """`program` with the guard or the check of the options; a user's program may have its own, which stays."""
    if program.info.keeps_batches or options.on_nonfinite == "ignore":
        return program
    if options.guards is None:
        return wrappers.with_finite_check(program)
    limit = options.max_skipped if options.guards == "skip" else 0
    return wrappers.with_finite_guard(program, max_consecutive=limit, watched=options.checked_metrics)


def with_needs_of(
    callbacks: Iterable[Callback | CallbackConfig], program: Program, *, log_rate: bool = False
) -> Program:
    """`program`, wrapped by `callbacks` in their order, the first one innermost.

    Args:
        callbacks: callbacks, or configurations of some.
        program: the program.
        log_rate: log the learning rate of windows of steps and of epochs, whatever callbacks do.
    """
    for callback in callbacks:
        kind = type(callback) if isinstance(callback, Callback) else implementation_of(callback) or Callback
        wraps_optimizer = kind.wrap_optimizer is not Callback.wrap_optimizer
        if not wraps_optimizer and kind.wrap is Callback.wrap:
            continue
        callback = callback if isinstance(callback, Callback) else kind(callback)
        if wraps_optimizer:
            program = wrappers.with_optimizer(program, Around(kind.__name__, callback.wrap_optimizer))
        program = callback.wrap(program)
    return with_learning_rate(program) if log_rate else program
