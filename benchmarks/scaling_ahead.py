"""Compiles a step without running it, for devices that need not be there."""

import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from scaling_cases import BATCH, GPT, Case, batch_of, trainer_for

from jax_trainer.core import Layout, MetricBuffer, PyTree, TrainState
from jax_trainer.models import GPTConfig

BUFFER_ROWS = 8  # of the metric buffer


class Ahead(NamedTuple):
    """A compiled step, and XLA's memory analysis of it."""

    hlo: str
    temporary: int  # bytes on each device
    state: TrainState  # shapes, with their shardings
    layout: Layout


def eight_gpus() -> list[Any]:
    """Eight of the kind that is here, in one node: descriptions, which can be compiled for and hold nothing."""
    if jax.default_backend() != "gpu":
        sys.exit(
            f"To compile for eight GPUs one must be there, which tells their kind; jax has only {jax.devices()[:1]} "
            "and the like. Run it on a machine with a GPU and jax[cuda12], or leave out --gpus."
        )
    described = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x8")
    return list(described.devices)


def compiled_ahead(case: Case, devices: list[Any], precision: str = "f32", model: GPTConfig = GPT) -> Ahead:
    """The step as the trainer compiles it."""
    batch = batch_of(BATCH, case.vocabulary)
    program = trainer_for(case, devices, batch, precision=precision, model=model).prepare([batch])
    layout = program.layout
    assert layout is not None
    key = jax.random.key(0)
    state = jax.eval_shape(program._program.init, key, batch)
    state = jax.tree.map(_shape, state, layout.state_shardings(state))
    rows = NamedSharding(layout.mesh, PartitionSpec(layout.batch_axes))
    batch = jax.tree.map(lambda leaf: _shape(leaf, rows), batch)
    fmt = program.trace_train_step(state, batch).format
    rows = jax.ShapeDtypeStruct((BUFFER_ROWS, fmt.width), np.uint32, sharding=layout.replicated)
    # what `program.train_step` compiles when it is first called, which would need the devices
    made = jax.jit(program._train, donate_argnums=0).lower(state, MetricBuffer(rows, fmt), batch).compile()
    memory = made.memory_analysis()
    assert memory is not None
    return Ahead(made.as_text() or "", memory.temp_size_in_bytes, state, layout)


def state_bytes(state: PyTree) -> tuple[int, int]:
    """Of a state or its shapes: on each device, and in all."""
    leaves = jax.tree.leaves(state)
    here = sum(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize for leaf in leaves)
    return int(here), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
