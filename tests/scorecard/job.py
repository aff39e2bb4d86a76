"""The training job of the scorecard. As a script, the same command starts or resumes it.

Besides the run folder `out/runs/<version>` it writes into `out`:
- `ledger.jsonl`: a line per step: its number, the ids of its examples, the bits of learning rate and loss; a
  resumed run truncates it to the restored step;
- `starts.jsonl`: a line per process that started to train, with its first step;
- `saves.jsonl`: a line per requested save, and another one when its state has been copied;
- `progress`: the last step that was dispatched;
- `result.json`: at the end, a digest of the state, and the results of `train_model`.

With several processes (`JOB_PROCESS="index count port"`), process 0 writes these into `out`, process 1 into
`out/process-1`, and so on.

Faults are set in the environment, so that the command stays the same: see `faults.py` and `mutants.py`.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_trainer.callbacks import (
    Callback,
    CallbackConfig,
    EarlyStoppingConfig,
    GradientSpikeMonitorConfig,
    HangMonitorConfig,
    JAXProfilerConfig,
    LearningRateMonitorConfig,
    ModelCheckpointConfig,
)
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import StepEnd, StepMetrics
from jax_trainer.logger import LoggerConfig, TensorboardConfig
from jax_trainer.optimizer import (
    AdamW,
    AdamWConfig,
    GradClipNormConfig,
    WarmupCosineDecayScheduleConfig,
    learning_rate,
)
from jax_trainer.sharding import Job as ProcessJob
from jax_trainer.sharding import init_ddp_mesh, join, process_group
from jax_trainer.testing import TinyLinen, TinyNNX, digest, numbered_data
from jax_trainer.trainer import TrainerConfig, TrainerModule
from tests.scorecard.faults import (
    FaultInjector,
    FaultyLoader,
    InjectedError,
    OutageTool,
    OutageToolConfig,
    fault_steps,
    hang_in_step,
    planned_faults,
    slow_down_disk,
)
from tests.scorecard.mutants import apply_mutant

__all__ = [
    "Job",
    "Ledger",
    "Options",
    "OutageTool",
    "data_of",
    "ids_of_epoch",
    "main",
    "optimizer_of",
    "train",
    "trainer_for",
]

EXAMPLES, BATCH = 1003, 32
EPOCH = -(-EXAMPLES // BATCH)  # steps of an epoch; the last batch has 11 examples
EVALUATED = 210  # examples to validate and test on
EVERY = 5  # steps between two saved states


@dataclass(frozen=True)
class Options:
    """The options of the script, which the cases vary."""

    out: str
    flavour: str = "linen"
    version: str = "j"
    steps: int = 400
    epochs: int = 1000
    seed: int = 42
    examples: int = EXAMPLES
    save_every: int = EVERY
    keep_latest: int = 2
    top_k: int = 2
    on_save_failure: str = "stop"
    val_every: int = 20
    val_epochs: int = 1
    log_every: int = 7
    steps_per_call: int = 1
    resident: int = 0
    threads: int = 0  # 0: arrays in memory; otherwise Grain with this many threads
    accumulate: int = 1  # micro-batches of one batch
    window: int = 1  # batches of one update
    schedule: int = 0  # length in updates; 0: that of the run
    ema: float = 0.99
    policy: str = ""
    max_skipped: int = 10
    max_rollbacks: int = 3
    patience: int = 1000
    devices: int = 1
    extras: str = ""  # more observers: bar, stats, profiler, tensorboard, hang; or fewer: bare, nonorm
    resume: str = "auto"
    fork: int = 0
    save_on_exception: int = 1
    tool: str = ""  # the fault of the logging tool, see `OutageToolConfig`
    ledger: int = 1
    test: int = 1

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.out) / "runs" / self.version

    def command(self) -> list[str]:
        """The command that runs this job."""
        defaults = {item.name: item.default for item in fields(self)}
        changed = [(name, value) for name, value in vars(self).items() if value != defaults[name]]
        words = [word for name, value in changed for word in (f"--{name}", str(value))]
        return [sys.executable, str(Path(__file__)), *words]


def options_from(words: list[str]) -> Options:
    """Parses the command line."""
    parser = argparse.ArgumentParser()
    for item in fields(Options):
        is_needed = item.name == "out"
        kind: Any = str if is_needed else type(item.default)
        parser.add_argument(
            f"--{item.name}", type=kind, required=is_needed, default=None if is_needed else item.default
        )
    return Options(**vars(parser.parse_args(words)))


class Job(TrainerModule):
    """A classifier of numbered examples, which reports the ids that it trains on."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch["x"]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return self._evaluate(self.model_apply(model, batch["x"]), batch)

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: jax.Array, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch["x"], rng, train=train)
        loss, metrics = self._evaluate(logits, batch)
        return loss, (mutable, metrics)

    def _evaluate(self, logits: jax.Array, batch: Any) -> Any:
        if fault_steps("loss") and len(batch["y"]) == EXAMPLES % BATCH:
            raise InjectedError("the loss fails")  # while it is traced for the ragged last batch, at step 32
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        if fault_steps("spike"):
            # scaled inputs alone would be hidden by a norm
            losses = losses * jnp.where(jnp.abs(batch["x"]).max() > 50, 100.0, 1.0)
        if fault_steps("hang"):
            loss = jax.lax.stop_gradient(losses.mean())
            losses = losses + jax.pure_callback(hang_in_step, jax.ShapeDtypeStruct((), jnp.float32), loss)
        hits = (logits.argmax(-1) == batch["y"]).mean(dtype=np.float32)
        metrics = {
            "acc": hits,
            "worst": {"value": losses.max(), "mode": "max"},
            "spread": {"value": losses.mean(), "mode": "std"},
            "ids": {"value": batch["id"], "mode": "concat", "log_mode": "train"},
            # functions of the data only, so that `oracles.py` can compute them
            "x_mean": batch["x"].mean(),
            "x_sum": {"value": batch["x"].sum(), "mode": "sum"},
            "x_max": {"value": batch["x"].max(), "mode": "max"},
            "x_min": {"value": batch["x"].min(), "mode": "min"},
            "x_std": {"value": batch["x"].mean(), "mode": "std"},
            "weighted": {"value": (batch["x"][:, 0] * batch["y"]).sum(), "count": batch["y"].sum()},
        }
        return losses.mean(), metrics


class Ledger(Callback):
    """Records the examples, learning rate and loss of every step that is part of the run."""

    config: CallbackConfig

    def __init__(self, out: Path) -> None:
        self._out, self._rates, self.times = out, {}, []
        super().__init__()

    def on_training_start(self) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        _truncate(self._out / "ledger.jsonl", self.event.step)
        _append(self._out / "starts.jsonl", {"step": self.event.step, "pid": os.getpid()})
        self._file = (self._out / "ledger.jsonl").open("ab", buffering=0)
        self._progress = os.open(self._out / "progress", os.O_CREAT | os.O_WRONLY, 0o600)

    def on_step_end(self, event: StepEnd) -> None:
        self.times.append(time.perf_counter())
        if event.steps == 1:
            self._rates[event.step] = _bits(learning_rate(self.state.opt_state))
        os.pwrite(self._progress, b"%10d\n" % event.step, 0)

    def on_steps_reported(self, event: StepMetrics) -> None:
        columns = event.rows.columns
        for index, step in enumerate(range(event.rows.first, event.rows.last + 1)):
            ids = [int(number) for number in np.ravel(columns["ids"].values[index])]
            row = {
                "step": step,
                "ids": ids,
                "lr": self._rates.pop(step, None),
                "loss": _bits(columns["loss"].values[index]),
            }
            self._file.write(json.dumps(row).encode() + b"\n")

    def finalize(self, status: str) -> None:
        self._file.close()
        os.close(self._progress)


def _bits(number: Any) -> str:
    return np.asarray(number, np.float32).tobytes().hex()


def _append(file: Path, row: dict[str, Any]) -> None:
    with file.open("ab", buffering=0) as opened:
        opened.write(json.dumps(row).encode() + b"\n")


def _truncate(file: Path, step: int) -> None:
    """Truncates the file after `step`; also removes a partial line, which a kill may leave."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    file.write_bytes(b"".join(kept))


def optimizer_of(options: Options) -> Any:
    """AdamW with warm-up, cosine and clipping; with `window` above 1, over several batches.

    The schedule is as long as the run, or as `schedule`, so that a longer run starts like a shorter one.
    """
    length = -(-(options.schedule or options.steps) // options.window)
    rate = WarmupCosineDecayScheduleConfig(peak_value=0.01, warmup_steps=min(20, length // 2))
    config = AdamWConfig(learning_rate=rate, transforms={"clip": GradClipNormConfig(max_norm=1.0)})
    if options.window == 1 and not options.schedule:
        return {"optimizer_config": config}
    inner = AdamW(config).build(length)
    if options.window == 1:
        return {"optimizer": inner}
    return {"optimizer": optax.MultiSteps(inner, options.window).gradient_transformation()}


def trainer_for(options: Options, *, callbacks: Any = (), kind: type[Job] = Job, model: Any = None) -> Job:
    """The trainer of the job."""
    model = model or (TinyLinen(0.1) if options.flavour == "linen" else TinyNNX)
    out = process_folder(options)
    own_callbacks = [*([Ledger(out)] if options.ledger else []), FaultInjector(out)]
    mesh = None if options.devices == 1 else init_ddp_mesh()
    example = {name: array[:BATCH] for name, array in numbered_data(64).items()}
    return kind(
        _config(options), model=model, exmp_input=example, mesh=mesh, callbacks=[*own_callbacks, *callbacks],
        **optimizer_of(options),
    )  # fmt: skip


def process_folder(options: Options) -> Path:
    """The folder that this process writes to."""
    return Path(options.out) / (f"process-{process_group().index}" if process_group().index else "")


def join_processes() -> None:
    """Joins the other processes of the job, if any."""
    if place := os.environ.get("JOB_PROCESS"):
        index, count, port = place.split()
        job = ProcessJob(coordinator=f"127.0.0.1:{port}", processes=int(count), process=int(index))
        join(job, heartbeat=float(os.environ.get("JOB_HEARTBEAT", "5")))


def _config(options: Options) -> TrainerConfig:
    extras = options.extras.split(",")
    return TrainerConfig(
        train_epochs=options.epochs,
        max_steps=options.steps,
        check_val_every_n_epoch=options.val_epochs,
        val_every_n_steps=options.val_every,
        seed=options.seed,
        steps_per_call=options.steps_per_call,
        resident=bool(options.resident),
        accumulate=options.accumulate,
        ema=options.ema or None,
        on_nonfinite=options.policy or None,  # type: ignore[arg-type]
        max_skipped=options.max_skipped,
        max_rollbacks=options.max_rollbacks,
        enable_progress_bar="bar" in extras,
        log_grad_norm="nonorm" not in extras,
        log_param_stats="stats" in extras,
        log_grad_stats="stats" in extras,
        callbacks=_callbacks(options, extras),
        logger=LoggerConfig(log_steps_every=options.log_every, tool_config=_tools(options, extras)),
    )


def _callbacks(options: Options, extras: list[str]) -> dict[str, Any]:
    saver = ModelCheckpointConfig(
        save_top_k=options.top_k,
        keep_latest=options.keep_latest,
        every_n_steps=options.save_every,
        save_on_exception=bool(options.save_on_exception),
        on_save_failure=options.on_save_failure,  # type: ignore[arg-type]
    )
    chosen: dict[str, Any] = {"saver": saver} if options.save_every else {}
    if options.val_every or options.val_epochs:
        chosen["early"] = EarlyStoppingConfig(patience=options.patience)
    if "hang" in extras:
        chosen["hang"] = HangMonitorConfig(seconds=10.0, exits=True)
    if "profiler" in extras:
        chosen["profiler"] = JAXProfilerConfig(first_step=3, profile_n_steps=2)
    if "bare" not in extras:
        chosen |= {"rate": LearningRateMonitorConfig(), "spikes": GradientSpikeMonitorConfig(warmup_steps=5)}
    return chosen


def _tools(options: Options, extras: list[str]) -> list[Any]:
    tool = OutageToolConfig(save_dir=str(Path(options.out) / "runs"), version=options.version, fault=options.tool)
    tools: list[Any] = [tool]
    if "tensorboard" in extras:
        tools.append(TensorboardConfig())
    return tools


def examples_of(options: Options) -> dict[str, np.ndarray]:
    """The training examples."""
    return {name: array[: options.examples] for name, array in numbered_data(EXAMPLES + EVALUATED).items()}


def data_of(options: Options) -> tuple[Any, dict[str, Any], Any]:
    """The training data, two validation sets, and a test set."""
    data = examples_of(options)
    train: Any = ArrayLoader(data, BATCH, shuffle=True, seed=options.seed)
    if options.threads:
        from jax_trainer.datasets.records import GrainLoader  # Grain takes a second to import

        train = GrainLoader(Records(data), BATCH, shuffle=True, seed=options.seed, threads=options.threads)
    evaluated = {name: array[EXAMPLES:] for name, array in numbered_data(EXAMPLES + EVALUATED).items()}
    sets: dict[str, Any] = {
        "val": ArrayLoader({name: array[:101] for name, array in evaluated.items()}, BATCH),
        "other": ArrayLoader({name: array[101:150] for name, array in evaluated.items()}, BATCH),
    }
    if planned_faults().keys() & {"loader", "block", "nan", "spike"}:
        train = FaultyLoader(train, Path(options.out))
    if fault_steps("val"):
        sets["val"] = FaultyLoader(sets["val"], Path(options.out), kind="val")
    return train, sets, ArrayLoader({name: array[150:] for name, array in evaluated.items()}, BATCH)


class Records:
    """The examples one by one, as Grain reads them."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data["id"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._data.items()}


def ids_of_epoch(options: Options, epoch: int) -> list[int]:
    """The expected order of the examples in an epoch."""
    loader = ArrayLoader({"id": np.arange(options.examples)}, BATCH, shuffle=True, seed=options.seed)
    return [int(index) for index in loader.order(epoch)]


def train(trainer: Job, options: Options, **changes: Any) -> dict[Any, Any]:
    """Runs the job; returns the results of `train_model`."""
    loader, sets, tests = data_of(options)
    resume: Any = {"auto": "auto", "no": False, "yes": True}.get(options.resume, options.resume)
    more = {"resume": resume, **({"fork": True} if options.fork else {}), **changes}
    return trainer.train_model(
        loader, sets if options.val_every or options.val_epochs else None, tests if options.test else None, **more
    )


def record_saves(out: Path) -> None:
    """Makes every save append its step to `saves.jsonl`."""
    save = CheckpointStore.save

    def recorded(self: CheckpointStore, state: Any, *args: Any, **kwargs: Any) -> Any:
        row = {"step": int(state.step), "digest": digest(state) if "JOB_DIGESTS" in os.environ else ""}
        _append(out / "saves.jsonl", {**row, "is": "requested"})
        path = save(self, state, *args, **kwargs)
        _append(out / "saves.jsonl", {**row, "is": "copied"})
        return path

    CheckpointStore.save = recorded  # type: ignore[method-assign]


def to_json(value: Any) -> Any:
    """`value` in JSON, without loss of bits."""
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, float):
        return value.hex()
    array = np.asarray(value)
    return hashlib.sha256(array.tobytes()).hexdigest() if array.ndim else to_json(array.item())


def _quantiles(trainer: Job) -> dict[str, float]:
    """Durations of steps in milliseconds: the median and the 99th percentile."""
    times = next((one.times for one in trainer.callbacks.values() if isinstance(one, Ledger)), [])
    between = 1000 * np.diff(times) if len(times) > 2 else np.zeros(1)
    return {"p50": float(np.percentile(between, 50)), "p99": float(np.percentile(between, 99))}


def main(words: list[str]) -> int:
    """Runs the job that the command line describes."""
    options = options_from(words)
    join_processes()
    out = process_folder(options)
    out.mkdir(parents=True, exist_ok=True)
    apply_mutant()
    slow_down_disk()
    record_saves(out)
    trainer = trainer_for(options)
    results = train(trainer, options)
    content = {
        "digest": digest(trainer.state),
        "parts": {
            name: digest(getattr(trainer.state, name))
            for name in ("params", "model_state", "opt_state", "rng", "extra")
        },
        "step": int(trainer.state.step),
        "results": to_json(results),
        "step_ms": _quantiles(trainer),
        "finite": all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(trainer.state))),
    }
    flat = jax.tree_util.tree_leaves_with_path(jax.device_get(trainer.state.params))
    np.savez(out / "params.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in flat})
    new = out / "result.json.new"
    new.write_text(json.dumps(content))
    new.rename(out / "result.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
