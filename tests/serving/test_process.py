"""The server as a process: it imports nothing that trains, limits clients, and finishes its requests after SIGTERM."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PATIENCE = 120.0
BODY = np.zeros((1, 8, 8, 1), np.uint8).tobytes()
RAW = {"Content-Type": "application/octet-stream"}


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server and its port."""
    command = [sys.executable, "-m", "jax_trainer", "serve", str(folder), "--port=0", "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, int(json.loads(process.stdout.readline())["address"].rpartition(":")[2])
        finally:
            process.kill()


def post(port: int, body: bytes = BODY) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/predict", body, RAW)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_command_imports_nothing_that_trains():
    script = """
    import sys, jax_trainer.cli.main, jax_trainer.cli.serving
    found = {name.split(".")[1] for name in sys.modules if name.startswith("jax_trainer.")}
    assert not found & {"trainer", "engine", "core", "models", "datasets", "exporting", "pretrained"}, found
    assert not {"flax", "optax", "orbax"} & set(sys.modules)
    """
    lines = "\n".join(line.strip() for line in script.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_requests_are_answered_and_those_that_wait_are_finished_after_sigterm(exported):
    with serving(exported, "--max-delay=1.5") as (process, port):
        answers: list[tuple[int, Any]] = []
        threads = [threading.Thread(target=lambda: answers.append(post(port))) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # all of them wait for others
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(PATIENCE)
        out, err = process.communicate(timeout=PATIENCE)
    assert [status for status, _ in answers] == [200] * 4
    assert (process.returncode, err) == (0, "")
    assert json.loads(out) == {"status": "stopped", "requests": 4, "examples": 4, "failed": 0}


@pytest.mark.slow
def test_slow_clients_and_too_many_connections_do_not_stop_others(exported):
    with serving(exported, "--timeout=1", "--max-connections=3") as (_, port):
        slow = socket.create_connection(("127.0.0.1", port))
        slow.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Le")
        assert post(port)[0] == 200
        slow.settimeout(PATIENCE)
        assert slow.recv(100) == b""  # closed: its request did not arrive in time
        late = socket.create_connection(("127.0.0.1", port))
        late.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 64\r\n\r\nab")
        late.settimeout(PATIENCE)
        assert b" 408 " in late.recv(100)
        open_ = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
        time.sleep(0.2)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 503
        for one in (*open_, slow, late):
            one.close()
        time.sleep(0.2)
        assert post(port)[0] == 200


@pytest.mark.slow
def test_an_address_in_use_and_a_folder_without_an_export_are_explained(exported, tmp_path):
    def failed(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "jax_trainer", "serve", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=dict(os.environ))
        return done.returncode, done.stderr

    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        code, err = failed(str(exported), "--port", port)
        assert code == 1 and port in err and "Traceback" not in err
    code, err = failed(str(tmp_path), "--port", "0")
    assert code == 2 and "export.json" in err
