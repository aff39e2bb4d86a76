"""Collectives, memory and time of a step on several devices, compared with the theoretical minimum.

    PYTHONPATH=src python benchmarks/scaling.py [--only data fsdp] [--list] [--gpus] [--rounds 5]

The trainer compiles a small GPT for eight CPU devices in several layouts. Collectives are read from the compiled HLO
(`hlo_collectives.py`), memory from XLA's memory analysis. Bytes sent are those of ring algorithms; the needed bytes are
computed from the sizes of the model (`scaling_cases.py`). With `--gpus`, which needs one GPU, the same is compiled, but
not run, for eight GPUs, in float32 and bfloat16. Weak scaling on two cores is a sanity check, not a measurement of
scaling: eight devices share the cores. The last table is computed by a cost model (`scaling_cost_model.py`). A report,
not a test: it always exits with 0.
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
from scaling_aot import BUFFER_ROWS, compile_aot, eight_gpus, state_bytes
from scaling_cases import BATCH, BYTES, CASES, GPT, Case, batch_of, needed, trainer_for
from scaling_cost_model import Job, report
from scaling_tables import BY_KIND, KEPT, SENT, Row, by_kind, compared, header, markdown

from jax_trainer.core import CompiledProgram, TrainState

echo = Console(highlight=False, markup=False, soft_wrap=True).print

WEAK_BATCH = 2  # texts for each device


class Found(NamedTuple):
    """The table rows of one layout."""

    sent: list[Row]
    kind: Row
    kept: Row


def examine(name: str, devices: list[Any], precision: str) -> tuple[Found, list[Collective]]:
    """Compiles a layout for these devices; returns its table rows and its collectives."""
    case = CASES[name]
    step = compile_aot(case, devices, precision)
    collectives = collectives_of(step.hlo)
    needs = needed(case, step.state.params, step.layout.param_specs(step.state.params), precision)
    sent = [(name if not number else "", *line) for number, line in enumerate(compared(needs, collectives))]
    here, total = state_bytes(step.state)
    ways = case.fsdp * case.tensor
    kept = (name, *map(_megabytes, (here, total / ways, step.temporary)), f"{here * ways / total:.3f}")
    return Found(sent, (name, precision, *by_kind(needs, collectives), _megabytes(step.temporary)), kept), collectives


def show_layouts(names: Sequence[str], devices: list[Any]) -> None:
    """Prints communication and memory of each layout."""
    found = _show_sent(names, devices, "f32")
    echo("", header(KEPT), markdown(one.kept for one in found), sep="\n", end="\n\n")


def show_gpus(names: Sequence[str], devices: list[Any]) -> None:
    """Prints communication in each precision, by phase and by kind."""
    found = []
    for precision in BYTES:
        echo(f"{precision}:")
        found += _show_sent(names, devices, precision)
        echo()
    echo(header(BY_KIND), markdown(one.kind for one in found), sep="\n")


def _show_sent(names: Sequence[str], devices: list[Any], precision: str) -> list[Found]:
    found = []
    echo(header(SENT))
    for name in names:
        try:
            found.append(examine(name, devices, precision)[0])
        except jax.errors.JaxRuntimeError as error:  # a layout that XLA cannot compile should not hide the others
            echo(f"| {name} | not compiled: {str(error)[:300]} |")
        else:
            echo(markdown(found[-1].sent))
    return found


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.2f} MB"


def show_each(name: str, found: Iterable[Collective]) -> None:
    """Prints every collective of a step."""
    echo(f"{name}:")
    for one in found:
        size = f"{one.payload:>10,} B among {one.group}, {len(one.sliced)} sliced"
        echo(f"  {one.times} × {one.kind:<18} {size}  {one.phase:<9} {one.source[:110]}")


# --- weak scaling


class WarmStep(NamedTuple):
    """A warmed-up step and its state."""

    program: CompiledProgram
    state: TrainState
    buffer: Any
    batch: Any


def warm_step(case: Case, size: int) -> WarmStep:
    """The compiled step of a trainer on the devices of this machine."""
    batch = batch_of(size, case.vocabulary)
    program = trainer_for(case, jax.devices(), batch).prepare([batch])
    state = program.init(jax.random.key(0), batch)
    placed = program.place(batch, stacked=False)
    buffer = program.train_buffer(state, placed, BUFFER_ROWS)
    state, buffer, _ = program.train_step(state, buffer, placed)
    return WarmStep(program, state, buffer, placed)


def show_weak_scaling(rounds: int, steps: int = 3) -> None:
    """Prints the time of a step with the same work per device."""
    made = {count: warm_step(Case(data=count), WEAK_BATCH * count) for count in (1, 2, 4, 8)}
    seconds: dict[int, list[float]] = {count: [] for count in made}
    for _, count in itertools.product(range(rounds), made):
        step = made[count]
        started = time.perf_counter()
        state, buffer = step.state, step.buffer
        for _ in range(steps):  # few: too many at once deadlock
            state, buffer, _ = step.program.train_step(state, buffer, step.batch)
        jax.block_until_ready(state)
        seconds[count].append((time.perf_counter() - started) / steps)
        made[count] = step._replace(state=state, buffer=buffer)
    one = statistics.median(seconds[1])
    rows = []
    for count, times in seconds.items():
        median = statistics.median(times)
        rate = WEAK_BATCH * count / median
        rows.append((f"{count}", f"{1000 * median:.1f}", f"{rate:.1f}", f"{count * one / median:.2f}"))
    columns = ("devices", "ms per step", "texts/s", "relative to one device, which uses both cores")
    echo(header(columns), markdown(rows), sep="\n", end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Collectives, memory and time of a step on several devices.")
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="only these layouts")
    parser.add_argument("--list", action="store_true", help="print every collective instead of the tables")
    parser.add_argument("--gpus", action="store_true", help="compile for eight GPUs like that of this machine")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of weak scaling")
    args = parser.parse_args()
    devices, names = eight_gpus() if args.gpus else jax.devices(), args.only or list(CASES)
    kind = jax.devices()[0].device_kind
    echo(f"{len(devices)} devices ({kind}), jax {jax.__version__}, batch {BATCH}, {GPT}", end="\n\n")
    if args.list:
        for precision, name in itertools.product(BYTES if args.gpus else ("f32",), names):
            show_each(f"{name}, {precision}", examine(name, devices, precision)[1])
        return
    (show_gpus if args.gpus else show_layouts)(names, devices)
    if args.only or args.gpus:
        return
    show_weak_scaling(args.rounds)
    report(Job())
    echo("\nWeights gathered once and kept, gradients reduced in bf16:")
    report(Job(gathers=1, gradient_bytes=2))


if __name__ == "__main__":
    main()
