"""Ahead-of-time compilation of a step for devices that may be absent."""

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
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x8")
    return list(topology.devices)


def compile_aot(case: Case, devices: list[Any], precision: str = "f32", model: GPTConfig = GPT) -> AotStep:
    """Compiles the training step as the trainer does."""
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
    compiled = jax.jit(program._train, donate_argnums=0).lower(state, MetricBuffer(rows, fmt), batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return AotStep(compiled.as_text() or "", memory.temp_size_in_bytes, state, layout)


def state_bytes(state: PyTree) -> tuple[int, int]:
    """Bytes of a state or of its shapes: per device, and in total."""
    leaves = jax.tree.leaves(state)
    per_device = sum(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize for leaf in leaves)
    return int(per_device), sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
