"""Ahead-of-time compilation of a step for devices that may be absent."""

import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from scaling_cases import BATCH, GPT, Case, batch_of, trainer_for

from jax_trainer.core import MetricBuffer, PyTree, TrainState
from jax_trainer.engine.costs import described_devices
from jax_trainer.models import GPTConfig
from jax_trainer.sharding import Layout

BUFFER_ROWS = 8  # of the metric buffer


class AotStep(NamedTuple):
    """A compiled step, and XLA's memory analysis of it."""

    hlo: str
    temporary: int  # bytes on each device
    state: TrainState  # shapes, with their shardings
    layout: Layout


def eight_gpus() -> list[Any]:
    """Descriptions of eight GPUs in one node, of the kind of this machine: compilation targets only."""
    if jax.default_backend() != "gpu":
        sys.exit(
            f"`--gpus` needs a GPU, whose kind is the compilation target; jax has only {jax.devices()[:1]}. Run it "
            "on a machine with a GPU and jax[cuda12], or leave out `--gpus`."
        )
    return described_devices(8)


def compile_aot(case: Case, devices: list[Any], precision: str = "f32", model: GPTConfig = GPT) -> AotStep:
    """Compiles the training step as the trainer does."""
    batch = batch_of(BATCH, case.vocabulary)
    program = trainer_for(case, devices, batch, precision=precision, model=model).prepare([batch])
    layout = program.layout
    assert layout is not None
    state = program.state_shape(jax.random.key(0), batch)
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout.batch_sharding(leaf.shape))
    batch = jax.tree.map(shape, batch)
    fmt = program.trace_train_step(state, batch).format
    rows = jax.ShapeDtypeStruct((BUFFER_ROWS, fmt.width), np.uint32, sharding=layout.replicated)
    # what `program.train_step` compiles when it is first called, which would need the devices
    compiled = program.lowered_train(state, MetricBuffer(rows, fmt), batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return AotStep(compiled.as_text() or "", memory.temp_size_in_bytes, state, layout)


def state_bytes(state: PyTree) -> tuple[int, int]:
    """Bytes of a state or of its shapes: per device, and in total."""
    leaves = jax.tree.leaves(state)
    per_device = sum(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize for leaf in leaves)
    return int(per_device), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
