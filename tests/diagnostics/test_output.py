import errno
import io
import os
import sys

import pytest

from jax_trainer.diagnostics.output import ERR, SafeStream, reserve_standard_streams, safe_console


def test_a_failed_write_is_dropped_and_recorded():
    with open("/dev/full", "w") as full:
        stream = SafeStream(lambda: full)
        assert stream.write("text") == 4
        full.flush()  # the buffer is empty, so this does not fail
        assert isinstance(stream.failure, OSError)
        assert stream.failure.errno == errno.ENOSPC


def test_a_broken_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        stream = SafeStream(lambda: pipe)
        stream.write("text")
        assert isinstance(stream.failure, BrokenPipeError)


@pytest.mark.parametrize("closed", [True, False])
def test_a_closed_or_missing_stream_is_no_error(closed, tmp_path):
    file = (tmp_path / "file").open("w") if closed else None
    if file is not None:
        file.close()
    stream = SafeStream(lambda: file)
    stream.write("text")
    stream.flush()
    assert not stream.isatty()
    assert (stream.failure is not None) == closed


def test_a_safe_stream_writes_to_the_current_standard_error(monkeypatch):
    captured = io.StringIO()
    monkeypatch.setattr(sys, "stderr", captured)
    ERR.write("one ")
    safe_console().print("two")
    assert captured.getvalue() == "one two\n"


class Notebook(io.StringIO):
    """As in ipykernel: the descriptor is that of the server's output."""

    def fileno(self) -> int:
        return self.server

    server: int


def test_notebook_output_does_not_go_to_the_log_of_its_server(tmp_path):
    with (tmp_path / "server").open("w") as server:
        notebook = Notebook()
        notebook.server = server.fileno()
        SafeStream(lambda: SafeStream(lambda: notebook)).write("a line")  # type: ignore[arg-type,return-value]
    assert (notebook.getvalue(), (tmp_path / "server").read_text()) == ("a line", "")


def test_characters_that_cannot_be_encoded_are_replaced(tmp_path):
    with (tmp_path / "file").open("w", encoding="ascii") as file:
        SafeStream(lambda: file).write("━ done\n")
    assert (tmp_path / "file").read_text() == "? done\n"


def test_no_file_gets_the_descriptor_of_a_closed_standard_stream(tmp_path):
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
