"""Starts the real TensorBoard on a folder, and asks it what it shows."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen


@contextmanager
def asking_tensorboard(folder: Path, *, fast: bool = False, until: str = "") -> Iterator[Callable[..., Any]]:
    """A function that asks a page of TensorBoard, which has loaded the tag `until`; `fast`: with its data server."""
    load = f"--load_fast={str(fast).lower()}"
    options = ["--logdir", str(folder), load, "--port=0", "--host=127.0.0.1", "--reload_interval=1"]
    errors = folder / "tensorboard.log"
    with errors.open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *options], stderr=log, stdout=log)
    try:
        address = _address(errors, server)

        def ask(page: str, post: Any = None, **query: str) -> Any:
            body = None if post is None else json.dumps(post).encode()
            where, kind = f"{address}data/plugin/{page}?{urlencode(query)}", {"Content-Type": "application/json"}
            with urlopen(Request(where, body, kind), timeout=30) as answer:
                whole = answer.read()
                return json.loads(whole) if "json" in answer.headers["Content-Type"] else whole

        for _ in range(300):  # it reads in a thread
            if "." in (tags := ask("scalars/tags")) and until in tags["."]:
                break
            time.sleep(0.1)
        yield ask
    finally:
        server.kill()
        server.wait()


def _address(errors: Path, server: subprocess.Popen[bytes]) -> str:
    for _ in range(600):
        if found := re.search(r"http://127\.0\.0\.1:\d+/", errors.read_text()):
            return found[0]
        assert server.poll() is None, errors.read_text()
        time.sleep(0.1)
    raise AssertionError(errors.read_text())
