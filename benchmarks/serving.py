"""Requests per second of a server on the loopback, and their latency, with and without joining requests to batches.

    python benchmarks/serving.py                     # an untrained CNN for the 8×8 digits
    python benchmarks/serving.py EXPORT --seconds 10

Clients are threads of another process, each with one connection that sends its next request after an answer.
"""

import argparse
import http.client
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

CONNECTIONS = (1, 8, 32)
UNJOINED = ("--max-batch=1",)


def exported(folder: Path) -> Path:
    """An export of a model with weights that are not trained."""
    import optax

    from jax_trainer.datasets.examples import DigitsConfig, DigitsDataset
    from jax_trainer.exporting import export_run
    from jax_trainer.models import CNNConfig
    from jax_trainer.trainer import ImgClassifierTrainer

    data = DigitsDataset(DigitsConfig(global_batch_size=64))
    trainer = ImgClassifierTrainer(model_config=CNNConfig(), optimizer=optax.sgd(0.1), dataset=data)
    return export_run(trainer, folder / "digits", verify=False).path


def load(port: int, connections: int, seconds: float, body: bytes, results: Any) -> None:
    """Sends requests for some seconds; puts the latencies into `results`."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    def client() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while (started := time.perf_counter()) < end:
            connection.request("POST", "/predict", body, {"Content-Type": "application/octet-stream"})
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {content[:200]!r}")
            latencies.append(time.perf_counter() - started)

    threads = [threading.Thread(target=client) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(latencies)


def measured(folder: Path, options: tuple[str, ...], seconds: float) -> list[dict[str, float]]:
    """Figures for each number of connections."""
    manifest = json.loads((folder / "export.json").read_text())
    (spec,) = manifest["inputs"]
    body = np.zeros((1, *spec["shape"][1:]), spec["dtype"]).tobytes()
    command = [sys.executable, "-m", "jax_trainer", "serve", str(folder), "--port=0", "--json", *options]
    rows = []
    context = multiprocessing.get_context("spawn")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(json.loads(server.stdout.readline())["address"].rpartition(":")[2])
        for connections in CONNECTIONS:
            results = context.Queue()
            for length in (0.5, seconds):  # the first is a warm-up
                process = context.Process(target=load, args=(port, connections, length, body, results))
                process.start()
                latencies = np.array(results.get())
                process.join()
            p50, p99 = np.quantile(latencies, [0.5, 0.99]) * 1e3
            rows.append({"connections": connections, "requests/s": len(latencies) / seconds, "p50": p50, "p99": p99})
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return rows


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", nargs="?", type=Path, help="folder of an export (default: an untrained CNN)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = exported(Path(name)) if args.export is None else args.export
        print(f"{'batching':>10} {'connections':>12} {'requests/s':>12} {'p50 ms':>9} {'p99 ms':>9}")
        for label, options in (("joined", ()), ("one by one", UNJOINED)):
            for row in measured(folder, options, args.seconds):
                figures = f"{row['connections']:>12} {row['requests/s']:>12.0f} {row['p50']:>9.2f} {row['p99']:>9.2f}"
                print(f"{label:>10} {figures}")


if __name__ == "__main__":
    main()
