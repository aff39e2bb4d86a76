"""The cost of saving and restoring checkpoints, compared with Orbax's asynchronous checkpointer.

    PYTHONPATH=src python benchmarks/checkpoints.py [--saves 15] [--rounds 5] [--folder DIR] [--only PART]

* saving: a chain of 25 layers of 1024×1024 float32, 105 MB, trained by SGD in a step that donates its state. How long a
  save blocks the loop, how much it slows the next step and all steps until it is committed, and when it is committed.
  The two savers alternate; each save is committed before the next one starts. At the end, the last checkpoint of each
  is restored and compared with a copy of the saved state.
* restoring: that checkpoint; also the time of verification alone.
* size: on disk relative to the arrays, of this state and of an MLP trained with Adam.
* loop: the same training without saves and with a save every 50 steps, alternating: the chain in a hand-written loop,
  and an MLP of 784-256-256-10 in `TrainerModule`, whose 50 steps take 0.1 s.

Writes to temporary folders in `--folder` (default: that of temporary files). A report, not a test.
"""

import argparse
import functools
import logging
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from mlp import LinenMlp

import jax_trainer as jt
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.core import TrainState, copy_state
from jax_trainer.core.state import new_state
from jax_trainer.datasets import Position
from jax_trainer.datasets.examples import DigitsConfig, DigitsDataset
from jax_trainer.engine import EpochEnd

LAYERS, WIDTH, BATCH = 25, 1024, 64
EVERY = 50  # steps between two saves of a loop
TX = optax.sgd(1e-3)


# --- the chain: 105 MB


def chain() -> TrainState:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    params = {f"layer_{n:02d}": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for n, key in enumerate(keys)}
    return new_state(params, {}, TX, jax.random.key(1))


@functools.partial(jax.jit, donate_argnums=0)
def step(state: TrainState, x: jax.Array) -> TrainState:
    def loss(params: Any) -> jax.Array:
        return jnp.square(functools.reduce(lambda x, kernel: jnp.tanh(x @ kernel), params.values(), x)).mean()

    updates, opt_state = TX.update(jax.grad(loss)(state.params), state.opt_state)
    return state.replace(step=state.step + 1, params=optax.apply_updates(state.params, updates), opt_state=opt_state)


class Training:
    """The training of the chain."""

    def __init__(self) -> None:
        self.state, self._x = chain(), jax.random.normal(jax.random.key(2), (BATCH, WIDTH))

    def step(self) -> float:
        started = time.perf_counter()
        self.state = jax.block_until_ready(step(self.state, self._x))
        return time.perf_counter() - started


# --- two savers


class Ours:
    name = "CheckpointStore"

    def __init__(self, folder: Path, state: TrainState) -> None:
        self.store = CheckpointStore(folder / "ours", keep_latest=1)
        self.store.prepare(state)

    def save(self, state: TrainState) -> None:
        self.path = folder_of_step(self.store.folder, state)
        self.store.save(state, Position(1, int(state.step)), {}, wait=False)

    @property
    def is_saving(self) -> bool:
        return self.store.is_saving

    def wait(self) -> None:
        self.store.wait()

    def restore(self, like: TrainState) -> TrainState:
        return self.store.restore("latest", like)[0]


class Orbax:
    """As in the Orbax documentation; the previous checkpoint is deleted before the timing starts."""

    name = "orbax AsyncCheckpointer"

    def __init__(self, folder: Path, state: TrainState) -> None:
        self._folder = folder / "orbax"
        self._folder.mkdir()
        self._saver = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self.path = self._folder

    def save(self, state: TrainState) -> None:
        self.path = folder_of_step(self._folder, state)
        self._saver.save(self.path, args=ocp.args.PyTreeSave(state))

    @property
    def is_saving(self) -> bool:
        return not self.path.exists()

    def wait(self) -> None:
        self._saver.wait_until_finished()
        for old in self._folder.iterdir():
            if old != self.path:
                shutil.rmtree(old)

    def restore(self, like: TrainState) -> TrainState:
        how = ocp.checkpoint_utils.construct_restore_args(like)
        return self._saver.restore(self.path, args=ocp.args.PyTreeRestore(item=like, restore_args=how))


def folder_of_step(folder: Path, state: TrainState) -> Path:
    return folder / f"step_{int(state.step):08d}"


# --- parts


def saving(args: argparse.Namespace, folder: Path) -> None:
    training = Training()
    savers = [kind(folder, training.state) for kind in (Ours, Orbax)]
    times: dict[str, list[tuple[float, ...]]] = {saver.name: [] for saver in savers}
    copies: dict[str, TrainState] = {}
    for number in range(args.saves + 1):  # the first one is a warm-up
        for saver in savers if number % 2 else savers[::-1]:
            baseline = statistics.median(training.step() for _ in range(5))
            copies[saver.name] = jax.block_until_ready(copy_state(training.state))
            started = time.perf_counter()
            saver.save(training.state)
            blocked = time.perf_counter() - started
            following = [training.step()]
            while saver.is_saving:
                following.append(training.step())
            saver.wait()
            committed = time.perf_counter() - started
            if number:
                times[saver.name].append(
                    (blocked, following[0] / baseline, statistics.mean(following) / baseline, committed, baseline)
                )
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(training.state))
    baseline = statistics.median(row[-1] for rows in times.values() for row in rows)
    print(
        f"\nSaving {size / 1e6:.0f} MB ({args.saves} saves each; a step without saving takes {baseline * 1e3:.0f} ms)\n"
    )
    table("", "blocks the loop: median", "max", "next step", "steps until commit", "commit after")
    for saver in savers:
        blocked, following, during, committed, _ = zip(*times[saver.name], strict=True)
        middle = [statistics.median(column) for column in (blocked, following, during, committed)]
        line = f"{middle[0] * 1e3:.1f} ms", f"{max(blocked) * 1e3:.1f} ms", f"{middle[1]:.2f} ×", f"{middle[2]:.2f} ×"
        table(saver.name, *line, f"{middle[3]:.2f} s")
    restoring(savers, copies)


def restoring(savers: list[Any], copies: dict[str, TrainState]) -> None:
    print("\nRestoring, and size on disk\n")
    table("", "restore: median of 5", "of which verification", "on disk / arrays", "restored state is equal")
    for saver in savers:
        like = jax.tree.map(jnp.zeros_like, copies[saver.name])
        restored = saver.restore(like)
        is_same = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), restored, copies[saver.name])))
        seconds = statistics.median(timed(lambda: jax.block_until_ready(saver.restore(like))) for _ in range(5))  # noqa: B023
        verification = "no verification"
        if isinstance(saver, Ours):
            seconds_verifying = statistics.median(timed(lambda: saver.store.verify(saver.path)) for _ in range(5))  # noqa: B023
            verification = f"{seconds_verifying * 1e3:.0f} ms"
        share = on_disk(saver.path) / sum(leaf.nbytes for leaf in jax.tree.leaves(copies[saver.name]))
        table(saver.name, f"{seconds * 1e3:.0f} ms", verification, f"{share:.3f}", "yes" if is_same else "NO")


def loops(args: argparse.Namespace, folder: Path) -> None:
    print(f"\nA loop that saves every {EVERY} steps, compared with one that does not ({args.rounds} rounds)\n")
    table("", "µs per step without", "with", "ratio")
    for name, run in (("MLP, 3.2 MB, TrainerModule", trainer_loop), ("chain, 105 MB, by hand", chain_loop)):
        rounds = []
        for number in range(args.rounds):
            order = (False, True) if number % 2 else (True, False)
            rounds.append({saves: run(folder / f"{name[:5]}-{number}-{saves}", saves=saves) for saves in order})
        middle = {saves: statistics.median(one[saves] for one in rounds) * 1e6 for saves in (False, True)}
        ratio = statistics.median(one[True] / one[False] for one in rounds)
        table(name, f"{middle[False]:.0f}", f"{middle[True]:.0f}", f"{ratio:.2f} ×")


def chain_loop(folder: Path, *, saves: bool, steps: int = 2 * EVERY) -> float:
    training = Training()
    store = CheckpointStore(folder, keep_latest=1)
    store.prepare(training.state)
    training.step()
    started = time.perf_counter()
    for number in range(1, steps + 1):
        training.step()
        if saves and number % EVERY == 0 and number < steps:
            store.save(training.state, Position(1, number), {}, wait=False)
    seconds = time.perf_counter() - started
    store.wait()
    shutil.rmtree(folder)
    return seconds / steps


# --- the MLP


class Classifier(jt.TrainerModule):
    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        return loss, (mutable, {"acc": (logits.argmax(-1) == batch[1]).mean()})


class Epochs(jt.Callback):
    """Records the training seconds of every epoch."""

    def reset(self) -> None:
        self.seconds: list[float] = []

    def on_training_epoch_end(self, train_metrics: dict[str, Any], epoch: int) -> None:
        assert isinstance(self.event, EpochEnd)
        self.seconds.append(self.event.seconds)


def classifier(sizes: tuple[int, ...], loader: Any, folder: Path, callbacks: list[Any], epochs: int) -> Classifier:
    trainer = Classifier(
        model=LinenMlp(sizes),
        optimizer=optax.adam(1e-3),
        exmp_input=next(loader.epoch(1)),
        callbacks=callbacks,
        train_epochs=epochs,
        enable_progress_bar=False,
        logger=jt.LoggerConfig(log_dir=str(folder)),
    )
    trainer.train_model(loader)
    return trainer


def trainer_loop(folder: Path, *, saves: bool, steps: int = 1000) -> float:
    epochs = Epochs()
    savers = [ModelCheckpointConfig(every_n_epochs=0, every_n_steps=EVERY)] if saves else []
    classifier((784, 256, 256, 10), random_loader(steps), folder, [epochs, *savers], epochs=4)
    shutil.rmtree(folder)
    return statistics.median(epochs.seconds[1:]) / steps


@functools.cache
def random_loader(batches: int, size: int = 128) -> jt.ArrayLoader:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((size * batches, 784), np.float32)
    y = rng.integers(10, size=len(x), dtype=np.int32)
    return jt.ArrayLoader((x, y), size, shuffle=True, drop_last=True)


def sizes(args: argparse.Namespace, folder: Path) -> None:
    data = DigitsDataset(DigitsConfig(global_batch_size=64))
    images, labels = data.train.input, data.train.target
    flat = images.reshape(len(images), -1).astype(np.float32) / 16
    loader = jt.ArrayLoader((flat, labels), 64, shuffle=True, drop_last=True)
    callbacks = [ModelCheckpointConfig()]
    print(f"\nSize on disk of a trained MLP (64-N-N-10, Adam, {args.epochs} epochs of digits)\n")
    table("N", "arrays", "on disk", "on disk / arrays", "files")
    for width in (32, 256, 1024):
        trainer = classifier((64, width, width, 10), loader, folder / f"digits-{width}", callbacks, args.epochs)
        saved = CheckpointStore(trainer.folder.checkpoints).latest()
        assert saved is not None
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
        written, files = on_disk(saved.path), sum(1 for path in saved.path.rglob("*") if path.is_file())
        table(str(width), f"{arrays / 1e3:.0f} kB", f"{written / 1e3:.0f} kB", f"{written / arrays:.3f}", str(files))


# --- shared


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")
    if not cells[0] or cells[0] == "N":
        print("|" + "---|" * len(cells))


@contextmanager
def fresh_folder(parent: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


PARTS = {"saving": saving, "size": sizes, "loop": loops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--only", choices=PARTS, default=None)
    args = parser.parse_args()
    logging.getLogger("jax_trainer").setLevel(logging.ERROR)  # warnings about slow saves
    print(f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}, orbax {ocp.__version__}")
    for name, part in PARTS.items():
        if args.only in (None, name):
            with fresh_folder(args.folder) as folder:
                part(args, folder)


if __name__ == "__main__":
    main()
