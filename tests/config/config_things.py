"""Configurations of the tests' own. compoconf has one registry for all: what is in it is registered here, once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from compoconf import RegistrableConfigInterface, register, register_interface

from jax_trainer.config import ConfigError, ConfigProblem, load_config
from jax_trainer.config.settings import Above, AtLeast, AtMost, Below, IsRegex, Problem, Settings


@register_interface
class SketchShape(RegistrableConfigInterface):
    """Something to draw."""


@dataclass
class SketchCircleConfig(Settings):
    """A circle.

    Args:
        radius: from the middle
            to the line.
        name: what it is called.
    """

    radius: Annotated[float, Above(0)] = 1.0
    name: str = ""


@register
class SketchCircle(SketchShape):
    """Draws something round.

    This is not shown.
    """

    config: SketchCircleConfig


@dataclass
class SketchSquareConfig(Settings):
    """A square.

    Args:
        side: the length of one.
        name: what it is called.
    """

    side: Annotated[float, AtLeast(0)]
    name: str = ""


@register
class SketchSquare(SketchShape):
    """Draws something with four corners."""

    config: SketchSquareConfig


@dataclass
class SketchLineConfig(Settings):
    """A line without anything to choose."""


@register
class SketchLine(SketchShape):
    """Draws something straight."""

    config: SketchLineConfig


@register_interface
class SketchTool(RegistrableConfigInterface):
    """Something to draw with."""


@dataclass
class SketchPenConfig(Settings):
    """A pen.

    Args:
        width: of its tip.
        share: of the ink that is left.
    """

    width: Annotated[int, AtLeast(1)] = 1
    share: Annotated[float, AtLeast(0), Below(1)] = 0.5


@register
class SketchPen(SketchTool):
    """Draws in blue."""

    config: SketchPenConfig


@dataclass
class Paper(Settings):
    """What is drawn on.

    Args:
        width, height: in millimetres.
    """

    width: int = 210
    height: int = 297


@dataclass
class Sketch(Settings):
    """A drawing.

    Args:
        title: what it is called.
        pages: how many there are.
        scale: the size of everything.
        is_draft: whether it is unfinished.
        line: how lines are drawn.
        margins: left and right.
        tags: words to find it by.
        pattern: which layers are drawn.
        limit: how many shapes at most.
        shape: the first one.
        shapes: all others.
        grey: how dark: a number, or a shape to fill.
        tool: what it is drawn with.
        paper: what it is drawn on.
        token: for the printer.
        notes: about anything.
        extra: anything else.
    """

    title: str = "untitled"
    pages: Annotated[int, AtLeast(1)] = 1
    scale: Annotated[float, Above(0), AtMost(10)] = 1.0
    is_draft: bool = False
    line: Literal["solid", "dashed", "dotted"] = "solid"
    margins: tuple[int, int] = (0, 0)
    tags: list[str] = field(default_factory=list)
    pattern: Annotated[str, IsRegex()] = ""
    limit: Annotated[int, AtLeast(0)] | None = None
    shape: SketchShape.cfgtype | None = None
    shapes: dict[str, SketchShape.cfgtype] = field(default_factory=dict)
    grey: Annotated[float, AtLeast(0)] | SketchShape.cfgtype = 0.5
    tool: SketchTool.cfgtype = field(default_factory=SketchPenConfig)
    paper: Paper = field(default_factory=Paper)
    token: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    extra: Any = None

    def problems(self) -> Iterator[Problem]:
        """A draft is short."""
        if self.is_draft and self.pages > 5:
            yield "pages", f"a draft has at most 5 pages, got {self.pages}."


def sketch(folder: Path, text: str | bytes, *overrides: str) -> Sketch:
    """The sketch that `text` describes."""
    return load_config(written(folder, text), Sketch, overrides).value


def complaints(folder: Path, text: str | bytes, *overrides: str) -> tuple[ConfigProblem, ...]:
    """What is wrong with `text`. Places are lines of `sketch.yaml`."""
    file = written(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, Sketch, overrides)
    assert caught.value.problems
    return caught.value.problems


def complaint(folder: Path, text: str | bytes, *overrides: str) -> str:
    """The only thing that is wrong with `text`, without the folder of its file."""
    (only,) = complaints(folder, text, *overrides)
    return str(only).replace(f"{folder}/", "")


def written(folder: Path, text: str | bytes, name: str = "sketch.yaml") -> Path:
    """A file with `text`."""
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file
