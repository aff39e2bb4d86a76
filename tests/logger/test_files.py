import os

import pytest

from jax_trainer.logger.jsonl import file_name_of, write_in_folder
from tests.rows import noted_row

ODD = ["../../x", "/abs", "a/b", "a\0b", "..", ".", "", "x" * 5000, "🙂" * 200, "a\nb", "C:\\x", "\ud800", ".hidden"]


def test_any_name_gives_a_file_in_its_folder(tmp_path_factory: pytest.TempPathFactory):
    for name in ODD:
        with noted_row(name):
            tmp_path = tmp_path_factory.mktemp("row")
            file = tmp_path / f"{file_name_of(name)}_123456.png"
            write_in_folder(file, b"x")
            assert [path.name for path in tmp_path.iterdir()] == [file.name]
            assert file.resolve().parent == tmp_path and not file.name.startswith(".")


def test_long_names_that_differ_at_their_ends_stay_different():
    assert file_name_of("a" * 300 + "1") != file_name_of("a" * 300 + "2")


def test_ordinary_names_keep_their_letters():
    assert file_name_of("val/größe-1.5") == "val_größe-1.5"


def test_a_folder_is_made_but_not_the_one_around_it(tmp_path):
    write_in_folder(tmp_path / "media" / "a", b"x")
    with pytest.raises(FileNotFoundError):
        write_in_folder(tmp_path / "gone" / "media" / "a", b"x")


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other").write_text("mine")
    os.symlink(tmp_path / "other", tmp_path / "a")
    write_in_folder(tmp_path / "a", b"x")
    assert (tmp_path / "other").read_text() == "mine"
    assert (tmp_path / "a").read_bytes() == b"x" and not (tmp_path / "a").is_symlink()


def test_a_write_that_fails_leaves_no_file(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the system
        write_in_folder(tmp_path / "a", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
