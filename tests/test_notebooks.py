"""Notebooks are built from .py files, run in a real kernel, and survive an interruption."""

import queue
import time
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

SOURCES = sorted((Path(__file__).parent.parent / "notebooks").glob("*.py"))
PATIENCE = 240.0  # seconds

LONG = """
import numpy as np, optax
from flax import nnx
from jax_trainer import fit

x = np.ones((4096, 8), np.float32)
model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
result = fit(model, (x, x[:, :1]), loss_fn=lambda a, b: ((a - b) ** 2).mean(), optimizer=optax.sgd(1e-3), batch_size=4,
             num_epochs=60, tensorboard=False, resume="auto", log_dir="runs", log_name="interrupted")
"""


@pytest.mark.parametrize("source", SOURCES, ids=lambda file: file.stem)
def test_a_notebook_is_built_from_its_source(source: Path):
    built, expected = (nbformat.from_dict(jupytext.read(file)) for file in (source.with_suffix(".ipynb"), source))
    cells = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (built, expected)]
    assert cells[0] == cells[1], f"`jupytext --to ipynb notebooks/*.py` builds {source.stem}.ipynb"


@pytest.mark.example
@pytest.mark.parametrize("source", SOURCES, ids=lambda file: file.stem)
def test_a_notebook_runs_in_a_real_kernel(source: Path, tmp_path: Path):
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(cell.outputs for cell in notebook.cells if cell.cell_type == "code")


def reply_of(client: Any, number: str) -> dict[str, Any]:
    """The reply to an execution, when its cell has ended."""
    while True:
        reply = client.get_shell_msg(timeout=PATIENCE)
        if reply["parent_header"].get("msg_id") == number:
            return reply["content"]


def wait_for_text(client: Any, text: str) -> None:
    """Returns when the cell has shown `text`."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            content = client.get_iopub_msg(timeout=1)["content"]
        except queue.Empty:
            continue
        if text in str(content.get("text", "")) + str(content.get("data", "")):
            return
    raise TimeoutError(text)


@pytest.mark.example
def test_an_interrupted_cell_ends_well_and_can_be_run_again(tmp_path: Path):
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:
        number = client.execute(LONG)
        wait_for_text(client, "epoch  2/")
        manager.interrupt_kernel()
        reply = reply_of(client, number)
        assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
        reply = reply_of(client, client.execute(LONG))
        assert reply["status"] == "ok", reply
        reply = reply_of(
            client,
            client.execute("assert len(result.history) == 60 and len(list(result.folder.parent.iterdir())) == 1"),
        )
        assert reply["status"] == "ok", reply  # the second execution resumed the run of the first
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
