"""The cost of data loading: loaders alone, data wait in training, and resident data.

    PYTHONPATH=src python benchmarks/loaders.py [--rounds 5] [--epochs 2] [--synthetic] [--only PART] [--json PATH]

On MNIST from `data/` if present, otherwise (or with `--synthetic`) on random images of the same shape. Three parts:

* loaders: batches of 128, shuffled. All use our order: equal checksums of the first batches show that they yield the
  same data. Workers may have prefetched a few batches when a round starts.
* waiting: a small CNN trained by `run`. `waited` is reported by the engine: the share of the time in which the
  device was idle because no batch was ready. The ratio to resident data, which never waits, shows it too. One loader
  is deliberately too slow: the engine must report it in one line.
* resident: an MLP with the full set on the device and an epoch per call. Hand-written loops start from our parameters
  and see our order: equal `|params|` shows that the same was computed. Ours and the hand-written scans copy the data
  to the device in every call and fetch the means of every epoch; use more `--epochs` on a fast device.

Every variant runs once untimed. Then the variants alternate, round by round, so that other load on the machine affects
all of them; a ratio is the median over rounds of the ratio within a round. A report, not a test: it exits with 0.
"""

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.table import Table

import jax_trainer as jt
from jax_trainer.core import PyTree, copy_state
from jax_trainer.datasets import DataSource, DeviceTransforms
from jax_trainer.datasets.examples import MNISTConfig, MNISTDataset
from jax_trainer.datasets.transforms import normalize, with_transforms
from jax_trainer.engine import EpochEnd, Event, Notice

BATCH, CHUNK, PREFETCH = 128, 25, 4  # examples per batch, batches per chunk, prefetched batches
SLOW_RUN = 3.0  # seconds with the slow loader: long enough for the notice of the engine
TX = optax.adam(1e-3)
NORMALIZE = normalize(0.1307, 0.3081)
FLAT: Callable[[jax.Array], jax.Array] = lambda x: x.reshape(len(x), -1)
MLP = nn.Sequential([FLAT, nn.Dense(256), nn.relu, nn.Dense(10)])  # 1 ms per step on two cores
CNN = nn.Sequential([nn.Conv(8, (3, 3), 2), nn.relu, nn.Conv(16, (3, 3), 2), nn.relu, FLAT, nn.Dense(10)])  # 4 ms

Pair = tuple[np.ndarray, np.ndarray]  # images and labels
Times = dict[str, list[float]]  # µs of every round, by variant


# --- shared


def arrays(*, synthetic: bool) -> tuple[str, Pair]:
    """The data, and its name."""
    if not synthetic:
        with contextlib.suppress(FileNotFoundError):
            folder = Path(__file__).resolve().parents[1] / "data"
            train = MNISTDataset(MNISTConfig(data_dir=str(folder), val_size=0)).train
            return "MNIST", (train.input, train.target)
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(60_000, 28, 28, 1), dtype=np.uint8)
    return "random images of MNIST's shape", (images, rng.integers(10, size=len(images), dtype=np.int32))


def array_loader(data: Pair) -> jt.ArrayLoader:
    """The data in our loader."""
    return jt.ArrayLoader(data, BATCH, shuffle=True, drop_last=True)


def endless(epoch: Callable[[int], Iterable[Any]], first: int = 1) -> Iterator[Any]:
    """The batches of all epochs, one after the other."""
    return itertools.chain.from_iterable(map(epoch, itertools.count(first)))


def loss_and_accuracy(logits: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Cross entropy and accuracy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), (logits.argmax(-1) == y).mean()


def compiled(model: nn.Module, *, log_norms: bool = False) -> Any:
    """A compiled classifier of uint8 images, which are normalized on the device."""

    def loss_fn(params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool) -> Any:
        logits, mutable = state.apply(params, batch[0], train=train)
        loss, accuracy = loss_and_accuracy(logits, batch[1])
        return loss, (mutable, {"acc": accuracy})

    program = jt.linen_program(model, loss_fn, TX, to_input=lambda batch: batch[0], log_norms=log_norms)
    return jt.compile_program(with_transforms(program, DeviceTransforms((NORMALIZE,), (NORMALIZE,), field=0)))


def in_turns(variants: Sequence[Any], rounds: int) -> Iterator[Any]:
    """Every variant once per round, in alternating order, so that neighbours change."""
    for number in range(rounds):
        for variant in variants if number % 2 else variants[::-1]:
            gc.collect()  # this variant should not pay for the garbage of others
            yield variant


def ratio(times: Times, name: str, baseline: str) -> float:
    """The median ratio of the times of two variants."""
    return statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))


def row(times: Times, name: str, *baselines: str) -> tuple[str, ...]:
    """A variant's median, minimum, and ratios."""
    ratios = (f"{ratio(times, name, baseline):.2f}" for baseline in baselines)
    return name, f"{statistics.median(times[name]):.1f}", f"{min(times[name]):.1f}", *ratios


class Part(NamedTuple):
    """The results of a part of the report."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    limits: list[tuple[str, str, str, bool]]  # case, measured value, limit, whether it is within
    us_by_round: Times
    notes: list[str]


# --- loaders

NUMPY, ARRAY, TORCH = "numpy by hand", "ours, ArrayLoader", "torch DataLoader, no workers"


class Loading(NamedTuple):
    """A way to load batches: `draws` items of `source` per round."""

    name: str
    source: Iterator[Any]
    draws: int
    batches: float = 1  # per item, on average
    pairs: Callable[[Any], Iterable[Any]] = lambda drawn: [drawn]  # the batches of an item

    def micros(self) -> float:
        """µs per batch of one round."""
        started = time.perf_counter()
        for _ in itertools.islice(self.source, self.draws):
            pass
        return 1e6 * (time.perf_counter() - started) / (self.draws * self.batches)

    def checksum(self) -> str:
        """A checksum of the first batches."""
        found, drawn = 0, itertools.chain.from_iterable(map(self.pairs, self.source))
        for images, labels in itertools.islice(drawn, CHUNK):
            found = zlib.crc32(np.asarray(images).tobytes() + np.asarray(labels).astype(np.int32).tobytes(), found)
        return f"{found:08x}"


class Records:
    """The arrays as a map-style dataset of single examples."""

    def __init__(self, data: Pair) -> None:
        self._images, self._labels = data

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._images[index], self._labels[index]


def our_loadings(data: Pair) -> list[Loading]:
    """Numpy, and our loaders of arrays."""
    loader = array_loader(data)
    stacks, draws = math.ceil(len(loader) / CHUNK), 5 * len(loader)

    def numpy_epoch(number: int) -> Iterator[Pair]:
        order = loader.order(number)
        for first in range(0, len(loader) * BATCH, BATCH):
            rows = order[first : first + BATCH]
            yield data[0][rows], data[1][rows]

    def chunks(number: int) -> Iterator[Any]:
        epoch = DataSource(loader, "train").open(number)
        while (step_batch := epoch.take(CHUNK, CHUNK)) is not None:
            yield step_batch.batch

    stacked, pairs = f"ours, {CHUNK} batches stacked", lambda drawn: zip(*drawn, strict=True)
    rows, cut = endless(loader.row_numbers().epoch), lambda rows: [(data[0][rows], data[1][rows])]
    return [
        Loading(NUMPY, endless(numpy_epoch), draws),
        Loading(ARRAY, endless(loader.epoch), draws),
        Loading(stacked, endless(chunks), 5 * stacks, len(loader) / stacks, pairs),
        Loading("ours, rows of resident data", rows, draws, pairs=cut),
    ]


def torch_loadings(data: Pair) -> list[Loading]:
    """A map-style dataset with default collation. Its order is precomputed, which saves 1 %."""
    from torch.utils.data import DataLoader

    order, records = array_loader(data).order(1).tolist(), Records(data)
    loader = DataLoader(records, BATCH, sampler=order, drop_last=True)  # type: ignore[arg-type]
    return [Loading(TORCH, endless(lambda number: loader), len(loader))]


def grain_loadings(data: Pair) -> list[Loading]:
    """Records read one by one, by threads."""
    from jax_trainer.datasets.records import GrainLoader

    loaders = {n: GrainLoader(Records(data), BATCH, shuffle=True, drop_last=True, threads=n) for n in (1, 2)}
    return [Loading(f"ours, GrainLoader, {n} threads", endless(loaders[n].epoch), 150) for n in loaders]


def measure_loaders(data: Pair, options: argparse.Namespace) -> Part:
    """µs per batch of every installed loader."""
    variants, notes = our_loadings(data), []
    for name, make in {"torch": torch_loadings, "grain": grain_loadings}.items():
        try:
            variants += make(data)
        except ImportError:
            notes.append(f"{name} is not installed: skipped.")
    sums = {variant.name: variant.checksum() for variant in variants}
    times: Times = {name: [] for name in sums}
    for variant in in_turns(variants, options.rounds):
        times[variant.name].append(variant.micros())
    rows = [(*row(times, name, NUMPY), sums[name]) for name in times]
    found = ratio(times, ARRAY, NUMPY)
    limits = [("ArrayLoader ÷ numpy by hand", f"{found:.2f} ×", "at most 1.5 ×", found <= 1.5)]
    if TORCH in times:
        found = ratio(times, TORCH, ARRAY)
        limits += [("torch DataLoader ÷ ArrayLoader", f"{found:.1f} ×", "at least 8 ×", found >= 8)]
    columns = "loader", "µs per batch", "min", "÷ numpy", "checksum"
    return Part(f"Loaders: batches of {BATCH}, shuffled", columns, rows, limits, times, notes)


# --- waiting

NO_BATCHES, QUARTER = "resident, no batches", "sleeps ¼ step"


class EpochTimes:
    """Collects the time and data wait of epochs, and the notices after the first."""

    shows_notices = True

    def __init__(self) -> None:
        self.seconds = self.waited = self.steps = 0.0
        self.notices: list[str] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self.seconds, self.waited, self.steps = self.seconds + event.seconds, self.waited + event.waited, event.step
        elif isinstance(event, Notice) and self.steps:
            self.notices.append(event.text)


def slow_loader(loader: jt.ArrayLoader, micros: float) -> jt.Data:
    """An endless generator that sleeps before each batch."""

    def batches(epoch: int) -> Iterator[Any]:
        for batch in endless(loader.epoch, epoch):
            time.sleep(micros / 1e6)
            yield batch

    return jt.Data(batches, prefetch=PREFETCH)


def measure_waiting(data: Pair, options: argparse.Namespace) -> Part:
    """µs per step, and the share of it spent waiting for data."""
    program, loader = compiled(CNN), array_loader(data)
    initial = program.init(jax.random.key(0), next(loader.epoch(1)))

    def train(data: jt.Data, steps: int, epochs: int = 1) -> tuple[float, float, list[str]]:
        epoch_times, state = EpochTimes(), jax.block_until_ready(copy_state(initial))
        jt.run(program, state, data, jt.Plan(max_epochs=epochs, steps_per_epoch=steps), [epoch_times])
        return (
            1e6 * epoch_times.seconds / epoch_times.steps,
            epoch_times.waited / epoch_times.seconds,
            epoch_times.notices,
        )

    variants = {NO_BATCHES: jt.Data(loader, resident=True), ARRAY: jt.Data(loader, prefetch=PREFETCH)}
    for warm in variants.values():
        train(warm, 10)
    variants[QUARTER] = slow_loader(loader, train(variants[ARRAY], len(loader))[0] / 4)
    found: dict[str, list[Any]] = {name: [] for name in variants}
    for name in in_turns(list(variants), options.rounds):
        found[name].append(train(variants[name], len(loader), options.epochs))
    times: Times = {name: [micros for micros, _, _ in runs] for name, runs in found.items()}
    shares = {name: statistics.median(share for _, share, _ in runs) for name, runs in found.items()}
    rows = [(*row(times, name, NO_BATCHES), f"{shares[name]:.1%}") for name in variants]

    step = statistics.median(times[ARRAY])
    micros, share, notices = train(slow_loader(loader, 2 * step), math.ceil(1e6 * SLOW_RUN / (2 * step)))
    times["sleeps 2 steps"] = [micros]
    rows.append((*row(times, "sleeps 2 steps"), "", f"{share:.1%}"))
    limits = [(f"waited, {ARRAY}", f"{shares[ARRAY]:.1%}", "at most 3.0%", shares[ARRAY] <= 0.03)]
    limits.append(("notices about the slow loader", f"{len(notices)} line(s)", "1 line", len(notices) == 1))
    notes = [f"Notice about the loader that sleeps 2 steps: {' '.join(notices) or 'NONE, expected one.'}"]
    columns = "loader", "µs per step", "min", "÷ resident", "waited"
    return Part(f"Waiting: CNN, {PREFETCH} batches prefetched", columns, rows, limits, times, notes)


# --- resident data

INSIDE, FIRST, LOOP = "by hand, scan, gather inside", "by hand, scan, gather first", "by hand, one step per call"
RESIDENT = "ours, resident, K=epoch"


def hand_step(state: PyTree, batch: Any) -> tuple[PyTree, Any]:
    """One step of the MLP that reports loss and accuracy."""

    def loss_fn(params: PyTree) -> tuple[jax.Array, jax.Array]:
        return loss_and_accuracy(MLP.apply({"params": params}, NORMALIZE(jax.random.key(0), batch[0])), batch[1])

    params, opt_state = state
    reported, grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), reported


def scan_epoch(state: PyTree, data: PyTree, rows: jax.Array, *, gather_first: bool) -> tuple[PyTree, PyTree]:
    """One dispatch per epoch. Each step gathers its batch, or all batches are gathered before the first step."""
    pick = lambda rows: jax.tree.map(lambda leaf: leaf[rows], data)
    step = hand_step if gather_first else lambda state, rows: hand_step(state, pick(rows))
    state, reported = jax.lax.scan(step, state, pick(rows) if gather_first else rows)
    return state, jax.tree.map(jnp.mean, reported)


def loop_epoch(step: Any, state: PyTree, data: Pair, rows: np.ndarray) -> tuple[PyTree, PyTree]:
    """One dispatch per step; no metrics are fetched."""
    for batch in rows:
        state, _ = step(state, (data[0][batch], data[1][batch]))
    return state, ()


def by_hand(data: Pair, epochs: int, epoch: Any, *, stored: bool) -> Callable[[PyTree], PyTree]:
    """Runs `epoch` for every epoch, with the data on the device or on the host."""
    loader = array_loader(data)

    def run(state: PyTree) -> PyTree:
        source = jax.device_put(data) if stored else data
        for number in range(1, epochs + 1):
            rows = loader.order(number)[: len(loader) * BATCH].reshape(-1, BATCH).astype(np.int32)
            state, means = epoch(state, source, rows)
            jax.device_get(means)
        return state[0]

    return run


def trainings(data: Pair, epochs: int) -> dict[str, tuple[PyTree, Callable[[Any], PyTree]]]:
    """Ways to train, by name: the initial state, and a function from it to trained parameters."""
    loader, bare, full = array_loader(data), compiled(MLP), compiled(MLP, log_norms=True)
    initial = bare.init(jax.random.key(0), next(loader.epoch(1)))
    start = initial.params, TX.init(initial.params)
    jit = partial(jax.jit, donate_argnums=0)
    inside, first = (jit(partial(scan_epoch, gather_first=first)) for first in (False, True))

    def ours(steps_per_call: Any, *, resident: bool, program: Any = bare) -> Any:
        source, plan = jt.Data(loader, resident=resident), jt.Plan(max_epochs=epochs, steps_per_call=steps_per_call)
        return initial, lambda state: jt.run(program, state, source, plan).params

    return {
        INSIDE: (start, by_hand(data, epochs, inside, stored=True)),
        FIRST: (start, by_hand(data, epochs, first, stored=True)),
        LOOP: (start, by_hand(data, epochs, partial(loop_epoch, jit(hand_step)), stored=False)),
        RESIDENT: ours("epoch", resident=True),
        f"{RESIDENT}, norms": ours("epoch", resident=True, program=full),
        "ours, streaming, K=1": ours(1, resident=False),
        "ours, streaming, K=epoch": ours("epoch", resident=False),
    }


def timed(start: PyTree, run: Callable[[Any], PyTree]) -> tuple[float, PyTree]:
    """The seconds that `run` takes, and the parameters that it returns."""
    state = jax.block_until_ready(copy_state(start))
    started = time.perf_counter()
    params = jax.block_until_ready(run(state))
    return time.perf_counter() - started, params


def measure_resident(data: Pair, options: argparse.Namespace) -> Part:
    """µs per step with the data on the device, and without."""
    steps, variants = options.epochs * len(array_loader(data)), trainings(data, options.epochs)
    norms = {name: float(optax.tree.norm(timed(*variant)[1])) for name, variant in variants.items()}
    times: Times = {name: [] for name in variants}
    for name in in_turns(list(variants), options.rounds):
        times[name].append(1e6 * timed(*variants[name])[0] / steps)
    faster = min((INSIDE, FIRST), key=lambda name: statistics.median(times[name]))
    rows = [(*row(times, name, faster, LOOP), f"{norms[name]:.4f}") for name in times]
    found, case = ratio(times, RESIDENT, faster), f"{RESIDENT} ÷ {faster}"
    limits = [(case, f"{found:.3f} ×", "at most 1.1 ×", found <= 1.1)]
    columns = "variant", "µs per step", "min", "÷ faster scan", "÷ one step", "|params|"
    return Part("Resident: MLP 784-256-10 with Adam", columns, rows, limits, times, [])


# --- reporting


def show(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if table.columns else "left")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


PARTS = {"loaders": measure_loaders, "waiting": measure_waiting, "resident": measure_resident}


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description="Measures the cost of data loading.")
    parser.add_argument("--rounds", type=int, default=5, help="measurements per variant")
    parser.add_argument("--epochs", type=int, default=2, help="training epochs per round")
    parser.add_argument("--synthetic", action="store_true", help="random images instead of MNIST")
    parser.add_argument("--only", choices=PARTS, help="only this part")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    console = Console(width=None if Console().is_terminal else 120)

    title, data = arrays(synthetic=options.synthetic)
    where = {"data": title, "cpus": os.cpu_count(), "device": jax.devices()[0].device_kind}
    where |= {"python": platform.python_version(), "rounds": options.rounds, "epochs": options.epochs}
    where |= {module.__name__: module.__version__ for module in (jax, flax, optax, np)}
    console.print(", ".join(f"{key} {value}" for key, value in where.items()), highlight=False)
    parts: dict[str, Part] = {}
    for name in [options.only] if options.only else PARTS:
        part = parts[name] = PARTS[name](data, options)
        show(console, part.title, part.columns, part.rows)
        console.print(*part.notes, sep="\n", highlight=False)
    verdicts = [(*limit[:3], "within" if limit[3] else "OVER") for part in parts.values() for limit in part.limits]
    show(console, "Limits", ("case", "measured", "limit", "verdict"), verdicts)
    if options.json:
        found = {name: part._asdict() for name, part in parts.items()}
        options.json.write_text(json.dumps({"machine": where, **found}, indent=1))


if __name__ == "__main__":
    main()
