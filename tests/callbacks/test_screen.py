import io

import nbformat
import pytest
from nbclient import NotebookClient
from rich.console import Console

from jax_trainer.callbacks.screen import NOTEBOOK_LINES, NotebookScreen, Screen, screen_of
from tests.rows import noted_row


def screen_in(*, width: int = 40, **options) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    return screen_of(Console(file=file, width=width, **options)), file


def notebook() -> tuple[NotebookScreen, list[str]]:
    shown: list[str] = []
    return NotebookScreen(Console(file=io.StringIO()), shown.append), shown


def test_a_terminal_clears_the_line_of_the_bar():
    screen, file = screen_in(force_terminal=True)
    screen.show([], "half")
    screen.show(["a line"], "whole")
    assert file.getvalue() == "\r\x1b[2Khalf\r\x1b[2Ka line\nwhole"


def test_the_console_knows_notebooks():
    assert isinstance(screen_in(force_jupyter=True)[0], NotebookScreen)
    assert not isinstance(screen_in(force_terminal=True)[0], NotebookScreen)


def test_a_notebook_has_one_output_with_the_title_the_latest_lines_and_the_bar():
    screen, shown = notebook()
    screen.show(["title", "line 0"], "bar")
    assert shown == ["title\nline 0\nbar"]
    for number in range(1, 50):
        screen.show([f"line {number}"], "bar")
    title, earlier, *lines, bar = shown[-1].split("\n")
    assert (title, bar, lines[-1], len(lines)) == ("title", "bar", "line 49", NOTEBOOK_LINES)
    assert str(50 - NOTEBOOK_LINES) in earlier
    screen.show([], "")
    assert shown[-1].split("\n")[-1] == "line 49"  # no bar at the end


def test_a_file_gets_lines_only():
    for lines in [[], ["one", "two"]]:
        with noted_row(lines):
            screen, file = screen_in()
            screen.show(lines, "bar")
            assert file.getvalue() == "".join(f"{line}\n" for line in lines)


def test_a_bar_is_cut_to_the_width_of_the_screen():
    screen, file = screen_in(force_terminal=True, width=10)
    screen.show(["a line that may be long"], "0123456789")
    assert file.getvalue().endswith("may be long\n012345678")


CELL = """
import numpy as np, optax
from jax_trainer import FunctionModel, fit

def loss_fn(logits, labels):
    return ((logits - labels) ** 2).mean()

model = FunctionModel(lambda key, x: np.zeros(()), lambda w, x: w * x)
data = np.ones(64, np.float32)
fit(model, (data, data), (data, data), loss_fn=loss_fn, optimizer=optax.sgd(0.1), batch_size=1, num_epochs=30,
    tensorboard=False, save=False)
"""


@pytest.mark.slow
def test_a_cell_of_a_real_notebook_has_one_output_without_widgets(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    progress, result = notebook.cells[0].outputs
    assert (progress.output_type, result.output_type) == ("display_data", "execute_result")
    assert progress.data.keys() == {"text/plain", "text/html"}
    title, earlier, *lines = progress.data["text/plain"].split("\n")
    assert title.startswith("Run folder: runs/fit/") and "earlier" in earlier
    assert len(lines) == NOTEBOOK_LINES and lines[-1].startswith("epoch 30/30  step 1920  train loss")
