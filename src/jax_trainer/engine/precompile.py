"""Compiling ahead: what a run will need is compiled at once, in threads, while its state is created."""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

from jax_trainer.core import CompiledProgram, TrainState
from jax_trainer.core.compile import THREADS
from jax_trainer.datasets import ArrayLoader, Data, DataSource
from jax_trainer.engine.batches import (
    padding_for,
    placing,
    train_source,
    with_data_transforms,
    with_training_transforms,
)
from jax_trainer.engine.dispatcher import dispatcher_for
from jax_trainer.engine.evaluation import EVAL_WINDOW
from jax_trainer.engine.plan import Plan


@contextmanager
def precompile(program: CompiledProgram, data: Data, plan: Plan) -> Iterator[None]:
    """Has `init`, the first training step and the first evaluation compiled in threads; create the state inside.

    All of it is traced here, from the shapes that `program.shapes` has found. The first call of each then waits for its
    thread, instead of compiling after the others. What cannot be known without reading data is left to the first call,
    and so is every error, which shows there with the batch and the user's line.
    """
    pool = ThreadPoolExecutor(THREADS, "compile-ahead")
    try:
        with suppress(Exception):
            _submit(pool, program, data, plan.resolved())
        yield
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown(wait=False)  # the first calls wait for what they need, and the end of the process for the rest


def _submit(pool: Executor, program: CompiledProgram, data: Data, plan: Plan) -> None:
    if (state := program.init_shapes()) is None:
        return
    trained = with_training_transforms(program, data)
    # first, because it takes longest
    dispatcher_for(trained, plan, train_source(data, plan), data).compile_ahead(pool, state, program.example)
    program.init_ahead(pool)
    if plan.evaluates or plan.eval_at_start or plan.eval_at_end:
        for name, source in data.evals.items():
            if isinstance(source, ArrayLoader | list | tuple):  # reading a batch once more costs nothing
                _submit_eval(pool, trained, state, DataSource(source, name, may_be_empty=True))


def _submit_eval(pool: Executor, program: CompiledProgram, state: TrainState, data_source: DataSource) -> None:
    program = with_data_transforms(program.evaluating(data_source.name), data_source.transforms)
    with closing(data_source.open(1)) as epoch_iterator:
        step_batch = epoch_iterator.take(1)
    if step_batch is not None:
        step_batch = padding_for(program, data_source)(step_batch)
        batch = placing(program, data_source)[1](step_batch).batch
        program.compile_eval_ahead(pool, state, program.eval_buffer(state, batch, EVAL_WINDOW), batch)
