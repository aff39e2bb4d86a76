import io

import pytest
from rich.console import Console

from jax_trainer.callbacks.progress import Screen


def screen_of(*, width: int = 40, **options) -> tuple[Screen, io.StringIO]:
    file = io.StringIO()
    notebook = options.pop("is_notebook", None)
    return Screen(Console(file=file, width=width, **options), notebook), file


def test_a_terminal_clears_the_line_of_the_bar():
    screen, file = screen_of(force_terminal=True)
    screen.show([], "half")
    screen.show(["a line"], "whole")
    assert file.getvalue() == "\r\x1b[2Khalf\r\x1b[2Ka line\nwhole"


def test_a_notebook_is_overwritten_with_spaces():
    screen, file = screen_of(is_notebook=True)
    screen.show([], "a long bar")
    screen.show([], "short")
    screen.show(["line", "another"], "bar")
    screen.show([], "")
    screen.show([], "")
    assert file.getvalue() == "\ra long bar\rshort     \rline \nanother\nbar\r   "


def test_the_console_knows_notebooks():
    screen, file = screen_of(force_jupyter=True)
    screen.show([], "bar")
    assert file.getvalue() == "\rbar"


@pytest.mark.parametrize("lines", [[], ["one", "two"]])
def test_a_file_gets_lines_only(lines):
    screen, file = screen_of()
    screen.show(lines, "bar")
    assert file.getvalue() == "".join(f"{line}\n" for line in lines)


def test_a_bar_is_cut_to_the_width_of_the_screen():
    screen, file = screen_of(force_terminal=True, width=10)
    screen.show(["a line that may be long"], "0123456789")
    assert file.getvalue().endswith("may be long\n012345678")
