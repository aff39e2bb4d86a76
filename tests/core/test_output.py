import errno
import io
import os
import sys

import pytest

from jax_trainer.core.output import ERR, SafeStream, reserve_standard_streams, safe_console


def test_what_cannot_be_written_is_left_out_and_remembered():
    with open("/dev/full", "w") as full:
        stream = SafeStream(lambda: full)
        assert stream.write("text") == 4
        full.flush()  # nothing stays behind that would fail now
        assert isinstance(stream.failure, OSError)
        assert stream.failure.errno == errno.ENOSPC


def test_a_reader_that_left_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        stream = SafeStream(lambda: pipe)
        stream.write("text")
        assert isinstance(stream.failure, BrokenPipeError)


@pytest.mark.parametrize("closed", [True, False])
def test_a_stream_that_is_closed_or_was_never_there_is_no_error(closed, tmp_path):
    file = (tmp_path / "file").open("w") if closed else None
    if file is not None:
        file.close()
    stream = SafeStream(lambda: file)
    stream.write("text")
    stream.flush()
    assert not stream.isatty()
    assert (stream.failure is not None) == closed


def test_it_writes_to_what_is_standard_error_now(monkeypatch):
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stderr", captured)
    ERR.write("one ")
    safe_console().print("two")
    assert captured.getvalue() == "one two\n"


class Notebook(io.StringIO):
    """As in ipykernel: the number is that of what the kernel was started with."""

    def fileno(self) -> int:
        return self.server

    server: int


def test_what_is_shown_in_a_notebook_does_not_go_to_the_log_of_its_server(tmp_path):
    with (tmp_path / "server").open("w") as server:
        notebook = Notebook()
        notebook.server = server.fileno()
        SafeStream(lambda: SafeStream(lambda: notebook)).write("a line")  # type: ignore[arg-type,return-value]
    assert (notebook.getvalue(), (tmp_path / "server").read_text()) == ("a line", "")


def test_letters_that_a_stream_does_not_know_are_replaced(tmp_path):
    with (tmp_path / "file").open("w", encoding="ascii") as file:
        SafeStream(lambda: file).write("━ done\n")
    assert (tmp_path / "file").read_text() == "? done\n"


def test_no_file_gets_the_number_of_a_standard_stream_that_is_closed(tmp_path):
    kept = os.dup(0)
    try:
        os.close(0)
        reserve_standard_streams()
        assert os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
        with (tmp_path / "file").open("w") as file:
            assert file.fileno() > 2
    finally:
        os.dup2(kept, 0)
        os.close(kept)
