"""The layouts that `scaling.py` compares, and the minimal communication of each."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from hlo_collectives import ring_bytes
from jax.sharding import AxisType, Mesh

from jax_trainer.core import PyTree
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.models import GPTConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.runs.sections import ShardingConfig, ShardingRuleConfig
from jax_trainer.sharding import Layout
from jax_trainer.sharding.mesh import AXES
from jax_trainer.trainer import LanguageModelTrainer

GPT = GPTConfig(vocab_size=512, context=128, layers=4, heads=8, width=256, bias=True)
BATCH = 16  # texts per step, over all devices
BYTES = {"f32": 4, "bf16": 2}  # per number in the model
LOSS_BYTES = 4  # float32 in every precision
RULES = {  # columns of up-projections, rows of down-projections, tokens of the embedding
    r"tokens": (("tensor", "fsdp"),),
    r".*(into_heads|hidden)\.kernel": ("fsdp", "tensor"),
    r".*(into_heads|hidden)\.bias": ("tensor",),
    r".*out\.kernel": ("tensor", "fsdp"),
}


class Case(NamedTuple):
    """A layout: the sizes of the mesh axes, and how the step is computed."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulate: int = 1
    vocabulary: int = GPT.vocab_size

    def layout(self, devices: list[Any]) -> Layout:
        """The layout on the first of `devices`, which may be absent; with `tensor`, rules shard the parameters."""
        sizes = self.data, self.fsdp, self.tensor
        grid = np.array(devices[: self.devices]).reshape(sizes)
        rules = RULES.items() if self.tensor > 1 else ()
        split = ShardingConfig(rules=tuple(ShardingRuleConfig(match=match, axes=axes) for match, axes in rules))
        mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)
        return Layout(mesh=mesh, param_spec=split.partitioning)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.tensor


CASES = {
    "data": Case(data=8),
    "fsdp": Case(fsdp=8),
    "fsdp, 509 tokens": Case(fsdp=8, vocabulary=509),  # divisible by no axis, like the 50257 of GPT-2
    "data 2 × fsdp 4": Case(data=2, fsdp=4),
    "tensor": Case(tensor=8),
    "data 2 × fsdp 2 × tensor 2": Case(data=2, fsdp=2, tensor=2),
    "data, in 2 parts": Case(data=8, accumulate=2),
    "fsdp, in 2 parts": Case(fsdp=8, accumulate=2),
}


class Need(NamedTuple):
    """Communication that a layout requires."""

    phase: str
    kind: str
    sent: float  # bytes per step and device
    number: int | None = None  # of collectives; None: any


def batch_of(size: int, vocabulary: int) -> SupervisedBatch:
    """Random texts and their next tokens."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(vocabulary, size=(size, (GPT.context or 0) + 1), dtype=np.int32)
    return SupervisedBatch(size=size, input=tokens[:, :-1], target=tokens[:, 1:])


def trainer_for(
    case: Case, devices: list[Any], batch: SupervisedBatch, *, precision: str = "f32", model: GPTConfig = GPT
) -> LanguageModelTrainer:
    """A trainer of the model in this layout."""
    return LanguageModelTrainer(
        model_config=replace(model, vocab_size=case.vocabulary),
        optimizer_config=AdamWConfig(learning_rate=1e-3),
        exmp_input=batch,
        mesh=case.layout(devices),
        accumulate=case.accumulate,
        precision=precision,
    )


def needed(case: Case, params: PyTree, specs: dict[str, Any], precision: str = "f32") -> list[Need]:
    """The minimal communication: gradients reduced, sharded weights gathered twice, two all-reduces per block and pass.

    In the precision of the model, except for the loss.
    """
    data, fsdp, tensor = case.data, case.fsdp, case.tensor
    places = BATCH // (data * fsdp) * (GPT.context or 0)
    activations, blocks = places * GPT.width * BYTES[precision], GPT.layers
    weights = BYTES[precision] * weights_beside_tensor(params, specs, tensor)
    found = []
    if tensor > 1:
        # one for the embedding, two per block; for the loss the largest logit, the sum, and the logit of the target
        forward = (2 * blocks + 1) * ring_bytes("all-reduce", activations, tensor)
        loss = 3 * ring_bytes("all-reduce", places * LOSS_BYTES, tensor)
        found.append(Need("forward", "all-reduce", forward + loss, 2 * blocks + 1 + 3))
        found.append(Need("backward", "all-reduce", forward, 2 * blocks + 1))
    if fsdp > 1:
        gathered = ring_bytes("all-gather", weights, fsdp)
        found += [Need(phase, "all-gather", gathered) for phase in ("forward", "backward")]
        found.append(Need("backward", "reduce-scatter", ring_bytes("reduce-scatter", weights, fsdp)))
    if data > 1:
        found.append(Need("backward", "all-reduce", ring_bytes("all-reduce", weights / fsdp, data), 1))
    return found


def weights_beside_tensor(params: PyTree, specs: dict[str, Any], tensor: int) -> float:
    """The number of weights per device if only the axis "tensor" sharded them."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    sizes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.size for path, leaf in leaves}
    return sum(size / tensor if "tensor" in str(specs[path]) else size for path, size in sizes.items())
