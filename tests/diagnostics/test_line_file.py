"""A file of lines: what was not written whole is no line, and does not spoil the next."""

import errno
import os

import pytest

from jax_trainer.diagnostics.files import LineFile


@pytest.mark.parametrize("rest", [b"", b"half", b"x" * 200_000])
@pytest.mark.parametrize("lines", [b"", b"one\ntwo\n"])
def test_an_incomplete_last_line_is_cut_off_by_the_next_append(tmp_path, lines, rest):
    path = tmp_path / "lines"
    path.write_bytes(lines + rest)
    assert b"".join(LineFile(path).read()) == lines
    LineFile(path).append([b"three\n"])
    assert path.read_bytes() == lines + b"three\n"


@pytest.mark.parametrize("room", [0, 7])
def test_after_a_failed_append_none_of_its_lines_is_in_the_file(tmp_path, monkeypatch, room):
    file = LineFile(tmp_path / "lines")
    file.append([b"one\n"], sync=True)
    write = os.write

    def full(handle: int, text: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, text[:room])

    monkeypatch.setattr("jax_trainer.diagnostics.files.os.write", full)
    with pytest.raises(OSError, match="No space"):
        file.append([b"two\n", b"three\n"])
    monkeypatch.undo()
    assert file.path.read_bytes() == b"one\n"
    file.append([b"four\n"])
    assert file.read() == [b"one\n", b"four\n"]


def test_a_file_is_cut_only_where_a_line_ends(tmp_path):
    file = LineFile(tmp_path / "lines")
    file.append([b"one\n", b"two\n"])
    for size in (3, 9):
        with pytest.raises(ValueError, match=f"after {size} bytes"):
            file.cut(size)
    file.cut(4)
    assert file.read() == [b"one\n"]
    file.cut(0)
    assert file.read() == []
