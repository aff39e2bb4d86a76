"""What a step on several devices sends between them, keeps on each, and costs, against what it must.

    PYTHONPATH=src python benchmarks/scaling.py [--only data fsdp] [--list] [--gpus] [--rounds 5]

A small GPT is compiled by the trainer for eight CPU devices in several layouts. Collectives are read out of what XLA
compiled (`hlo_collectives.py`), memory from XLA's own account. What is sent is what a device sends in a ring. What is
needed comes from the sizes of the model alone (`scaling_cases.py`). With `--gpus`, which needs one GPU, the same is
compiled for eight of them, in float32 and bfloat16; none of it is run. Weak scaling on two cores is a check that
nothing is badly wrong, not a measurement of scaling: eight devices take turns. The last table is arithmetic
(`scaling_on_paper.py`). A report, not a test: it exits with 0 whatever it finds.
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
from typing import Any, NamedTuple

import jax
from hlo_collectives import Collective, collectives_of
from rich.console import Console
from scaling_ahead import BUFFER_ROWS, compiled_ahead, eight_gpus, state_bytes
from scaling_cases import BATCH, BYTES, CASES, GPT, Case, batch_of, needed, trainer_for
from scaling_on_paper import Job, report
from scaling_tables import BY_KIND, KEPT, SENT, Row, by_kind, compared, header, markdown

from jax_trainer.core import CompiledProgram, TrainState

say = Console(highlight=False, markup=False, soft_wrap=True).print

WEAK_BATCH = 2  # texts for each device


class Found(NamedTuple):
    """The report on one layout."""

    sent: list[Row]
    kind: Row
    kept: Row


def examined(name: str, devices: list[Any], precision: str) -> tuple[Found, list[Collective]]:
    """A layout, compiled for these devices: lines of the tables, and its collectives."""
    case = CASES[name]
    step = compiled_ahead(case, devices, precision)
    collectives = collectives_of(step.hlo)
    needs = needed(case, step.state.params, step.layout.param_specs(step.state.params), precision)
    sent = [(name if not number else "", *line) for number, line in enumerate(compared(needs, collectives))]
    here, total = state_bytes(step.state)
    ways = case.fsdp * case.tensor
    kept = (name, *map(_megabytes, (here, total / ways, step.temporary)), f"{here * ways / total:.3f}")
    return Found(sent, (name, precision, *by_kind(needs, collectives), _megabytes(step.temporary)), kept), collectives


def show_layouts(names: Sequence[str], devices: list[Any]) -> None:
    """What is sent and what is kept, for each layout."""
    found = _shown(names, devices, "f32")
    say("", header(KEPT), markdown(one.kept for one in found), sep="\n", end="\n\n")


def show_gpus(names: Sequence[str], devices: list[Any]) -> None:
    """What is sent in each precision, by phase and by kind."""
    found = []
    for precision in BYTES:
        say(f"{precision}:")
        found += _shown(names, devices, precision)
        say()
    say(header(BY_KIND), markdown(one.kind for one in found), sep="\n")


def _shown(names: Sequence[str], devices: list[Any], precision: str) -> list[Found]:
    found = []
    say(header(SENT))
    for name in names:
        try:
            found.append(examined(name, devices, precision)[0])
        except jax.errors.JaxRuntimeError as error:  # one layout that XLA does not compile should not hide the others
            say(f"| {name} | not compiled: {str(error)[:300]} |")
        else:
            say(markdown(found[-1].sent))
    return found


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


def show_each(name: str, found: Iterable[Collective]) -> None:
    """Every collective of a step."""
    say(f"{name}:")
    for one in found:
        size = f"{one.payload:>10,} B among {one.group}, {len(one.sliced)} sliced"
        say(f"  {one.times} × {one.kind:<18} {size}  {one.phase:<9} {one.source[:110]}")


# --- weak scaling


class Running(NamedTuple):
    """A warmed-up step and its state."""

    program: CompiledProgram
    state: TrainState
    buffer: Any
    batch: Any


def running(case: Case, size: int) -> Running:
    """The step of a trainer on this machine's devices."""
    batch = batch_of(size, case.vocabulary)
    program = trainer_for(case, jax.devices(), batch).prepare([batch])
    state = program.init(jax.random.key(0), batch)
    placed = program.place(batch, stacked=False)
    buffer = program.train_buffer(state, placed, BUFFER_ROWS)
    state, buffer, _ = program.train_step(state, buffer, placed)
    return Running(program, state, buffer, placed)


def show_weak_scaling(rounds: int, steps: int = 3) -> None:
    """The time of a step where every device has the same work, on however many cores there are."""
    made = {count: running(Case(data=count), WEAK_BATCH * count) for count in (1, 2, 4, 8)}
    seconds: dict[int, list[float]] = {count: [] for count in made}
    for _, count in itertools.product(range(rounds), made):
        step = made[count]
        began = time.perf_counter()
        state, buffer = step.state, step.buffer
        for _ in range(steps):  # few: too many at once deadlock
            state, buffer, _ = step.program.train_step(state, buffer, step.batch)
        jax.block_until_ready(state)
        seconds[count].append((time.perf_counter() - began) / steps)
        made[count] = step._replace(state=state, buffer=buffer)
    one = statistics.median(seconds[1])
    rows = []
    for count, times in seconds.items():
        typical = statistics.median(times)
        rate = WEAK_BATCH * count / typical
        rows.append((f"{count}", f"{1000 * typical:.1f}", f"{rate:.1f}", f"{count * one / typical:.2f}"))
    columns = ("devices", "ms per step", "texts/s", "of the rate of one device, which uses both cores")
    say(header(columns), markdown(rows), sep="\n", end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step on several devices sends, keeps and costs.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="these layouts, and nothing else")
    parser.add_argument("--list", action="store_true", help="every collective, instead of the tables")
    parser.add_argument("--gpus", action="store_true", help="compile for eight GPUs like the one that is here")
    parser.add_argument("--rounds", type=int, default=5, help="of weak scaling")
    given = parser.parse_args()
    devices, names = eight_gpus() if given.gpus else jax.devices(), given.only or list(CASES)
    kind = jax.devices()[0].device_kind
    say(f"{len(devices)} devices ({kind}), jax {jax.__version__}, batch {BATCH}, {GPT}", end="\n\n")
    if given.list:
        for precision, name in itertools.product(BYTES if given.gpus else ("f32",), names):
            show_each(f"{name}, {precision}", examined(name, devices, precision)[1])
        return
    (show_gpus if given.gpus else show_layouts)(names, devices)
    if given.only or given.gpus:
        return
    show_weak_scaling(given.rounds)
    report(Job())
    say("\nWeights gathered once and kept, gradients reduced in bf16:")
    report(Job(gathers=1, gradient_bytes=2))


if __name__ == "__main__":
    main()
