"""How every style makes the program of a run."""

from collections.abc import Iterable
from typing import Any

from jax_trainer.callbacks import Callback, CallbackConfig, with_needs_of
from jax_trainer.core import CompiledProgram, Program, ProgramOptions, compile_program
from jax_trainer.datasets import with_transforms
from jax_trainer.sharding import Layout


def assemble(
    program: Program,
    callbacks: Iterable[Callback | CallbackConfig] = (),
    options: ProgramOptions = ProgramOptions(),  # noqa: B008 - frozen
    *,
    transforms: Any = None,
    layout: Layout | None = None,
    **compiling: Any,
) -> CompiledProgram:
    """The compiled program of a run, from the inside out: the steps of `program`, transforms of batches, callbacks (the
    first one innermost), and what the options add around a step.

    Args:
        program: the steps of a style, with the options of the step.
        callbacks: callbacks or configurations, which may wrap the program and its optimizer.
        options: statistics, EMA, the guard against non-finite values.
        transforms: device transforms of batches; None: none.
        layout: the layout of the devices; None: one device.
        compiling: of `compile_program`.
    """
    if transforms is not None:
        program = with_transforms(program, transforms)
    program = with_needs_of(callbacks, program, log_rate=options.log_learning_rate)
    return compile_program(options.wrap(program), layout=layout, **compiling)
