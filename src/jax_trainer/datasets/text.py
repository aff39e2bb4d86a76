"""A text as data for language models that predict the next character or byte."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from compoconf import register

from jax_trainer.datasets.batch import SupervisedBatch
from jax_trainer.datasets.module import Count, DatasetConfig, DatasetModule, Size
from jax_trainer.settings import AtLeast, Below, Problem

Level = Literal["char", "byte"]
Share = Annotated[float, AtLeast(0), Below(1)]


class Vocabulary:
    """Text as numbers and back: of its characters, or of the bytes of its UTF-8.

    >>> vocabulary = Vocabulary("banana")
    >>> vocabulary.encode("nab"), vocabulary.decode([1, 0, 2])
    (array([2, 0, 1], dtype=int32), 'ban')
    """

    def __init__(self, text: str, level: Level = "char") -> None:
        self.level: Level = level
        self._points = np.unique(_code_points(text)) if level == "char" else np.arange(256)

    def __len__(self) -> int:
        return len(self._points)

    @property
    def symbols(self) -> tuple[str, ...] | tuple[int, ...]:
        """The characters by their number, or the bytes."""
        points = self._points.tolist()
        return tuple(chr(point) for point in points) if self.level == "char" else tuple(points)

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text."""
        if self.level == "byte":
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        points = _code_points(text)
        known = np.isin(points, self._points)
        if not known.all():
            place = int(np.argmin(known))
            raise ValueError(
                f"The character {text[place]!r} at place {place} is not among the {len(self)} characters of the text "
                "that the vocabulary was made of. Leave it out, or use `level: byte`."
            )
        return np.searchsorted(self._points, points).astype(np.int32)

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """The text of numbers. What is no UTF-8, as bytes that a model made may be, becomes the character �."""
        points = self._points[np.asarray(numbers, np.int64)]
        if self.level == "byte":
            return points.astype(np.uint8).tobytes().decode("utf-8", "replace")
        return points.astype("<u4").tobytes().decode("utf-32-le")


@dataclass
class TextConfig(DatasetConfig):
    """A text file, cut into pieces of `context` characters.

    Args:
        path: the file, relative to `data_dir`.
        level: predict characters, or the bytes of their UTF-8.
        context: how many of them an example has.
        val_share, test_share: parts at the end of the text that are kept for validation and test, in this order.
        aux: anything; it goes to the metadata.
    """

    path: str = "moby-dick.txt"
    level: Level = "char"
    context: Size = 128
    val_share: Share = 0.05
    test_share: Share = 0.05
    aux: dict[str, Any] = field(default_factory=dict)
    val_size: Count = 0
    normalize: bool = False

    def problems(self) -> Iterator[Problem]:
        """What does not go together."""
        if self.val_share + self.test_share >= 1:
            shares = f"`val_share` {self.val_share} and `test_share` {self.test_share}"
            yield "val_share", f"{shares} leave nothing to train on. Together they must be below 1."
        if self.val_size:
            text = f"Validation text is a share of the text: use `val_share`, not `val_size: {self.val_size}`."
            yield "val_size", text
        if self.normalize:
            yield "normalize", "Text has no mean to take away: leave out `normalize: true`."


@register
class TextDataset(DatasetModule):
    """Next-character or next-byte prediction on a text file.

    An example is `context` numbers and, as its target, the same text one place on. Examples follow each other without
    overlap; validation and test come from the end of the text, so that no example contains training text. The
    characters of the whole text make the vocabulary.
    """

    config: TextConfig

    def __init__(self, config: TextConfig) -> None:
        file = Path(config.data_dir) / config.path
        text = _read(file)
        self.vocabulary = Vocabulary(text, config.level)
        parts = _parts(self.vocabulary.encode(text), config, file)
        super().__init__(
            config,
            parts["train"],
            parts["val"],
            parts["test"],
            metadata={
                "level": config.level,
                "context": config.context,
                "vocabulary": self.vocabulary.symbols,
                "vocab_size": len(self.vocabulary),
                "aux": dict(config.aux),
            },
        )

    def encode(self, text: str) -> np.ndarray:
        """The numbers of a text."""
        return self.vocabulary.encode(text)

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """The text of numbers."""
        return self.vocabulary.decode(numbers)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _read(file: Path) -> str:
    if not file.is_file():
        raise FileNotFoundError(f"There is no text file {file}. Put it there, or set `data_dir` and `path`.")
    data = file.read_bytes()  # not as text: that would change the ends of lines
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: {error.reason} at byte {error.start}. Convert it first."
        ) from error


def _parts(numbers: np.ndarray, config: TextConfig, file: Path) -> dict[str, SupervisedBatch | None]:
    shares = {"val": config.val_share, "test": config.test_share}
    sizes = {name: int(len(numbers) * share) for name, share in shares.items()}
    sizes = {"train": len(numbers) - sum(sizes.values()), **sizes}
    parts, start = {}, 0
    for name, size in sizes.items():
        used = name == "train" or shares[name] > 0
        if used and size <= config.context:
            raise ValueError(
                f"{file} leaves {size} {config.level}s for the {name!r} part, and one example takes "
                f"{config.context + 1}. Use a longer text, a smaller `context`, or other shares."
            )
        limit = config.limit_train_size if name == "train" else None
        parts[name] = _examples(numbers[start : start + size], config.context)[slice(limit)] if used else None
        start += size
    return parts


def _examples(numbers: np.ndarray, context: int) -> SupervisedBatch:
    count = (len(numbers) - 1) // context
    shifted = [numbers[at : at + count * context].reshape(count, context) for at in (0, 1)]
    return SupervisedBatch.of(*shifted)
