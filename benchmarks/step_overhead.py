"""The cost of a training step in our engine, comparison_rows with hand-written loops and other libraries.

    PYTHONPATH=src python benchmarks/step_overhead.py [--rounds 15] [--peers] [--json PATH]

All loops train the same classifier with Adam on the same numpy arrays, shuffled in every epoch. Each variant is
compiled and run once before the timing starts. Then the variants alternate, round by round, so that other load on the
machine affects all of them; a ratio is the median over rounds of the ratio within a round. Hand-written loops start
from our initial parameters and use our order of examples: equal `|params|`, the norm of the parameters after a round,
shows that they compute the same. A report, not a test: it always exits with 0.

All libraries use their default thread settings. With `--peers` the machine must be idle: torch's OpenMP threads spin
while they wait for each other, so torch gets 30 times slower if another process needs a core (GOMP_SPINCOUNT=1000 in
the environment helps; on an idle machine it costs torch 15 %).
"""

import argparse
import gc
import itertools
import json
import logging
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from mlp import LinenMlp, NnxMlp
from rich.console import Console

import jax_trainer as jt
from jax_trainer.core import PyTree, copy_state

CHUNK = 25  # steps per dispatch of the chunked variants
MICRO = 4  # micro-batches of gradient accumulation
DECAY = 0.999  # of the EMA
TX = optax.adam(1e-3)
SCREEN = Console(file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115 - a terminal without output

HandState = tuple[PyTree, ...]  # parameters, optimizer state, and more
HandStep = Callable[[HandState, jax.Array, jax.Array], tuple[HandState, PyTree]]
GradFn = Callable[[PyTree, jax.Array, jax.Array], Any]  # `(loss, accuracy), gradients`


@dataclass(frozen=True)
class Task:
    """A classifier of some size, its data, and how long a round is."""

    name: str
    sizes: tuple[int, ...]  # layer sizes, from the input to the classes
    batch_size: int
    batches: int  # per epoch; a multiple of CHUNK, so that the hand-written scan has no partial chunk
    epochs: int  # per round
    x: np.ndarray
    y: np.ndarray

    @classmethod
    def random(cls, name: str, sizes: tuple[int, ...], *, batch_size: int, batches: int, epochs: int) -> "Task":
        """A task on random data."""
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch_size * batches, sizes[0]), np.float32)
        return cls(name, sizes, batch_size, batches, epochs, x, rng.integers(sizes[-1], size=len(x), dtype=np.int32))

    @property
    def steps(self) -> int:
        """Steps in a round."""
        return self.batches * self.epochs

    @property
    def loader(self) -> jt.ArrayLoader:
        """The data in our loader."""
        return jt.ArrayLoader((self.x, self.y), self.batch_size, shuffle=True, drop_last=True)

    def rows(self, batches: int = 1) -> Iterator[np.ndarray]:
        """The indices of the next `batches` batches, over all epochs of a round."""
        loader, stride = self.loader, self.batch_size * batches
        for epoch in range(1, self.epochs + 1):
            order = loader.order(epoch)
            for first in range(0, len(order), stride):
                yield order[first : first + stride]


@dataclass(frozen=True)
class Variant:
    """A way to train: `run`, which is timed, takes the result of `start` and returns the parameters."""

    name: str
    start: Callable[[], Any]
    run: Callable[[Any], PyTree]


def loss_and_accuracy(logits: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    """Cross entropy and accuracy."""
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


# --- our engine


def linen_task_program(task: Task, **options: Any) -> jt.Program:
    """The program of the task in linen."""

    def loss_fn(params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool) -> Any:
        logits, mutable = state.apply(params, batch[0], train=train)
        loss, accuracy = loss_and_accuracy(logits, batch[1])
        return loss, (mutable, {"acc": accuracy})

    return jt.linen_program(LinenMlp(task.sizes), loss_fn, TX, to_input=lambda batch: batch[0], **options)


def nnx_task_program(task: Task) -> jt.Program:
    """The program of the task in nnx."""

    def loss_fn(model: NnxMlp, batch: Any, train: bool) -> Any:
        loss, accuracy = loss_and_accuracy(model(batch[0]), batch[1])
        return loss, {"acc": accuracy}

    return jt.nnx_program(lambda rngs: NnxMlp(task.sizes, rngs), loss_fn, TX)


def ours(name: str, task: Task, program: jt.Program, folder: Path, *, steps_per_call: int = 1) -> Variant:
    """A complete run of our engine, with step metrics written every 50 steps and a progress bar."""
    compiled, loader = jt.compile_program(program), task.loader
    initial = compiled.init(jax.random.key(0), next(loader.epoch(1)))
    plan = jt.Plan(max_steps=task.steps, steps_per_call=steps_per_call)

    def run(state: Any) -> PyTree:
        log = jt.LogMetrics(jt.JsonlWriter(folder / f"{task.name}, {name}.jsonl"), every_n_steps=50)
        return jt.run(compiled, state, jt.Data(loader), plan, [log, jt.ProgressBar(console=SCREEN)]).params

    return Variant(name, lambda: copy_state(initial), run)


# --- hand-written loops, on the linen model; they fetch no metrics, except one


def hand_gradients(task: Task) -> GradFn:
    """Gradients of the full batch."""
    model = LinenMlp(task.sizes)
    return jax.value_and_grad(
        lambda params, x, y: loss_and_accuracy(model.apply({"params": params}, x), y), has_aux=True
    )


def accumulated_gradients(task: Task) -> GradFn:
    """Gradients accumulated over micro-batches."""
    gradients = hand_gradients(task)

    def accumulated(params: PyTree, x: jax.Array, y: jax.Array) -> Any:
        def add(total: PyTree, part: Any) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, gradients(params, *part)), None

        parts = x.reshape(MICRO, -1, x.shape[-1]), y.reshape(MICRO, -1)
        zeros = (jnp.zeros(()), jnp.zeros(())), jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda total: total / MICRO, lax.scan(add, zeros, parts)[0])

    return accumulated


def hand_step(gradients: GradFn) -> HandStep:
    """One step that reports the same as ours: loss, accuracy, and the norms of gradients and parameters."""

    def step(state: HandState, x: jax.Array, y: jax.Array) -> tuple[HandState, PyTree]:
        params, opt_state = state
        (loss, accuracy), grads = gradients(params, x, y)
        updates, opt_state = TX.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), (loss, accuracy, optax.tree.norm(grads), optax.tree.norm(params))

    return step


def with_hand_ema(plain: HandStep) -> HandStep:
    """A step with an EMA of the parameters, with the same warm-up as `with_ema`."""

    def step(state: HandState, x: jax.Array, y: jax.Array) -> tuple[HandState, PyTree]:
        (params, opt_state), metrics = plain(state[:2], x, y)
        count = optax.tree_utils.tree_get(opt_state, "count").astype(jnp.float32)
        keep = jnp.minimum(DECAY, (1 + count) / (10 + count))
        average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, state[2], params)
        return (params, opt_state, average), metrics

    return step


def with_hand_guard(plain: HandStep) -> HandStep:
    """A step that skips and counts non-finite updates, by the loss and the gradient norm."""

    def step(state: HandState, x: jax.Array, y: jax.Array) -> tuple[HandState, PyTree]:
        old, skipped = state[:2], state[2]
        new, metrics = plain(old, x, y)
        finite = jnp.isfinite(metrics[0]) & jnp.isfinite(metrics[2])
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return (*kept, jnp.where(finite, skipped, skipped + 1)), metrics

    return step


def hand_start(task: Task, extra: Callable[[PyTree], HandState] = lambda params: ()) -> Callable[[], HandState]:
    """Creates the initial state, with the initial parameters of our engine."""
    params = jt.compile_program(linen_task_program(task)).init(jax.random.key(0), next(task.loader.epoch(1))).params
    initial = params, TX.init(params), *extra(params)
    return lambda: jax.tree.map(jnp.copy, initial)


def hand_loop(name: str, task: Task, step: HandStep, start: Callable[[], HandState]) -> Variant:
    """One dispatch per step."""
    compiled = jax.jit(step, donate_argnums=0)

    def run(state: HandState) -> PyTree:
        for rows in task.rows():
            state, _ = compiled(state, task.x[rows], task.y[rows])
        return state[0]

    return Variant(name, start, run)


def hand_scan(name: str, task: Task, step: HandStep, start: Callable[[], HandState], *, reads: bool = False) -> Variant:
    """One dispatch per chunk of steps; with `reads`, the metrics of every epoch are read at its end, as ours are."""
    shape = CHUNK, task.batch_size
    compiled = jax.jit(lambda state, *xy: lax.scan(lambda s, b: step(s, *b), state, xy), donate_argnums=0)

    def run(state: HandState) -> PyTree:
        reported: list[PyTree] = []
        for rows in task.rows(CHUNK):
            # one gather for all batches of the chunk is cheaper than stacking them
            state, metrics = compiled(state, task.x[rows].reshape(*shape, -1), task.y[rows].reshape(shape))
            if reads:
                reported.append(metrics)
                if len(reported) * CHUNK == task.batches:
                    jax.device_get(reported)
                    reported.clear()
        return state[0]

    return Variant(name, start, run)


# --- alternatives; except for nnx.jit they report loss and accuracy, but no norms


def nnx_jit(name: str, task: Task) -> Variant:
    """The loop of the Flax documentation."""

    @nnx.jit
    def step(model: NnxMlp, optimizer: nnx.Optimizer, x: Any, y: Any) -> PyTree:
        reported, grads = nnx.value_and_grad(lambda model: loss_and_accuracy(model(x), y), has_aux=True)(model)
        optimizer.update(model, grads)
        return reported, optax.tree.norm(grads), optax.tree.norm(nnx.state(model, nnx.Param))

    def start() -> tuple[NnxMlp, nnx.Optimizer]:
        model = NnxMlp(task.sizes, nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def run(made: tuple[NnxMlp, nnx.Optimizer]) -> PyTree:
        for rows in task.rows():
            step(*made, task.x[rows], task.y[rows])
        return nnx.to_pure_dict(nnx.state(made[0], nnx.Param))

    return Variant(name, start, run)


def keras_fit(name: str, task: Task, *, steps_per_execution: int = 1) -> Variant:
    """Keras 3 on JAX. Every round continues from the weights of the previous one; the cost is the same."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    layers = [keras.layers.Dense(size, activation="relu") for size in task.sizes[1:-1]]
    model = keras.Sequential([keras.Input(task.sizes[:1]), *layers, keras.layers.Dense(task.sizes[-1])])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    adam = keras.optimizers.Adam(1e-3)
    model.compile(adam, loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    options: dict[str, Any] = {"batch_size": task.batch_size, "epochs": task.epochs, "shuffle": True, "verbose": 0}

    def run(nothing: None) -> PyTree:
        model.fit(task.x, task.y, **options)
        return [variable.value for variable in model.trainable_variables]

    return Variant(name, lambda: None, run)


def torch_classifier(task: Task) -> Any:
    """The model in torch; called with inputs and labels, it returns cross entropy and accuracy."""
    import torch

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            linear = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(task.sizes)]
            hidden = itertools.chain.from_iterable((layer, torch.nn.ReLU()) for layer in linear[:-1])
            self.layers = torch.nn.Sequential(*hidden, linear[-1])

        def forward(self, x: Any, y: Any) -> tuple[Any, Any]:
            logits = self.layers(x)
            return torch.nn.functional.cross_entropy(logits, y), (logits.argmax(-1) == y).float().mean()

    return Classifier()


def torch_loop(name: str, task: Task) -> Variant:
    """A plain torch loop without a DataLoader."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = torch.from_numpy(task.x), torch.from_numpy(task.y).long()

    def run(model: Any) -> PyTree:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        for rows in map(torch.from_numpy, task.rows()):
            loss, _ = model(x[rows].to(device), y[rows].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [parameter.detach().cpu().numpy() for parameter in model.parameters()]  # waits for the device

    return Variant(name, lambda: torch_classifier(task).to(device), run)


def lightning_fit(name: str, task: Task) -> Variant:
    """Lightning without logger, checkpoints and progress bar."""
    import lightning
    import torch

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # it logs a banner in every round
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(task.x), torch.from_numpy(task.y).long())
    loader = torch.utils.data.DataLoader(dataset, task.batch_size, shuffle=True, drop_last=True)
    switches = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    off: dict[str, Any] = dict.fromkeys(switches, False)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch_classifier(task)

        def training_step(self, batch: Any, index: int) -> Any:
            loss, accuracy = self.model(*batch)
            return {"loss": loss, "acc": accuracy}

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    def run(made: tuple[Any, Any]) -> PyTree:
        trainer, module = made
        trainer.fit(module, loader)
        return [parameter.detach().cpu().numpy() for parameter in module.parameters()]

    return Variant(name, lambda: (lightning.Trainer(max_epochs=task.epochs, devices=1, **off), Module()), run)


# --- comparisons

HAND, HAND_SCAN = "by hand", f"by hand, scan of {CHUNK}"
HAND_READS = f"{HAND_SCAN}, read"
LINEN, NNX, BARE = "ours, linen", "ours, nnx", "ours, linen, no norms"
K = f", K={CHUNK}"  # several steps per dispatch
KERAS, KERAS_CHUNK = "Keras fit", f"Keras fit, {CHUNK} per execution"
PEERS: dict[str, Callable[[str, Task], Variant]] = {
    "nnx.jit by hand": nnx_jit,
    KERAS: keras_fit,
    KERAS_CHUNK: partial(keras_fit, steps_per_execution=CHUNK),
    "torch by hand": torch_loop,
    "Lightning fit": lightning_fit,
}
# limits of the time of one variant relative to another, by case; 0.5 is a speed-up of 2
LIMITS: dict[tuple[str, str], dict[str, float]] = {
    (LINEN, HAND): {"tiny": 1.25, "medium": 1.03},
    (NNX, HAND): {"tiny": 1.30},
    **{(mine + K, HAND_SCAN): {"tiny": 1.25, "short": 1.6} for mine in (LINEN, NNX)},
    **{(mine + K, HAND_READS): {} for mine in (LINEN, NNX)},
    **{(mine + K, HAND): {"tiny": 0.50} for mine in (LINEN, NNX)},
    **{(f"{LINEN}, {extra}", f"{HAND}, {extra}"): {} for extra in ("accumulation", "ema", "finite guard")},
    **{(m, p): {"tiny": 1.0, "medium": 1.0} for m in (LINEN, NNX, BARE) for p in PEERS if p != KERAS_CHUNK},
    **{(mine + K, KERAS_CHUNK): {"tiny": 1.0, "medium": 1.0} for mine in (LINEN, NNX, BARE)},
}


def common_variants(task: Task, folder: Path) -> list[Variant]:
    """One and several steps per dispatch, by hand and ours."""
    step, start = hand_step(hand_gradients(task)), hand_start(task)
    return [
        hand_loop(HAND, task, step, start),
        ours(LINEN, task, linen_task_program(task), folder),
        ours(NNX, task, nnx_task_program(task), folder),
        hand_scan(HAND_SCAN, task, step, start),
        hand_scan(HAND_READS, task, step, start, reads=True),
        ours(LINEN + K, task, linen_task_program(task), folder, steps_per_call=CHUNK),
        ours(NNX + K, task, nnx_task_program(task), folder, steps_per_call=CHUNK),
    ]


def extra_variants(task: Task, folder: Path) -> list[Variant]:
    """Accumulation, EMA and finite guard, by hand and ours."""
    plain, program = hand_step(hand_gradients(task)), linen_task_program(task)
    averaged = with_hand_ema(plain), hand_start(task, lambda params: (params,))
    checked = with_hand_guard(plain), hand_start(task, lambda params: (jnp.zeros((), jnp.int32),))
    return [
        hand_loop(f"{HAND}, accumulation", task, hand_step(accumulated_gradients(task)), hand_start(task)),
        ours(f"{LINEN}, accumulation", task, linen_task_program(task, micro_batches=MICRO), folder),
        hand_loop(f"{HAND}, ema", task, *averaged),
        ours(f"{LINEN}, ema", task, jt.with_ema(program, DECAY), folder),
        hand_loop(f"{HAND}, finite guard", task, *checked),
        ours(f"{LINEN}, finite guard", task, jt.with_finite_guard(program), folder),
    ]


def peer_variants(task: Task, folder: Path) -> list[Variant]:
    """Other libraries, if installed, and ours without norms, which they do not compute."""
    bare = linen_task_program(task, log_norms=False)
    found = [ours(BARE, task, bare, folder), ours(BARE + K, task, bare, folder, steps_per_call=CHUNK)]
    for name, make in PEERS.items():
        try:
            found.append(make(name, task))
        except ModuleNotFoundError as missing:
            print(f"{task.name}: {name} is skipped, {missing.name} is not installed")
    return found


# --- timing and reporting


class Result(NamedTuple):
    """A variant's µs per step in every round, and the norm of its parameters after one."""

    micros: list[float]
    norm: float


def timed(variant: Variant, steps: int) -> tuple[float, PyTree]:
    """µs per step of one round, and the parameters after it."""
    made = jax.block_until_ready(variant.start())
    gc.collect()  # this round should not pay for the garbage of others
    started = time.perf_counter()
    params = jax.block_until_ready(variant.run(made))
    return 1e6 * (time.perf_counter() - started) / steps, params


def measure(task: Task, variants: list[Variant], rounds: int) -> dict[str, Result]:
    """Runs every variant once untimed, then all of them, alternating."""
    results = {v.name: Result([], float(optax.tree.norm(timed(v, task.steps)[1]))) for v in variants}
    for number in range(rounds):
        # in alternating order, so that neighbours change
        for variant in variants if number % 2 else variants[::-1]:
            results[variant.name].micros.append(timed(variant, task.steps)[0])
    return results


def comparison_rows(case: str, results: dict[str, Result]) -> list[dict[str, Any]]:
    """The rows of the table: every variant, once per baseline."""
    rows = []
    for name, (micros, norm) in results.items():
        row = {"case": case, "variant": name, "us": statistics.median(micros), "us_min": min(micros), "norm": norm}
        baselines = [baseline for mine, baseline in LIMITS if mine == name and baseline in results]
        for baseline in baselines:
            ratio = statistics.median(map(truediv, micros, results[baseline].micros))
            limit = LIMITS[name, baseline].get(case)
            rows.append(row | {"against": baseline, "ratio": ratio, "limit": limit, "verdict": verdict(ratio, limit)})
        rows += [] if baselines else [row]
    return rows


def verdict(value: float, limit: float | None) -> str:
    """Whether `value` is within `limit`."""
    return "" if limit is None else "ok" if value <= limit else "over"


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    layout = "{:7} {:28} {:>8} {:>8} {:>9}   {:27} {:>6} {:>6}  {}"
    print("\n" + layout.format("case", "variant", "µs/step", "min", "|params|", "against", "ratio", "limit", ""))
    for row in rows:
        own = row["case"], row["variant"], f"{row['us']:.1f}", f"{row['us_min']:.1f}", f"{row['norm']:.4f}"
        limit = "" if row.get("limit") is None else f"{row['limit']:.2f}"
        held = (row["against"], f"{row['ratio']:.2f}", limit, row["verdict"]) if "against" in row else ("",) * 4
        print(layout.format(*own, *held).rstrip())


def measure_import(runs: int = 5) -> dict[str, Any]:
    """The import time that we add to that of JAX, Flax and Optax, in a new interpreter."""

    def seconds(statement: str) -> float:
        code = f"import time; started = time.perf_counter(); {statement}; print(time.perf_counter() - started)"
        return float(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE).stdout)

    pairs = [(seconds("from jax_trainer import *"), seconds("import jax, flax.nnx, optax")) for _ in range(runs + 1)]
    del pairs[0]  # the first one reads from disk and writes bytecode
    mine, theirs = map(statistics.median, zip(*pairs, strict=True))
    added = statistics.median(a - b for a, b in pairs)
    return {"ours_s": mine, "baseline_s": theirs, "added_s": added, "limit_s": 0.3, "verdict": verdict(added, 0.3)}


def machine() -> dict[str, Any]:
    """The machine, and the versions of the libraries."""
    where = {"cpus": os.cpu_count(), "platform": platform.platform(), "device": jax.devices()[0].device_kind}
    return where | {"python": platform.python_version()} | {name: version(name) for name in ("jax", "flax", "optax")}


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description="Measures the cost of a training step.")
    parser.add_argument("--rounds", type=int, default=15, help="measurements per variant")
    parser.add_argument("--peers", action="store_true", help="measure other libraries too")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Lightning's advice on workers and logging

    where, imported = machine(), measure_import()
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print("import: ours {ours_s:.2f} s, jax + flax.nnx + optax {baseline_s:.2f} s,".format(**imported), end=" ")
    print("added {added_s:+.2f} s, limit {limit_s:+.1f} s, {verdict}".format(**imported))

    tiny = Task.random("tiny", (64, 32, 32, 10), batch_size=32, batches=500, epochs=4)
    short = Task.random("short", tiny.sizes, batch_size=32, batches=50, epochs=20)  # tiny with short epochs
    medium = Task.random("medium", (784, 256, 256, 10), batch_size=128, batches=200, epochs=4)
    measured: dict[str, dict[str, Result]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for task in (tiny, short, medium):
            variants = common_variants(task, folder) + (extra_variants(task, folder) if task is tiny else [])
            variants += peer_variants(task, folder) if options.peers and task is not short else []
            measured[task.name] = measure(task, variants, options.rounds)
    rows = [row for case, results in measured.items() for row in comparison_rows(case, results)]
    print_table(rows)
    if options.json:
        rounds = {case: {name: r.micros for name, r in results.items()} for case, results in measured.items()}
        everything = {"machine": where, "import": imported, "rows": rows, "us_by_round": rounds}
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
