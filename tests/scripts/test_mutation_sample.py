"""The table of faults fits the sources; `scripts/mutation_sample.py` runs them."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "mutation_sample.py"
spec = importlib.util.spec_from_file_location("mutation_sample", FILE)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = script
spec.loader.exec_module(script)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / script.PACKAGE / "core"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("def one(a):\n    if a > 0:\n        return 1\n    return 2\n")
    return tmp_path


def test_every_fault_has_its_place_and_its_tests():
    assert len(script.FAULTS) >= 40
    assert sum(len(fault.changes) for fault in script.FAULTS) == script.TABLE.count("\n- ")
    assert list(script.problems()) == []


def test_a_fault_is_seeded_whatever_the_white_space(tree: Path):
    fault = script.Fault("core", "name", "", (("if a > 0: return 1", "if a >= 0: return 1"),))
    file, text = script.mutated(tree, fault)
    assert file == script.PACKAGE / "core" / "one.py"
    assert text == "def one(a):\n    if a >= 0:\n        return 1\n    return 2\n"


@pytest.mark.parametrize(("old", "found"), [("return", "core/one.py"), ("return 3", r"'return 3': \[\]")])
def test_text_that_does_not_occur_once_is_an_error_that_names_the_fault(tree: Path, old: str, found: str):
    with pytest.raises(script.AnchorError, match=f"some-name.*{found}"):
        script.mutated(tree, script.Fault("core", "some-name", "", ((old, ""),)))
