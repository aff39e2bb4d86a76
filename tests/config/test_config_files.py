import os
import threading
from pathlib import Path
from typing import Any

import pytest

from jax_trainer.config import ConfigError, load_config
from tests.config.config_things import (
    Sketch,
    SketchCircleConfig,
    SketchSquareConfig,
    complaint,
    complaints,
    sketch,
    written,
)
from tests.rows import each

BASE = "title: base\npages: 3\npaper: {width: 100, height: 50}\nshape: {class_name: SketchCircle, radius: 2.0}\n"


def test_a_file_begins_with_what_it_includes_and_changes_it(tmp_path: Path):
    written(tmp_path, BASE, "base.yaml")
    made = sketch(tmp_path, "include: base.yaml\npages: 4\npaper: {height: 60}\nshape: {radius: 3.0}\n")
    assert (made.title, made.pages, made.paper.width, made.paper.height) == ("base", 4, 100, 60)
    assert made.shape == SketchCircleConfig(radius=3.0)


def test_another_class_replaces_a_section_as_a_whole(tmp_path: Path):
    written(tmp_path, BASE, "base.yaml")
    made = sketch(tmp_path, "include: base.yaml\nshape: {class_name: SketchSquare, side: 1}\n")
    assert made.shape == SketchSquareConfig(side=1.0)


def test_a_value_and_null_replace_a_section(tmp_path: Path):
    written(tmp_path, "grey: {class_name: SketchLine}\nshape: {class_name: SketchLine}\n", "base.yaml")
    made = sketch(tmp_path, "include: base.yaml\ngrey: 0.5\nshape:\n")
    assert (made.grey, made.shape) == (0.5, None)


def test_of_several_included_files_the_later_one_counts(tmp_path: Path):
    written(tmp_path, "title: one\npages: 1\n", "one.yaml")
    written(tmp_path, "title: two\nscale: 2\n", "two.yml")
    made = sketch(tmp_path, "include: [one.yaml, two.yml]\n")
    assert (made.title, made.pages, made.scale) == ("two", 1, 2.0)


def test_included_files_are_found_beside_the_file_that_includes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    written(tmp_path, "title: top\n", "top.yaml")
    written(tmp_path, "include: ../top.yaml\npages: 7\n", "deep/middle.yaml")
    written(tmp_path, "include: ../middle.yaml\nscale: 2\n", "deep/er/sketch.yaml")
    monkeypatch.chdir(tmp_path / "deep")
    made = load_config("er/sketch.yaml", Sketch).value
    assert (made.title, made.pages, made.scale) == ("top", 7, 2.0)


def test_a_problem_in_an_included_file_is_placed_there(tmp_path: Path):
    written(tmp_path, "title: x\npages: 0\n", "base.yaml")
    assert complaint(tmp_path, "include: base.yaml\n").startswith("base.yaml:2: pages: expected an integer")


def test_files_that_include_each_other_are_an_error_that_shows_the_circle(tmp_path: Path):
    written(tmp_path, "title: x\ninclude: [sketch.yaml]\n", "base.yaml")
    message = complaint(tmp_path, "include: base.yaml\n")
    circle = "sketch.yaml includes base.yaml includes sketch.yaml"
    assert message == f"base.yaml:2: include: Circular include: {circle}."


@each(
    "include, message",
    [
        ("bose.yaml", "File not found: bose.yaml. Did you mean `base.yaml`?"),
        ("folder.yaml", "folder.yaml cannot be read: Is a directory."),
        ("loop.yaml", "loop.yaml cannot be read: Too many levels of symbolic links."),
        ("/etc/passwd", "expected the name of a .yaml file, or a list of them, found '/etc/passwd'."),
        ('"a\\0.yaml"', "expected the name of a .yaml file, or a list of them, found 'a\\x00.yaml'."),
        ("5", "expected the name of a .yaml file, or a list of them, found 5."),
        ("", "expected the name of a .yaml file, or a list of them, found null."),
        ("{a: b}", "expected the name of a .yaml file, or a list of them, found {'a': 'b'}."),
        (f"{'x' * 300}.yaml", "cannot be read: File name too long."),
    ],
)
def test_an_invalid_include_is_reported_at_its_line(tmp_path: Path, include: str, message: str):
    written(tmp_path, "title: x\n", "base.yaml")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    (problem,) = complaints(tmp_path, f"title: x\ninclude: {include}\n")
    assert problem.location.line == 2
    assert message in problem.text.replace(f"{tmp_path}/", "") or message[-20:] in problem.text


def test_a_pipe_that_is_included_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "link.yaml").symlink_to("pipe.yaml")
    (tmp_path / "null.yaml").symlink_to("/dev/zero")
    for name in ("pipe.yaml", "link.yaml", "null.yaml"):
        (problem,) = complaints(tmp_path, f"title: x\ninclude: {name}\n")
        assert problem.location.line == 2
        assert name in problem.text and "pipe or a device" in problem.text


def test_a_stored_configuration_that_is_a_pipe_is_refused_at_once(tmp_path: Path):
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="pipe or a device"):
        load_config(tmp_path / "config.yaml", Sketch, may_include=False)


def test_a_pipe_that_a_person_names_is_read(tmp_path: Path):
    os.mkfifo(tmp_path / "sketch.yaml")
    writer = threading.Thread(target=(tmp_path / "sketch.yaml").write_text, args=("title: piped\n",))
    writer.start()
    assert load_config(tmp_path / "sketch.yaml", Sketch).value.title == "piped"
    writer.join()


@each("secret", ["hunter2 is my password\n", "- hunter2\n", "[hunter2]\n", "a: b\nhunter2\n"])
def test_the_error_for_an_included_link_does_not_show_what_is_behind_it(tmp_path: Path, secret: str):
    (tmp_path / "secret.txt").write_text(secret)
    (tmp_path / "base.yaml").symlink_to("secret.txt")
    (problem,) = complaints(tmp_path, "title: x\ninclude: base.yaml\n")
    assert "base.yaml" in str(problem.location) and "hunter2" not in str(problem)


def test_few_files_that_include_each_other_often_are_refused_at_once(tmp_path: Path):
    for level in range(4):
        written(tmp_path, f"include: [{', '.join([f'f{level + 1}.yaml'] * 5)}]\n", f"f{level}.yaml")
    written(tmp_path, "title: x\n", "f4.yaml")
    message = complaint(tmp_path, "include: f0.yaml\n")
    assert message.endswith("More than 20 files are included.")


def test_files_are_not_larger_together_than_one_may_be(tmp_path: Path):
    for name in ("a", "b", "c"):
        written(tmp_path, f"title: x\n#{'x' * 40_000}\n", f"{name}.yaml")
    message = complaint(tmp_path, "include: [a.yaml, b.yaml, c.yaml]\n")
    assert message.startswith("sketch.yaml:1: c.yaml") and "100,000 bytes" in message


@each(
    "text, message",
    [
        ("", "sketch.yaml:1: expected keys and values, found nothing."),
        ("# nothing\n", "expected keys and values, found nothing."),
        ("- 1\n- 2\n", "sketch.yaml:1: expected keys and values, found a list."),
        ("word\n", "sketch.yaml:1: expected keys and values, found a single value."),
        ("x" * 100_001, "sketch.yaml: sketch.yaml is larger than 100,000 bytes."),
        (b"title: x\npages: \xff\n", "sketch.yaml:2: This is not UTF-8 text: invalid start byte at byte 16."),
        ("title: x\n".encode("utf-16"), "sketch.yaml:1: This is not UTF-8 text"),
    ],
)
def test_a_file_without_keys_and_values_is_refused(tmp_path: Path, text: str | bytes, message: str):
    assert message in complaint(tmp_path, text)


def test_a_file_that_is_not_there_is_named_with_one_that_is(tmp_path: Path):
    written(tmp_path, "title: x\n")
    with pytest.raises(ConfigError, match=r"not found: .*skech.yaml. Did you mean `sketch.yaml`\?"):
        load_config(tmp_path / "skech.yaml", Sketch)
    with pytest.raises(ConfigError, match="not found: .*folder.yaml"):
        load_config(tmp_path / "no" / "folder.yaml", Sketch)
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        load_config(f"{tmp_path}/a\0.yaml", Sketch)


@each(
    "override, key, value",
    [
        ("scale=1e-3", "scale", 0.001),
        ("scale=2", "scale", 2.0),
        ("pages=5", "pages", 5),
        ("title='5'", "title", "5"),
        ("title=a = b", "title", "a = b"),
        ("title=no", "title", "no"),
        ("limit=null", "limit", None),
        ("limit=", "limit", None),
        ("is_draft=true", "is_draft", True),
        ("margins=[3, 4]", "margins", (3, 4)),
        ("margins.1=9", "margins", (1, 9)),
        ("tags=[a, 'b,c']", "tags", ["a", "b,c"]),
        ("extra={a: [1, {b: 2}]}", "extra", {"a": [1, {"b": 2}]}),
        ("extra.a.b=5", "extra", {"a": {"b": 5}}),
        ("shape={class_name: SketchCircle, radius: 3}", "shape", SketchCircleConfig(radius=3.0)),
        ("shapes.SketchCircle.radius=4", "shapes", {"SketchCircle": SketchCircleConfig(radius=4.0)}),
        ("grey.radius=4", "grey", SketchCircleConfig(radius=4.0)),
    ],
)
def test_an_override_sets_a_value_that_is_typed_like_yaml(tmp_path: Path, override: str, key: str, value: Any):
    text = "limit: 7\nmargins: [1, 2]\nshapes: {SketchCircle: }\ngrey: {class_name: SketchCircle}\n"
    found = getattr(sketch(tmp_path, text, override), key)
    assert found == value
    assert type(found) is type(value)


def test_later_overrides_count_and_may_build_on_earlier_ones(tmp_path: Path):
    made = sketch(tmp_path, "title: x\n", "pages=2", "pages=3", "shape={class_name: SketchCircle}", "shape.radius=5")
    assert made.pages == 3
    assert made.shape == SketchCircleConfig(radius=5.0)


@each(
    "override, message",
    [
        ("pages=1.5", "pages: expected an integer of at least 1, found 1.5."),
        ("page=1", "page: Sketch has no key `page`. Did you mean `pages`?"),
        ("--pages=1", "--pages: Sketch has no key `--pages`. Did you mean `pages`?"),
        ("papr.width=1", "papr: Sketch has no key `papr`. Did you mean `paper`?"),
        ("pages", "expected `path.to.key=value`, found 'pages'."),
        ("=5", "expected `path.to.key=value`, found '=5'."),
        ("pages = 5", "expected `path.to.key=value`, found 'pages = 5'."),
        ("paper..width=5", "paper..width: the path has an empty part."),
        (".pages=5", ".pages: the path has an empty part."),
        (
            "title.x=5",
            "title.x: `x` cannot be set inside a scalar (sketch.yaml:1).",
        ),
        ("margins.2=5", "margins.2: item '2' is out of range"),
        ("margins.01=5", "margins.01: item '01' is out of range"),
        ("title=[1", "title: Invalid YAML: while parsing a flow sequence"),
        ("title=!!str x", "title: Tags"),
        ("extra={a: {b: 1, b: 2}}", "extra.a.b: Duplicate key `b`"),
        (f"title={'x' * 100_001}", "title: The text is larger than 100,000 bytes."),
        ("title=\ud800", "title: Invalid YAML: write the character 0xd800"),
        ("x" * 300 + "=5", "at most 200 characters."),
    ],
)
def test_an_override_is_checked_like_the_file(tmp_path: Path, override: str, message: str):
    problem = complaint(tmp_path, "title: x\nmargins: [1, 2]\n", override)
    assert problem.startswith("command line: ")
    assert message in problem


def test_an_override_of_any_depth_is_answered(tmp_path: Path):
    assert "more than 40 " in complaint(tmp_path, "title: x\n", f"{'a.' * 10_000}b=1")[-200:]
