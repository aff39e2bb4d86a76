from pathlib import Path

import pytest

from jax_trainer.checkpoint import safe_join
from tests.rows import noted_row


def test_an_ordinary_name_is_a_path_directly_inside_the_root(tmp_path_factory: pytest.TempPathFactory):
    for name in ["run", "run-1", "20261115-142311", ".hidden", "a.b.c", "é", "🚀👩‍🚀", "CON", "C:x", "a b", "x" * 200]:
        with noted_row(name):
            tmp_path = tmp_path_factory.mktemp("row")
            path = safe_join(tmp_path, name)
            assert path.parent == tmp_path
            path.mkdir()
            assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_name_that_could_leave_the_root_is_an_error_with_the_reason(tmp_path):
    for name, reason in [
        ("", "is empty"),
        (".", "another folder"),
        ("..", "another folder"),
        ("../../x", "separator"),
        ("/etc/passwd", "separator"),
        ("a/b", "separator"),
        ("a\\b", "separator"),
        ("a\0b", "control character"),
        ("a\nb", "control character"),
        ("a\x7f", "control character"),
        ("a\u2028b", "control character"),
        ("run.", "dot or a space"),
        ("run ", "dot or a space"),
        ("...", "dot or a space"),
        ("x" * 201, "201 bytes"),
        ("🚀" * 51, "204 bytes"),
        ("\udc80", "not valid Unicode"),
        (3, "type int"),
        (Path("x"), "type PosixPath"),
    ]:
        with noted_row(name, reason):
            with pytest.raises(ValueError, match=reason) as error:
                safe_join(tmp_path, name)
            assert "Use letters, digits" in str(error.value)


def test_the_error_shows_the_name_shortened_and_on_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"^'a\\na\\n.*\.\.\..*' cannot") as error:
        safe_join(tmp_path, "a\n" * 5000)
    assert len(str(error.value)) < 300 and "\n" not in str(error.value)


def test_a_link_that_leaves_the_root_is_rejected_and_one_inside_is_not(tmp_path):
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "away").symlink_to(tmp_path)
    (root / "to-inside").symlink_to(root / "inside")
    assert safe_join(root, "to-inside") == root / "to-inside"
    with pytest.raises(ValueError, match="'away'.*link"):
        safe_join(root, "away")


def test_a_root_that_is_itself_a_link_is_fine(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    assert safe_join(tmp_path / "root", "run") == tmp_path / "root" / "run"
