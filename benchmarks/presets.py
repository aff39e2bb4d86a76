"""The MFU of the two large presets, trained from their configuration files.

    PYTHONPATH=src python benchmarks/presets.py [--only gpt2] [--steps 300] [--set gpt2:dataset.global_batch_size=64]

MFU (model FLOPs utilization) counts 6 FLOPs per matrix weight and token (2 in the forward pass, 4 in the backward
pass), and 12 × layers × width × context for attention, without the causal mask, as usual. Norms, softmax, optimizer and
rematerialization do not count. It is relative to the measured rate of a product of two square bf16 matrices in the same
process. The time of a step is that of an epoch by the wall clock, the median of all but the first one. A report, not a
test.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jax_trainer.trainer import build, load_experiment

FOLDER = Path(__file__).parent.parent / "src/jax_trainer/configs"
echo = Console(highlight=False, markup=False, soft_wrap=True).print


def gpt_flops(model: Any, batch: int, shape: tuple[int, ...]) -> float:
    """FLOPs of a training step on `batch` texts."""
    width, time_ = model.width, shape[1]
    matrices = model.layers * 12 * width**2 + model.vocab_size * width
    return batch * time_ * (6 * matrices + 12 * model.layers * width * time_)


def dit_flops(model: Any, batch: int, shape: tuple[int, ...]) -> float:
    """FLOPs of a training step on `batch` images; time and label embeddings are computed once per image."""
    layers, _, width = model.sizes
    _, height, across, channels = shape
    pixels = model.patch**2 * channels
    tokens = height * across // model.patch**2
    per_token = 6 * (layers * 12 * width**2 + 2 * pixels * width) + 12 * layers * width * tokens
    per_image = 6 * (layers * 6 * width**2 + 2 * width**2 + 256 * width + width**2)
    return batch * (tokens * per_token + per_image)


PRESETS: dict[str, tuple[str, Callable[..., float], tuple[str, ...]]] = {
    "gpt2": ("gpt2.yaml", gpt_flops, ()),
    "dit": ("cifar10_dit.yaml", dit_flops, ("optimizer.learning_rate.warmup_steps=100",)),
}


def matrix_rate(side: int = 8192, times: int = 40) -> float:
    """FLOP/s of a product of two bf16 matrices; the best of three."""

    @jax.jit
    def repeated(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: (x @ b) * jnp.bfloat16(1 / 64), a)

    a, b = (jax.random.normal(jax.random.key(seed), (side, side), jnp.bfloat16) for seed in (0, 1))
    repeated(a, b).block_until_ready()
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        repeated(a, b).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return 2 * side**3 * times / best


def measure(name: str, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Trains a preset for `steps` steps; returns its measurements."""
    file, flops_of, own = PRESETS[name]
    common = [f"trainer.max_steps={steps}", f"trainer.logger.log_dir=runs/presets/{name}"]
    experiment = load_experiment(FOLDER / file, [*own, *common, *overrides]).value
    trainer = build(experiment)
    started = time.perf_counter()
    trainer.train_model(trainer.dataset.train_loader, quiet=True)
    seconds = time.perf_counter() - started
    rows = [json.loads(line) for line in (trainer.folder.path / "metrics.jsonl").read_text().splitlines()]
    # by the wall clock from the end of one epoch to that of the next, where the device has computed all steps
    epochs = [row["throughput/step_time"] for row in rows if "throughput/step_time" in row]
    step = statistics.median(epochs[1:] or epochs)  # the first one compiles
    losses = [row["train/loss_step"] for row in rows if "train/loss_step" in row]
    batch = experiment.dataset.global_batch_size
    inputs = trainer.exmp_input.input
    flops = flops_of(experiment.model, batch, inputs.shape)
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "name": name,
        "step": step,
        "flops": flops,
        "per_second": batch / step,
        "seconds": seconds,
        "losses": losses,
        "gigabytes": stats.get("peak_bytes_in_use", 0) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the MFU of the large presets.")
    parser.add_argument("--only", choices=sorted(PRESETS), help="only this preset")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps per preset")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PRESET:KEY=VALUE", help="override a key of a preset"
    )
    parser.add_argument("--side", type=int, default=8192, help="side of the matrices for the matrix rate")
    args = parser.parse_args()
    rate = matrix_rate(args.side)
    echo(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {rate / 1e12:.0f} TFLOP/s in bf16 products")
    table = Table("preset", "ms per step", "examples/s", "TFLOP/s", "MFU", "peak GB", "loss, first and last", "run, s")
    for name in [args.only] if args.only else PRESETS:
        overrides = [entry.partition(":")[2] for entry in args.set if entry.partition(":")[0] == name]
        found = measure(name, args.steps, overrides)
        reached = found["flops"] / found["step"]
        table.add_row(
            name,
            f"{1000 * found['step']:.2f}",
            f"{found['per_second']:.0f}",
            f"{reached / 1e12:.0f}",
            f"{reached / rate:.1%}",
            f"{found['gigabytes']:.1f}",
            f"{found['losses'][0]:.3f} {found['losses'][-1]:.3f}" if found["losses"] else "",
            f"{found['seconds']:.0f}",
        )
    echo(table)


if __name__ == "__main__":
    main()
