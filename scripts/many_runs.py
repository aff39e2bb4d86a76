"""Many short runs in a row, each in a process of its own: does every one of them end with the exit code it should?

A thread that is inside native code when Python exits aborts the process after a run that succeeded. As on an
accelerator, a thread puts batches on the device ahead, and another one saves copies that are on the device. Runs end in
several ways: completed, by an error of the loader, by Ctrl-C, and, of a `TrainLoop`, abandoned in the middle.

    python scripts/many_runs.py --runs 200 --jobs 2                  # each style
    python scripts/many_runs.py --styles fit --ends completed --runs 1000
"""

import argparse
import collections
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from rich.console import Console

import jax_trainer.checkpoint.arrays as snapshot
import jax_trainer.engine.batches as batches
from jax_trainer import (
    CheckpointFileWriter,
    TrainerModule,
    TrainLoop,
    TrainTask,
    fit,
    get_default_checkpointer,
    train_fn,
)
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.logger import LoggerConfig
from jax_trainer.tools.cli import main as cli

STYLES = ("TrainerModule", "cli", "fit", "train_fn", "TrainLoop")
ENDS = ("completed", "error", "ctrl_c", "abandoned")
PATIENCE = 180  # seconds until a process counts as hanging, and is ended by SIGALRM
show = Console(highlight=False, markup=False, soft_wrap=True).print
EPOCHS, STEPS, FEATURES = 2, 6, 600


def main() -> int:
    """Runs them; returns 1 if a process ended otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200, help="runs of each style (default: 200)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default: 2)")
    parser.add_argument("--styles", nargs="+", choices=STYLES, default=STYLES)
    parser.add_argument("--ends", nargs="+", choices=ENDS, default=ENDS)
    options = parser.parse_args()
    are_right = True
    folder = tempfile.mkdtemp()  # not in a `with`, which the processes would leave, too
    jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    for style in options.styles:
        ends = [end for end in options.ends if end != "abandoned" or style == "TrainLoop"]
        each = [ends[number % len(ends)] for number in range(options.runs)]
        started = time.perf_counter()
        results = run_processes(style, each, Path(folder) / style, options.jobs)
        for end in ends:
            are_right &= report(style, end, [one for which, one in zip(each, results, strict=True) if which == end])
        show(f"{style}: {options.runs} runs in {time.perf_counter() - started:.0f} s")
    shutil.rmtree(folder)
    return int(not are_right)


def run_processes(style: str, ends: Sequence[str], folder: Path, jobs: int) -> list[tuple[int, str]]:
    """The exit code of every process, and what it wrote to standard error.

    They are forked from this one, which has imported everything and has no thread, and exit as any process does.
    """
    folder.mkdir(parents=True)
    results, running = [(0, "")] * len(ends), dict[int, int]()
    for number in range(len(ends) + jobs):
        if number < len(ends):
            if (process := os.fork()) == 0:
                signal.alarm(PATIENCE)
                err = os.open(folder / f"{number}.err", os.O_WRONLY | os.O_CREAT)
                os.dup2(err, 1)
                os.dup2(err, 2)
                do_as_on_an_accelerator()
                sys.exit(TRAIN[style](ends[number], folder / str(number)))
            running[process] = number
        if running and (len(running) >= jobs or number >= len(ends)):
            process, status = os.wait()
            which = running.pop(process)
            results[which] = os.waitstatus_to_exitcode(status), (folder / f"{which}.err").read_text(errors="replace")
            shutil.rmtree(folder / str(which), ignore_errors=True)
    return results


def report(style: str, end: str, results: list[tuple[int, str]]) -> bool:
    """Prints the exit codes; returns whether all are right."""
    right = {"completed": (0,), "abandoned": (0,), "error": (1,), "ctrl_c": (130, -signal.SIGINT)}[end]
    codes, wrong = collections.Counter(code for code, _ in results), [one for one in results if one[0] not in right]
    show(f"{style}, {end}: exit codes {dict(codes)}, {len(wrong)} wrong")
    for code, err in wrong[:2]:
        show(f"--- exit code {code}\n{err[-4000:]}")
    return not wrong


# one run


class Loader:
    """Batches that are not one array in memory, so that a thread prefetches them; in the second epoch they `end`."""

    def __init__(self, end: str) -> None:
        x = np.random.default_rng(0).standard_normal((STEPS, 32, FEATURES)).astype(np.float32)
        self.batches = [(one, one[:, :3].argmax(-1).astype(np.int32)) for one in x]
        self._end, self._count = end, 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Any:
        for batch in self.batches:
            self._count += 1
            if self._count > STEPS * 3 // 2:
                if self._end == "error":
                    raise RuntimeError("on purpose")
                if self._end == "ctrl_c":
                    os.kill(os.getpid(), signal.SIGINT)
                    self._end = ""
            yield batch


class Net(nn.Module):
    """One layer."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """[batch, features] → [batch, classes]."""
        return nn.Dense(3)(x)


class Trainer(TrainerModule):
    """A classifier."""

    def batch_to_input(self, batch: Any) -> Any:
        """The inputs of a batch."""
        return batch[0]

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        """Cross entropy."""
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return cross_entropy(logits, batch[1]), (mutable, {})


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def do_as_on_an_accelerator() -> None:
    """Puts batches on the device in the thread that prefetches them; copies what is saved on the device."""
    snapshot.is_on_cpu = lambda leaves: False
    made = batches.placing

    def placing(*args: Any) -> Any:
        where, place, depth = made(*args)
        put = lambda step_batch: step_batch._replace(batch=jax.device_put(step_batch.batch))
        return where, (lambda step_batch: put(place(step_batch))) if depth else place, depth

    batches.placing = placing


def train_trainer(end: str, folder: Path) -> int:
    """`TrainerModule`."""
    trainer = Trainer(
        model=Net(), optimizer=optax.sgd(0.1), exmp_input=Loader(end).batches[0], train_epochs=EPOCHS,
        callbacks={"ModelCheckpoint": ModelCheckpointConfig(monitor="val/loss", mode="min")},
        enable_progress_bar=False, logger=LoggerConfig(log_dir=str(folder)),
    )  # fmt: skip
    trainer.train_model(Loader(end), Loader(""))
    return 0


OWN = """
import os, signal
from jax_trainer.callbacks import ModelCheckpoint, ModelCheckpointConfig
save = ModelCheckpoint.on_filtered_training_epoch_end
def end(self, train_metrics, epoch):
    if "{end}" == "error" and epoch == 2:
        raise RuntimeError("on purpose")
    if "{end}" == "ctrl_c" and epoch == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return save(self, train_metrics, epoch)
ModelCheckpoint.on_filtered_training_epoch_end = end
"""


def train_cli(end: str, folder: Path) -> int:
    """The command line."""
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(OWN.format(end=end))
    (folder / "run.yaml").write_text(f"""
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: {EPOCHS}
  max_steps_per_epoch: {STEPS}
  num_classes: 10
  logger: {{log_dir: {folder / "runs"}}}
  callbacks: {{ModelCheckpoint: {{monitor: val/acc, mode: max}}}}
model: {{class_name: MLP, num_classes: 10, hidden: [8]}}
optimizer: {{class_name: SGD, learning_rate: 0.1}}
dataset: {{class_name: DigitsDataset, global_batch_size: 32, prefetch_factor: 2}}
""")
    sys.argv = ["jax-trainer", "train", str(folder / "run.yaml"), str(folder / "own.py"), "-q"]
    return cli()


def train_fit(end: str, folder: Path) -> int:
    """`fit`."""
    model = nnx.Linear(FEATURES, 3, rngs=nnx.Rngs(0))
    options: dict[str, Any] = {"loss_fn": cross_entropy, "optimizer": optax.sgd(0.1), "num_epochs": EPOCHS}
    fit(model, Loader(end), Loader(""), **options, log_dir=folder, progress=False)
    return 0


def train_functional(end: str, folder: Path) -> int:
    """`train_fn`."""

    def loss_fn(model: Any, batch: Any) -> jax.Array:
        return cross_entropy(model(batch[0]), batch[1])

    def train_step(model: Any, rng_key: jax.Array, batch: Any) -> Any:
        return nnx.value_and_grad(loss_fn)(model, batch)

    def val_step(model: Any, rng_key: jax.Array, batch: Any) -> jax.Array:
        return loss_fn(model, batch)

    save, _, _ = get_default_checkpointer(str(folder), save_every_n_steps=STEPS)
    model = nnx.Linear(FEATURES, 3, rngs=nnx.Rngs(0))
    options: dict[str, Any] = {"n_steps": EPOCHS * STEPS, "eval_every_n_steps": STEPS, "n_eval_batches": 2}
    train = train_fn(fns=(train_step, val_step), hooks=[save], progress=False, **options)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    train(jax.random.key(0), model, optimizer, Loader(end), Loader(""))
    return 0


def train_loop(end: str, folder: Path) -> int:
    """`TrainLoop`."""
    task = TrainTask(apply=Net().apply, optimizer=optax.sgd(0.1), loss=cross_entropy, data=Loader(end))
    steps = EPOCHS * STEPS
    loop = TrainLoop(init=Net().init, task=task, rnkey=jax.random.key(0), n_steps=steps, stdout=False)
    write = CheckpointFileWriter(output_dir=str(folder))
    for checkpoint in loop:
        if checkpoint.step == STEPS // 2:
            write(checkpoint)
            if end == "abandoned":
                break
    return 0


TRAIN = {
    "TrainerModule": train_trainer,
    "cli": train_cli,
    "fit": train_fit,
    "train_fn": train_functional,
    "TrainLoop": train_loop,
}

if __name__ == "__main__":
    sys.exit(main())
