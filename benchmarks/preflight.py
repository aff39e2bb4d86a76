"""Predicted against measured memory of five models, and the largest batch: it runs, and a tenth more does not.

    PYTHONPATH=src python benchmarks/preflight.py [--only gpt2 mlp] [--jobs 3] [--configured] [--smoke]

For each model, `trainer.preflight` predicts what a device needs at the configured batch size, and finds the largest
batch that fits. Then fresh processes train a few steps: at the configured batch size, at the
largest one, and at 1.1 times that one. Measured is `memory_stats()["peak_bytes_in_use"]` at the end of the process. The
data is synthetic and resident on the device (not with `--only resnet50-stream`). With `--configured`, the largest
batch, which takes several compilations, is left out. The processes share a compilation
cache, so that each step is compiled once. Needs a GPU; `--smoke` tries the script on a CPU, with tiny models. A report,
not a test.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jax_trainer.core.memory import OutOfMemoryError
from jax_trainer.datasets import DatasetConfig, DatasetModule, SupervisedBatch
from jax_trainer.datasets.transforms import DeviceTransforms, normalize
from jax_trainer.trainer import build, load_experiment

FOLDER = Path(__file__).parent.parent / "src/jax_trainer/configs"
CLASSIFIER = """
trainer: {{class_name: ImgClassifierTrainer, train_epochs: 10, num_classes: 1000, precision: {precision}}}
model: {model}
optimizer: {{class_name: AdamW, learning_rate: 1e-3}}
dataset: {{class_name: DigitsDataset}}
"""
MLP = "{class_name: MLP, hidden: [" + ", ".join(["4096"] * 16) + "], num_classes: 1000}"
RESNET = "{class_name: ResNet, depth: 50, stem: imagenet, num_classes: 1000}"
WARMUP = "optimizer.learning_rate.warmup_steps=1"
echo = Console(highlight=False, markup=False, soft_wrap=True, width=170).print


class Case(NamedTuple):
    """A model: its file or its text, overrides, batch size, and the shape and number of its examples."""

    source: str
    overrides: tuple[str, ...]
    batch: int
    shape: tuple[int, ...]  # of an example: an image, or a text
    examples: int
    smoke: tuple[str, ...]  # overrides that make it tiny
    resident: bool = True


TINY_GPT = ("model.layers=1", "model.heads=2", "model.width=16", "model.vocab_size=64", "trainer.steps_per_call=2")
GPT2 = Case("gpt2.yaml", (WARMUP,), 32, (1024,), 4096, TINY_GPT)
IMAGES = CLASSIFIER.format(precision="bf16", model=RESNET)
CASES = {  # those that take longest to compile first
    "gpt2-355m": GPT2._replace(overrides=(WARMUP, "model.layers=24", "model.heads=16", "model.width=1024")),
    "resnet50": Case(IMAGES, (), 256, (224, 224, 3), 4096, ("model.width=1", "model.depth=18")),
    "gpt2-124m": GPT2,
    "dit-b/2": Case("cifar10_dit.yaml", (WARMUP,), 256, (32, 32, 3), 16_384, ("model.size=small", "model.patch=8")),
    "mlp": Case(CLASSIFIER.format(precision="f32", model=MLP), (), 4096, (28, 28, 1), 1 << 20, ("model.hidden=[8]",)),
}
# not by default: batches of images go to the device while others wait there for their step
CASES["resnet50-stream"] = CASES["resnet50"]._replace(resident=False)
BY_DEFAULT = [name for name in CASES if CASES[name].resident]


def trainer_for(case: Case, batch: int, folder: str, *, smoke: bool) -> Any:
    """The trainer of a model on synthetic data."""
    file = FOLDER / case.source
    if "\n" in case.source:
        file = Path(folder, "case.yaml")
        file.write_text(case.source)
    overrides = [*case.overrides, *(case.smoke if smoke else ()), f"trainer.logger.log_dir={folder}"]
    run = load_experiment(
        file, [*overrides, f"trainer.resident={case.resident}".lower(), "trainer.enable_progress_bar=false"]
    ).value
    steps = run.trainer.steps_per_call
    run.trainer.callbacks, run.trainer.max_steps = {}, steps if steps > 1 else 4 if case.resident else 60
    shape, count = case.shape, 256 if smoke else case.examples
    if smoke:
        shape = (32, 32, shape[-1]) if len(shape) == 3 else (64,)
    is_text = len(shape) == 1
    inputs = np.zeros((count, *shape), np.int32 if is_text else np.uint8)
    data = SupervisedBatch.of(inputs, inputs if is_text else np.zeros(count, np.int32))
    scale = () if is_text else (normalize((0.5,) * shape[-1], (0.25,) * shape[-1]),)
    config = DatasetConfig(global_batch_size=batch, val_size=0)
    return build(run, dataset=DatasetModule(config, data, transforms=DeviceTransforms(train=scale, eval=scale)))


def predict(case: Case, folder: str, *, smoke: bool, finds: bool) -> dict[str, Any]:
    """The preflight at the configured size, and the largest batch; also compiles what the other processes run."""
    batch, started = 8 if smoke else case.batch, time.perf_counter()
    trainer = trainer_for(case, batch, folder, smoke=smoke)
    memory = 3 * trainer.preflight().needed_bytes if smoke else None
    report = trainer.preflight(find_batch=finds, memory=memory)
    found = report.found
    more = trainer_for(case, int(np.ceil(1.1 * found.size)), folder, smoke=smoke) if found and found.size else None
    larger = None if more is None else more.preflight(memory=memory)
    return {
        "device": report.devices,
        "limit": report.limit,
        "batch": batch,
        "needed": report.needed_bytes,
        "found": found and found.size,
        "found_needed": found and found.needed_bytes,
        "compiled": found and dict(found.compiled),
        "larger": None if larger is None else larger.batch_size,
        "larger_needed": None if larger is None else larger.needed_bytes,
        "seconds": report.seconds,
        "flops": report.step_flops,
        "compile_seconds": report.cost.compile_seconds,
        "wall": time.perf_counter() - started,
    }


def train(case: Case, batch: int, folder: str, *, smoke: bool) -> dict[str, Any]:
    """Trains a few steps; returns the peak memory of the process, or why it ran out of it."""
    trainer = trainer_for(case, batch, folder, smoke=smoke)
    started = time.perf_counter()
    try:
        trainer.train_model(trainer.dataset.train_loader, quiet=True)
    except (OutOfMemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, OutOfMemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"oom": str(error)[:200]}
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"peak": stats.get("peak_bytes_in_use"), "wall": time.perf_counter() - started}


def child(
    name: str, batch: int | None, cache: str, *, smoke: bool, shares: bool, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Predicts (without a batch size) or trains in a fresh process."""
    words = [sys.executable, __file__, "--only", name, "--child", "predict" if batch is None else str(batch)]
    env = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    if shares:  # the GPU with other processes
        env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    started = time.perf_counter()
    words += [*options, *(["--smoke"] if smoke else [])]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}: {done.stderr[-1500:]}"}
    return {**json.loads(lines[-1]), "process": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares predicted with measured memory of five models.")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), help="only these models")
    parser.add_argument("--jobs", type=int, default=3, help="models that are compiled at the same time")
    parser.add_argument("--configured", action="store_true", help="only the configured batch size")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to try the script on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only or BY_DEFAULT
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            options: Any = {"smoke": args.smoke}
            if args.child == "predict":
                result = predict(CASES[names[0]], folder, finds=not args.configured, **options)
            else:
                result = train(CASES[names[0]], int(args.child), folder, **options)
        sys.stdout.write(f"{json.dumps(result)}\n")
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(args.jobs) as pool:

        def first(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
            options: Any = {"cache": cache, "smoke": args.smoke, "shares": True}
            predicted = child(name, None, **options, options=["--configured"] if args.configured else [])
            echo(f"{name}, predicted after {time.perf_counter() - started:.0f} s: {json.dumps(predicted)}")
            configured = child(name, predicted["batch"], **options) if "batch" in predicted else {}
            echo(f"{name}, measured after {time.perf_counter() - started:.0f} s: {json.dumps(configured)}")
            return predicted, configured

        results = dict(zip(names, pool.map(first, names), strict=True))
        echo(f"predicted and compiled after {time.perf_counter() - started:.0f} s")
        alone: Any = {"cache": cache, "smoke": args.smoke, "shares": False}
        table = Table(
            *("model", "batch", "predicted", "measured", "error", "largest", "predicted", "measured", "error"),
            *("1.1 ×", "predicted", "runs", "compilations", "compile, s", "step, on zeros"),
        )
        for name, (predicted, configured) in results.items():
            if "error" in predicted or not predicted.get("found"):
                echo(f"{name}: {predicted.get('error') or predicted}")
                continue
            largest, larger = (child(name, predicted[key], **alone) for key in ("found", "larger"))
            runs = "no: out of memory" if "oom" in larger else "yes" if "error" not in larger else "error"
            table.add_row(
                name,
                *(str(predicted["batch"]), *compared(predicted["needed"], configured)),
                *(str(predicted["found"]), *compared(predicted["found_needed"], largest)),
                *(str(predicted["larger"]), f"{predicted['larger_needed'] / 1e9:.2f} GB", runs),
                str(len(predicted["compiled"])),
                f"{predicted['compile_seconds']:.1f}",
                "–" if predicted["seconds"] is None else f"{1000 * predicted['seconds']:.1f} ms",
            )
            for label, result in (("configured", configured), ("largest", largest), ("1.1 ×", larger)):
                if "error" in result:
                    echo(f"{name}, {label}: {result['error']}")
            echo(f"{name}: {json.dumps({**predicted, 'runs': [configured, largest, larger]})}")
        device = next((one["device"] for one, _ in results.values() if "device" in one), "no device")
        limit = next((one["limit"] for one, _ in results.values() if "limit" in one), 0)
        echo(f"{device}, {limit / 1e9:.1f} GB, jax {jax.__version__}, {time.perf_counter() - started:.0f} s", table)


def compared(predicted: int, result: dict[str, Any]) -> tuple[str, str, str]:
    """Predicted and measured bytes as text, and their difference."""
    peak = result.get("peak")
    if peak is None:
        return f"{predicted / 1e9:.2f} GB", "out of memory" if "oom" in result else "–", "–"
    return f"{predicted / 1e9:.2f} GB", f"{peak / 1e9:.2f} GB", f"{predicted / peak - 1:+.1%}"


if __name__ == "__main__":
    main()
