"""Several processes: the same script as each of them; together they train one model on one batch.

    python examples/several_processes.py                  # starts two processes of itself on this machine

Each process loads its part of every batch and has its own devices; all hold the same weights. On a cluster, `srun` or
`mpirun` starts the processes instead, and `join()` without arguments finds the others.
"""
# Expected: the same loss in both processes, after about 15 s on two CPU cores.

import argparse
import json
import os
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jax_trainer import fit, load_digits
from jax_trainer.sharding import Job, join, leave


def train(epochs: int, out: str) -> dict[str, Any]:
    """What every process runs."""
    digits = load_digits()["train"]
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))
    data = digits["image"].reshape(-1, 64)[:1408].astype(np.float32) / 16, digits["label"][:1408]
    loss = optax.softmax_cross_entropy_with_integer_labels
    options: dict[str, Any] = {"num_epochs": epochs, "batch_size": 64, "mesh": {"data": -1}, "log_dir": out}
    options |= {"progress": False, "save": False, "tensorboard": False}
    result = fit(model, data, loss_fn=loss, optimizer=optax.adam(3e-3), **options)
    return {"process": jax.process_index(), "devices": jax.device_count(), "loss": result.history[epochs]["train/loss"]}


def main(epochs: int = 5, out: str = "runs", processes: int = 2) -> list[dict[str, Any]]:
    """Starts the processes, and returns what each of them reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, "--epochs", str(epochs), "--out", out, "--coordinator", address]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # one CPU device each
    each = [[*command, "--process", str(n), "--processes", str(processes)] for n in range(processes)]
    started = [subprocess.Popen(one, env=environment, stdout=subprocess.PIPE, text=True) for one in each]
    texts = [one.communicate()[0] for one in started]
    if any(one.returncode for one in started):
        raise RuntimeError(f"A process failed: exit codes {[one.returncode for one in started]}.")
    return [json.loads(text.splitlines()[-1]) for text in texts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--coordinator")
    parser.add_argument("--process", type=int)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.coordinator is None:
        print(main(args.epochs, args.out, args.processes))
    else:
        join(Job(coordinator=args.coordinator, processes=args.processes, process=args.process))
        print(json.dumps(train(args.epochs, args.out)))
        leave(15.0)
