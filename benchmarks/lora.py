"""Memory and speed of LoRA against training all parameters: a decoder of 1 billion parameters, computed in bf16.

    PYTHONPATH=src python benchmarks/lora.py [--batch 8] [--context 1024] [--steps 20] [--only lora full] [--tiny]

Each row is a process of its own. Predicted is what the preflight reads from XLA's analysis of the compiled step, before
any array exists; measured is `memory_stats()["peak_bytes_in_use"]` after the steps, on devices that have it. Weights
and tokens are random: that changes neither the memory nor the time of a step. "bits" says whether the loss before the
first update is that of the base, to the bit. `--tiny` tries the script on a CPU, with a tiny model. A report, not a
test.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import optax

from jax_trainer.adapters import nnx_program
from jax_trainer.core import LoRA, MetricWindow, compile_program
from jax_trainer.core.memory import readable_bytes
from jax_trainer.datasets import Data
from jax_trainer.engine import Plan, preflight
from jax_trainer.models import Decoder, DecoderConfig
from jax_trainer.models.token_loss import cross_entropy

BILLION: dict[str, Any] = {
    "vocab_size": 32_000,
    "layers": 18,
    "heads": 16,
    "width": 2048,
    "hidden": 5504,
    "remat": True,
}
TINY: dict[str, Any] = {"vocab_size": 256, "layers": 2, "heads": 2, "width": 32, "hidden": 64, "remat": True}
PARTS = ("params", "frozen", "opt_state")
ATTENTION, ALL = ".*(query|value).kernel", ".*kernel"
ROWS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"match": ATTENTION},
    "lora, dropout": {"match": ATTENTION, "dropout": 0.05},
    "lora, all kernels": {"match": ALL},
    "lora, base in bf16": {"match": ATTENTION, "base_dtype": "bfloat16"},
}


def measured(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    sizes = TINY if args.tiny else BILLION
    config, rank = DecoderConfig(**sizes, context=args.context), 4 if args.tiny else 16
    tokens = np.random.default_rng(0).integers(0, sizes["vocab_size"], (args.batch, args.context + 1), np.int32)
    batch, key = (tokens[:, :-1], tokens[:, 1:]), jax.random.key(0)

    def loss(model: Any, batch: Any, train: bool) -> jax.Array:
        return cross_entropy(model(batch[0]), batch[1]).mean()

    def program(lora: dict[str, Any] | None) -> Any:
        options: dict[str, Any] = {"lora": None if lora is None else LoRA(rank=rank, alpha=2.0 * rank, **lora)}
        made = nnx_program(
            lambda rngs: Decoder(config, rngs=rngs), loss, optax.adamw(1e-4), precision="bf16", **options
        )
        return compile_program(made)

    compiled = program(ROWS[name])
    predicted = preflight(compiled, Data.of([batch]), Plan(max_steps=args.steps), batch, key)
    state = compiled.init(key, batch)
    sums = {part: sum(leaf.nbytes for leaf in jax.tree.leaves(getattr(state, part))) for part in PARTS}
    buffer = compiled.train_buffer(state, batch, args.steps + 3)
    placed = compiled.place(batch, stacked=False, prefetch=True)
    state, buffer, _ = compiled.train_step(state, buffer, placed)
    first = float(MetricWindow(1, buffer.format, np.asarray(buffer.rows)).values_of("loss")[-1])
    for _ in range(2):
        state, buffer, _ = compiled.train_step(state, buffer, placed)
    jax.block_until_ready(state)
    start = time.perf_counter()
    for _ in range(args.steps):
        state, buffer, _ = compiled.train_step(state, buffer, placed)
    jax.block_until_ready(state)
    seconds = (time.perf_counter() - start) / args.steps
    stats = jax.devices()[0].memory_stats() or {}
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    return {
        "row": name,
        "trained": count,
        **sums,
        "predicted": predicted.needed_bytes,
        "measured": stats.get("peak_bytes_in_use"),
        "tokens/s": args.batch * args.context / seconds,
        "first": first,
    }


def main() -> None:
    """Prints one table; each row in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.batch, args.context, args.steps = min(args.batch, 2), min(args.context, 32), min(args.steps, 3)
    if args.row:
        print(json.dumps(measured(args.row, args)))
        return
    found = []
    for name in args.only:
        result = subprocess.run(
            [sys.executable, *sys.argv, "--row", name], stdout=subprocess.PIPE, text=True, check=False
        )
        if result.returncode:
            print(f"{name}: failed, see above", file=sys.stderr)
            continue
        found.append(json.loads(result.stdout.splitlines()[-1]))
    base = next((one["first"] for one in found if one["row"] == "full"), None)
    head = ("", "trained", "params", "frozen", "opt_state", "predicted", "measured", "tokens/s", "bits")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for one in found:
        sizes = [readable_bytes(one[part]) for part in (*PARTS, "predicted")]
        peak = "–" if one["measured"] is None else readable_bytes(one["measured"])
        same = (
            ""
            if one["row"] == "full" or base is None
            else "same"
            if one["first"] == base
            else f"{one['first']} ≠ {base}"
        )
        print(f"| {one['row']} | {one['trained']:,} | {' | '.join(sizes)} | {peak} | {one['tokens/s']:,.0f} | {same} |")


if __name__ == "__main__":
    main()
