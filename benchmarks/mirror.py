"""The cost of a mirror: the time until a new machine can resume, and what an upload costs the steps beside it.

    PYTHONPATH=src python benchmarks/mirror.py [--rounds 5] [--steps 40]

The state is a chain of 25 layers of 1024×1024 float32, 105 MB, trained by SGD. The store is a folder (`file://`), and a
server of the S3 protocol in a process of its own, on the loopback: a lower bound without a network.

* resume: uploading the run, then downloading it into an empty folder, verified, and restoring the state.
* overlap: the same steps with a save in every round, without a mirror and with each one, alternating: the median time
  of a step over all rounds, and the mean, which includes the steps during the upload.

Client, server and training share the processor, so figures of a busy or small machine say little. A report, not a test.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from checkpoints import BATCH, WIDTH, chain, step  # the benchmark beside this one

from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.mirror import Mirror
from jax_trainer.checkpoint.remote import pull
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import Position

BUCKET = "runs"
SERVER = """
import sys, time, boto3
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
address = "http://%s:%d" % server.get_host_and_port()
boto3.client("s3", endpoint_url=address).create_bucket(Bucket=sys.argv[1])
print(address, flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of an empty bucket, of a server in another process."""
    os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
    command = [sys.executable, "-c", SERVER, BUCKET]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        os.environ["AWS_ENDPOINT_URL"] = address = server.stdout.readline().strip()
        urllib.request.urlopen(f"{address}/moto-api/").close()
        try:
            yield f"s3://{BUCKET}"
        finally:
            server.stdin.close()
            server.wait(10)


def new_run(folder: Path) -> RunFolder:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}\n")
    return RunFolder(folder)


def timed(function: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = function()
    return time.perf_counter() - started, result


def resume(urls: dict[str, str], folder: Path) -> None:
    state = chain()
    run = new_run(folder / "resume")
    CheckpointStore(run.checkpoints).save(state, Position(1, 0), {})
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)) / 1e6
    print(f"\nresume: {size:.0f} MB, in seconds")
    for name, url in urls.items():
        started = time.process_time()
        up, _ = timed(Mirror(run, f"{url}/resume").sync)
        cpu = time.process_time() - started  # of this process, whatever others do
        copied = RunFolder(folder / f"copied-{name}")
        down, _ = timed(partial(pull, f"{url}/resume", copied))
        restored, (found, _) = timed(lambda run=copied: CheckpointStore(run.checkpoints).restore("latest", state))
        assert all(map(np.array_equal, jax.tree.leaves(found.params), jax.tree.leaves(state.params)))
        reading = f"download {down:.2f}, restore {restored:.2f}, together {down + restored:.2f}"
        print(f"  {name:5} upload {up:.2f} (processor {cpu:.2f}), {reading}")


def overlap(urls: dict[str, str], folder: Path, rounds: int, steps: int) -> None:
    x = jax.random.normal(jax.random.key(2), (BATCH, WIDTH))
    state = jax.block_until_ready(step(chain(), x))
    times: dict[str, list[float]] = {name: [] for name in ("none", *urls)}
    closing: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(rounds + 1):
        for name in times:
            run = new_run(folder / f"overlap-{name}-{number}")
            store = CheckpointStore(run.checkpoints)
            mirror = Mirror(run, f"{urls[name]}/overlap-{number}", timeout=120) if name in urls else None
            if mirror is not None:
                store.after_commit = mirror.wake
                mirror.start()
            found = []
            for index in range(steps):
                if index == 2:
                    store.save(state, Position(1, index), {}, wait=False)
                seconds, state = timed(lambda state=state: jax.block_until_ready(step(state, x)))
                found.append(seconds)
            store.wait()
            if mirror is not None:
                seconds, missing = timed(mirror.close)
                assert not missing, missing
                closing[name].append(seconds)
            if number:  # the first round warms up
                times[name] += found
    print(f"\noverlap: {rounds} rounds of {steps} steps with one save, in milliseconds per step")
    for name, found in times.items():
        rest = f", left to upload at the end {statistics.median(closing[name]):.2f} s" if name in urls else ""
        print(f"  {name:5} median {1e3 * statistics.median(found):.1f}, mean {1e3 * statistics.fmean(found):.1f}{rest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, {jax.devices()[0].device_kind}")
    with tempfile.TemporaryDirectory() as name, s3_server() as bucket:
        folder = Path(name)
        urls = {"file": f"file://{folder}/store", "s3": bucket}
        resume(urls, folder)
        overlap(urls, folder, args.rounds, args.steps)


if __name__ == "__main__":
    main()
