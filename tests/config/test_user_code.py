import copy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from compoconf import Registry, registered

from jax_trainer.config import ConfigError, UserCodeError, config_from, import_installed_projects, import_user_code
from jax_trainer.config.describing import describe
from jax_trainer.config.registration import unavailable
from tests.config.config_things import Sketch
from tests.rows import each

OWN = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.config.settings import AtLeast, Settings


@register_interface
class {name}Part(RegistrableConfigInterface):
    """A part."""


@dataclass
class {name}Config(Settings):
    """Its configuration.

    Args:
        size: how large.
    """

    size: Annotated[int, AtLeast(1)] = 1


@register
class {name}({name}Part):
    """One of my own."""

    config: {name}Config


@dataclass
class {name}Root(Settings):
    part: {name}Part.cfgtype | None = None
'''


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing that was imported or registered stays, and imports come from an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(Registry, "_registries", copy.deepcopy(Registry._registries))
    monkeypatch.setattr(Registry, "_registry_classes", copy.copy(Registry._registry_classes))
    yield
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def test_a_file_registers_its_classes_also_with_annotations_as_text(tmp_path: Path):
    file = tmp_path / "sketch_user_file.py"
    file.write_text(OWN.format(name="SketchMine"))
    import_user_code(file)
    module = sys.modules["sketch_user_file"]
    assert registered(module.SketchMinePart) == ["SketchMine"]
    made = config_from({"part": {"class_name": "SketchMine", "size": 3}}, module.SketchMineRoot)
    assert made.part == module.SketchMineConfig(3)
    with pytest.raises(ConfigError, match="part.size: .* 1, found 0"):
        config_from({"part": {"size": 0}}, module.SketchMineRoot)
    (key,) = describe(module.SketchMinePart, module.SketchMine).keys
    assert key.help == "how large."


def test_a_module_is_found_by_its_name_in_this_folder(tmp_path: Path):
    package = tmp_path / "sketch_user_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "models.py").write_text(OWN.format(name="SketchYours"))
    (package / "script.py").write_text("raise SystemExit('not to be run')")
    import_user_code("sketch_user_package.models")
    import_user_code("sketch_user_package")
    assert registered(sys.modules["sketch_user_package.models"].SketchYoursPart) == ["SketchYours"]
    assert "sketch_user_package.script" not in sys.modules


def test_importing_twice_is_harmless(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "sketch_user_twice.py"
    file.write_text(OWN.format(name="SketchTwice"))
    import_user_code(file)
    first = sys.modules["sketch_user_twice"]
    import_user_code("sketch_user_twice.py")
    import_user_code("sketch_user_twice")
    assert sys.modules["sketch_user_twice"] is first
    assert not caplog.records


@each(
    "what, message",
    [
        ("module_of_nobody", "No module 'module_of_nobody' to import."),
        ("module_of_nobody.models", "No module 'module_of_nobody.models' to import."),
        ("json.models_of_nobody", "No module 'json.models_of_nobody' to import."),
        ("file_of_nobody.py", "File not found: file_of_nobody.py."),
        ("", "No module '' to import."),
        (".relative", "No module '.relative' to import."),
        ("../x", "No module '../x' to import."),
        ("a b", "No module 'a b' to import."),
        ("os:system", "No module 'os:system' to import."),
    ],
)
def test_code_that_is_not_there_is_named(what: str, message: str):
    with pytest.raises(UserCodeError, match=message.replace("..", "[.][.]")):
        import_user_code(what)


def test_a_file_does_not_take_the_name_of_another_module(tmp_path: Path):
    for name in ("json", "this", "tests"):  # the second is not imported yet
        file = tmp_path / f"{name}.py"
        file.write_text("raise SystemExit('not to be run')")
        with pytest.raises(UserCodeError, match=f"'{name}'.*another module.*Rename the file"):
            import_user_code(file)
    assert "this" not in sys.modules


def test_two_files_of_one_name_are_not_mixed_up(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "sketch_user_twin.py").write_text("")
    import_user_code("a/sketch_user_twin.py")
    with pytest.raises(UserCodeError, match="Rename the file"):
        import_user_code("b/sketch_user_twin.py")


def test_a_folder_of_that_name_is_no_module(tmp_path: Path):
    (tmp_path / "sketch_user_folder").mkdir()
    (tmp_path / "code").mkdir()
    sys.path.insert(0, str(tmp_path))
    (tmp_path / "code" / "sketch_user_folder.py").write_text("x = 1")
    import_user_code("code/sketch_user_folder.py")
    assert sys.modules["sketch_user_folder"].x == 1


def test_any_name_of_a_file_will_do(tmp_path: Path):
    (tmp_path / "my models-2.py").write_text("x = 1")
    import_user_code(tmp_path / "my models-2.py")
    assert sys.modules["my models-2"].x == 1


@pytest.mark.parametrize(
    "text", ["def wrong():\n    return 1 / 0\n\n\nwrong()\n", "import module_of_nobody\n", "x = (\n"]
)
@pytest.mark.parametrize("by_name", [True, False])
def test_an_error_inside_of_it_keeps_its_traceback_and_a_second_try_tries_again(
    tmp_path: Path, text: str, by_name: bool
):
    file = tmp_path / "sketch_user_wrong.py"
    file.write_text(text)
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, ModuleNotFoundError, SyntaxError)) as caught:
            import_user_code("sketch_user_wrong" if by_name else file)
        assert not isinstance(caught.value, UserCodeError)
        assert "sketch_user_wrong.py" in "".join(traceback.format_exception(caught.value))
        assert "sketch_user_wrong" not in sys.modules


def test_nothing_is_imported_for_a_class_that_is_not_known(tmp_path: Path):
    (tmp_path / "sketch_user_lure.py").write_text("raise SystemExit('not to be run')")
    sys.path.insert(0, str(tmp_path))
    for name in ("sketch_user_lure", "sketch_user_lure.SketchMine", "sketch_user_lure:SketchMine"):
        with pytest.raises(ConfigError, match="shape.class_name"):
            config_from({"shape": {"class_name": name}}, Sketch)
    assert "sketch_user_lure" not in sys.modules


def installed(folder: Path, name: str, text: str) -> None:
    """What `pip install` leaves of a project with an entry point for us."""
    (folder / f"{name}.py").write_text(text)
    (folder / f"{name}-1.dist-info").mkdir()
    (folder / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (folder / f"{name}-1.dist-info" / "entry_points.txt").write_text(f"[jax_trainer]\n{name} = {name}\n")


def test_installed_projects_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "installed_project", "SEEN = 1\n")
    import_installed_projects()
    assert sys.modules["installed_project"].SEEN == 1


@pytest.mark.parametrize("text", [None, "import module_of_nobody\n", "x = (\n", "1 / 0\n"])
def test_a_project_that_cannot_be_imported_is_named_once_and_where_a_class_is_missing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.syspath_prepend(tmp_path)
    unavailable.clear()
    installed(tmp_path, "lost_project", text or "")
    installed(tmp_path, "found_project", "SEEN = 1\n")
    if text is None:
        (tmp_path / "lost_project.py").unlink()
    for _ in range(2):
        import_installed_projects()
    assert sys.modules["found_project"].SEEN == 1
    [warning] = caplog.messages
    assert "lost_project" in warning and "Error" in warning
    assert config_from({"shape": {"class_name": "SketchCircle", "radius": 1}}, Sketch)
    with pytest.raises(ConfigError, match=r"(?s)'SketchCircel'.*`SketchCircle`.*lost_project"):
        config_from({"shape": {"class_name": "SketchCircel"}}, Sketch)
    (tmp_path / "lost_project.py").write_text("")
    import_installed_projects()
    with pytest.raises(ConfigError, match="'SketchCircel'") as caught:
        config_from({"shape": {"class_name": "SketchCircel"}}, Sketch)
    assert "lost_project" not in str(caught.value)
