"""What a step on several devices sends between them, keeps on each, and costs, against what it must.

    PYTHONPATH=src python benchmarks/scaling.py [--only data fsdp] [--list] [--rounds 5]

A small GPT is compiled by the trainer for eight CPU devices in several layouts. Collectives are read out of what XLA
compiled (`hlo_collectives.py`), bytes of the state from its arrays, memory from XLA's own account. What is sent is what
a device sends in a ring. What is needed comes from the sizes of the model alone, in `needed`. Weak scaling on two cores
is a check that nothing is badly wrong, not a measurement of scaling: eight devices take turns. The last table is
arithmetic (`scaling_on_paper.py`). A report, not a test: it exits with 0 whatever it finds.
"""

import argparse
import os

# before jax is imported: later it has no effect; several CPU devices deadlock with fewer threads than this
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("NPROC", "16")

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from hlo_collectives import Collective, collectives_of, ring_bytes
from jax.sharding import Mesh
from rich.console import Console
from scaling_on_paper import Job, report

from jax_trainer.core import CompiledProgram, PyTree, TrainState
from jax_trainer.core.mesh import make_mesh
from jax_trainer.datasets import SupervisedBatch
from jax_trainer.models import GPTConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.trainer import LanguageModelTrainer
from jax_trainer.trainer.layout import ShardingConfig, ShardingRuleConfig

say = Console(highlight=False, markup=False, soft_wrap=True).print

GPT = GPTConfig(vocab_size=512, context=128, layers=4, heads=8, width=256, bias=True)
BATCH = 16  # texts in a step, of all devices together
WEAK_BATCH = 2  # texts for each device
BYTES = 4  # float32
RULES = {  # the columns of what widens, the rows of what narrows, the tokens of the embedding
    r"tokens": (("tensor", "fsdp"),),
    r".*(into_heads|hidden)\.kernel": ("fsdp", "tensor"),
    r".*(into_heads|hidden)\.bias": ("tensor",),
    r".*out\.kernel": ("tensor", "fsdp"),
}


class Case(NamedTuple):
    """A way to use the devices."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulate: int = 1
    vocabulary: int = GPT.vocab_size

    @property
    def mesh(self) -> Mesh:
        """As many devices as it needs."""
        return make_mesh(data=self.data, fsdp=self.fsdp, tensor=self.tensor, devices=jax.devices()[: self.devices])

    @property
    def sharding(self) -> ShardingConfig:
        """How parameters are split: by rules where there is a tensor axis."""
        rules = RULES.items() if self.tensor > 1 else ()
        return ShardingConfig(rules=tuple(ShardingRuleConfig(match=match, axes=axes) for match, axes in rules))

    @property
    def devices(self) -> int:
        """How many it needs."""
        return self.data * self.fsdp * self.tensor


CASES = {
    "data": Case(data=8),
    "fsdp": Case(fsdp=8),
    "fsdp, 509 tokens": Case(fsdp=8, vocabulary=509),  # which no axis divides, like the 50257 of GPT-2
    "data 2 × fsdp 4": Case(data=2, fsdp=4),
    "tensor": Case(tensor=8),
    "data 2 × fsdp 2 × tensor 2": Case(data=2, fsdp=2, tensor=2),
    "data, in 2 parts": Case(data=8, accumulate=2),
    "fsdp, in 2 parts": Case(fsdp=8, accumulate=2),
}


class Need(NamedTuple):
    """What a layout cannot do without."""

    phase: str
    kind: str
    sent: float  # bytes a step and device
    number: int | None = None  # of collectives; None: as many as one likes


class Step(NamedTuple):
    """A compiled step, what it has been given, and what XLA says about it."""

    program: CompiledProgram
    state: TrainState
    tape: Any
    batch: Any
    hlo: str
    temporary: int  # bytes on each device


def batch_of(size: int, vocabulary: int) -> SupervisedBatch:
    """Random texts and what follows."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(vocabulary, size=(size, (GPT.context or 0) + 1), dtype=np.int32)
    return SupervisedBatch(size=size, input=tokens[:, :-1], target=tokens[:, 1:])


def compiled(case: Case, size: int) -> Step:
    """The step as the trainer compiles it, after it has run once."""
    batch = batch_of(size, case.vocabulary)
    trainer = LanguageModelTrainer(
        model_config=replace(GPT, vocab_size=case.vocabulary),
        optimizer_config=AdamWConfig(learning_rate=1e-3),
        exmp_input=batch,
        mesh=case.mesh,
        sharding=case.sharding,
        accumulate=case.accumulate,
    )
    program = trainer.prepare([batch])
    state = program.init(jax.random.key(0), batch)
    placed = program.place(batch, stacked=False)
    _, tape = program.train_tape(state, placed, 8)
    client = jax.devices()[0].client
    before = client.live_executables()
    state, tape, _ = program.train_step(state, tape, placed)
    made = [one for one in client.live_executables() if not any(one is old for old in before)]
    step = max(made, key=lambda one: len(one.hlo_modules()[0].to_string()))
    temporary = step.get_compiled_memory_stats().temp_size_in_bytes
    return Step(program, state, tape, placed, step.hlo_modules()[0].to_string(), temporary)


# --- what is needed


def needed(case: Case, params: PyTree, specs: dict[str, Any]) -> list[Need]:
    """By the textbook: gradients reduced, sharded weights gathered twice, two sums of activations a block and pass."""
    data, fsdp, tensor = case.data, case.fsdp, case.tensor
    places = BATCH // (data * fsdp) * (GPT.context or 0)
    activations, blocks = places * GPT.width * BYTES, GPT.layers
    weights = BYTES * weights_beside_tensor(params, specs, tensor)
    found = []
    if tensor > 1:
        # the embedding, two in a block; the largest logit, the sum over all, and that of the target
        forward = (2 * blocks + 1) * ring_bytes("all-reduce", activations, tensor)
        loss = 3 * ring_bytes("all-reduce", places * BYTES, tensor)
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
    """How many numbers a device would hold if only the axis "tensor" split them."""
    sizes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.size for path, leaf in _leaves(params)}
    return sum(size / tensor if "tensor" in str(specs[path]) else size for path, size in sizes.items())


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


# --- tables


def family(kind: str) -> str:
    """Reductions are compared with reductions, however they are written."""
    return {"all-reduce": "reduce", "reduce-scatter": "reduce", "all-gather": "gather"}.get(kind, "exchange")


def compared(needs: Iterable[Need], found: Iterable[Collective]) -> list[tuple[str, ...]]:
    """A line for every phase and family: needed, found, and their ratio."""
    lines = []
    needs, found = list(needs), list(found)
    for phase, group in itertools.product(("forward", "backward", "update"), ("gather", "reduce", "exchange")):
        asked = [need for need in needs if (need.phase, family(need.kind)) == (phase, group)]
        there = [one for one in found if (one.phase, family(one.kind)) == (phase, group)]
        if asked or there:
            lines.append((phase, _asked(asked), _counted(there), *_ratios(asked, there)))
    return [*lines, ("**all**", _megabytes(needs), _megabytes(found), *_ratios(needs, found))]


def _asked(needs: Sequence[Need]) -> str:
    kinds = [f"{need.number or ''} {need.kind}".strip() for need in needs]
    return f"{', '.join(kinds)}: {_megabytes(needs)}" if needs else "nothing"


def _counted(found: Sequence[Collective]) -> str:
    counts = {kind: sum(one.times for one in found if one.kind == kind) for kind in sorted({one.kind for one in found})}
    unsure = "" if all(one.is_certain for one in found) else " (in a loop of unknown length: one turn)"
    return (
        f"{', '.join(f'{n} {kind}' for kind, n in counts.items())}: {_megabytes(found)}{unsure}" if found else "nothing"
    )


def _megabytes(things: Iterable[Need | Collective]) -> str:
    return f"{sum(thing.sent for thing in things) / 1e6:.3f} MB"


def _ratios(needs: Sequence[Need], found: Sequence[Collective]) -> tuple[str, str]:
    asked = sum(need.sent for need in needs)
    if not asked:
        return "", ""
    written, scattered = sum(one.sent for one in found), sum(one.sent_if_scattered for one in found)
    return f"{written / asked:.2f}", f"{scattered / asked:.2f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as pages have it."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def state_bytes(state: TrainState) -> tuple[int, int]:
    """Of a state: on the first device, and in all."""
    leaves = jax.tree.leaves(state)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves), sum(leaf.nbytes for leaf in leaves)


def show_layouts(names: Sequence[str], *, is_listed: bool) -> None:
    """What is sent and what is kept, for each layout."""
    sent, kept = [], []
    for name in names:
        case = CASES[name]
        step = compiled(case, BATCH)
        layout = step.program.layout
        assert layout is not None
        found = collectives_of(step.hlo)
        lines = compared(needed(case, step.state.params, layout.param_specs(step.state.params)), found)
        sent += [(name if not number else "", *line) for number, line in enumerate(lines)]
        here, whole = state_bytes(step.state)
        ways = case.fsdp * case.tensor
        sizes = (here, whole / ways, step.temporary)
        kept.append((name, *(f"{size / 1e6:.2f} MB" for size in sizes), f"{here * ways / whole:.3f}"))
        if is_listed:
            show_each(name, found)
    if is_listed:
        return
    say(markdown(("layout", "phase", "needed", "found", "ratio", "ratio, scattered"), sent), end="\n\n")
    say(
        markdown(("layout", "state on a device", "state / devices that share it", "temporary", "ratio"), kept),
        end="\n\n",
    )


def show_each(name: str, found: Iterable[Collective]) -> None:
    """Every collective of a step."""
    say(f"{name}:")
    for one in found:
        size = f"{one.payload:>10,} B among {one.group}, {len(one.sliced)} sliced"
        say(f"  {one.times} × {one.kind:<18} {size}  {one.phase:<9} {one.source[:110]}")


# --- weak scaling


def show_weak_scaling(rounds: int, steps: int = 3) -> None:
    """The time of a step where every device has the same work, on however many cores there are."""
    made = {count: compiled(Case(data=count), WEAK_BATCH * count) for count in (1, 2, 4, 8)}
    seconds: dict[int, list[float]] = {count: [] for count in made}
    for _, count in itertools.product(range(rounds), made):
        step = made[count]
        began = time.perf_counter()
        state, tape = step.state, step.tape
        for _ in range(steps):  # few: too many at once deadlock
            state, tape, _ = step.program.train_step(state, tape, step.batch)
        jax.block_until_ready(state)
        seconds[count].append((time.perf_counter() - began) / steps)
        made[count] = step._replace(state=state, tape=tape)
    one = statistics.median(seconds[1])
    rows = []
    for count, times in seconds.items():
        typical = statistics.median(times)
        rate = WEAK_BATCH * count / typical
        rows.append((f"{count}", f"{1000 * typical:.1f}", f"{rate:.1f}", f"{count * one / typical:.2f}"))
    header = ("devices", "ms per step", "texts/s", "of the rate of one device, which uses both cores")
    say(markdown(header, rows), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step on several devices sends, keeps and costs.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="these layouts, and nothing else")
    parser.add_argument("--list", action="store_true", help="every collective, instead of the tables")
    parser.add_argument("--rounds", type=int, default=5, help="of weak scaling")
    given = parser.parse_args()
    say(
        f"{jax.device_count()} devices ({jax.devices()[0].device_kind}), jax {jax.__version__}, batch {BATCH}, {GPT}",
        end="\n\n",
    )
    show_layouts(given.only or list(CASES), is_listed=given.list)
    if given.only or given.list:
        return
    show_weak_scaling(given.rounds)
    report(Job())
    say("\nWeights gathered once and kept, gradients reduced in bf16:")
    report(Job(gathers=1, gradient_bytes=2))


if __name__ == "__main__":
    main()
