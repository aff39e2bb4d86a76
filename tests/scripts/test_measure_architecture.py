"""The counts of source text; `make measure` runs the rest."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "scripts" / "measure_architecture.py"
spec = importlib.util.spec_from_file_location("measure_architecture", FILE)
assert spec is not None and spec.loader is not None
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

MODULE = '''"""A docstring
of two lines."""

import jax  # a comment

TEXT = """counts:
two lines"""


# jax.process_count in a comment
class Outer:
    """A docstring."""

    def method(self):
        """A docstring with process_index."""
        def nested(): return jax.tree

        return nested
'''


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert script.size_of(MODULE) == script.Size(files=1, all_lines=18, lines=7, classes=1, functions=2, imports=1)


def test_a_raise_and_the_condition_that_only_raises_are_lines_of_checks():
    text = "if a:\n    raise ValueError(\n        a\n    )\nif b:\n    b()\n    raise b\n"
    assert (script.size_of(text).lines, script.size_of(text).checks) == (7, 5)


def test_a_package_is_the_sum_of_its_files(tmp_path):
    (tmp_path / "core" / "deep").mkdir(parents=True)
    (tmp_path / "core" / "one.py").write_text("a = 1\n")
    (tmp_path / "core" / "deep" / "two.py").write_text("b = 1\nc = 2\n")
    (tmp_path / "single.py").write_text("def f(): pass\n")
    code = script.measure_code(tmp_path)
    assert code.packages == {"core": script.Size(2, 3, 3, 0, 0), "single files": script.Size(1, 1, 1, 0, 1)}
    assert code.total == script.Size(3, 4, 4, 0, 1)


def test_only_names_tell_that_a_file_knows_of_processes():
    assert not script.knows_processes(MODULE)
    assert script.knows_processes("n = jax.process_count()")
    assert script.knows_processes("self._process_group = None")


def test_files_outside_the_model_packages_that_import_linen_or_nnx_are_listed(tmp_path):
    for package, text in {
        "adapters": "from flax import nnx",
        "trainer": "def f():\n    from flax import linen as nn",
        "styles": "import flax.nnx",
        "core": "import flax",
    }.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "file.py").write_text(text)
    assert script.measure_code(tmp_path).flax_files == ["styles/file.py", "trainer/file.py"]


def test_the_section_of_the_page_is_appended_once_and_then_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n")
    script.write_section(page, "old")
    script.write_section(page, "new")
    text = page.read_text()
    assert text.startswith("# Page\n\n## Measured\n")
    assert text.count(script.BEGIN) == text.count(script.END) == 1
    assert "new" in text and "old" not in text


def test_the_library_grows_in_no_measure():
    limits = {"lines": 38_000, "files": 263, "classes": 723, "functions": 4_142}  # which only ever go down
    total = script.measure_code(FILE.parents[1] / "src" / "jax_trainer").total
    assert {name: getattr(total, name) for name in limits if getattr(total, name) > limits[name]} == {}
