"""A text file as a dataset for language models of characters, bytes or tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from compoconf import register

from jax_trainer.config.settings import AtLeast, Below, Problem
from jax_trainer.datasets.batch import SupervisedBatch
from jax_trainer.datasets.module import Count, DatasetConfig, DatasetModule, Size
from jax_trainer.datasets.storage import is_url, local_copy
from jax_trainer.datasets.tokenizer import Tokenizer

Level = Literal["char", "byte"]
Share = Annotated[float, AtLeast(0), Below(1)]


class Vocabulary:
    """Encodes and decodes text: one token per character, or per UTF-8 byte.

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
        """The characters, or bytes, indexed by token."""
        points = self._points.tolist()
        return tuple(chr(point) for point in points) if self.level == "char" else tuple(points)

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, [n] int32."""
        if self.level == "byte":
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        points = _code_points(text)
        known = np.isin(points, self._points)
        if not known.all():
            index = int(np.argmin(known))
            raise ValueError(
                f"The character {text[index]!r} at index {index} is not in the vocabulary of {len(self)} characters. "
                "Remove it, or use `level: byte`."
            )
        return np.searchsorted(self._points, points).astype(np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens. Bytes that are not valid UTF-8 become the character �."""
        points = self._points[np.asarray(tokens, np.int64)]
        if self.level == "byte":
            return points.astype(np.uint8).tobytes().decode("utf-8", "replace")
        return points.astype("<u4").tobytes().decode("utf-32-le")


@dataclass
class TextConfig(DatasetConfig):
    """A text file, split into examples of `context` tokens.

    Args:
        path: the file, relative to `data_dir`, or its URL, such as `s3://bucket/text.txt`.
        level: one token per character ("char") or per UTF-8 byte ("byte"), without a `tokenizer`.
        tokenizer: a `tokenizer.json` of Hugging Face's tokenizers, or a folder with one; null: see `level`.
        separator: text between two documents of the file, such as a line of its own; null: one document.
        end_of_text: token after each document, such as `<|endoftext|>`; null: none.
        pack: True: examples are cut from the documents one after the other; False: an example has tokens of one
            document only, and is padded, with a mask.
        context: tokens per example.
        val_share, test_share: fractions at the end of the text for validation and test, in this order.
        aux: anything; copied to the metadata.
    """

    path: str = "moby-dick.txt"
    level: Level = "char"
    tokenizer: str | None = None
    separator: str | None = None
    end_of_text: str | None = None
    pack: bool = True
    context: Size = 128
    val_share: Share = 0.05
    test_share: Share = 0.05
    aux: dict[str, Any] = field(default_factory=dict)
    val_size: Count = 0
    normalize: bool = False

    def problems(self) -> Iterator[Problem]:
        """Settings that contradict each other."""
        if self.val_share + self.test_share >= 1:
            shares = f"`val_share` {self.val_share} and `test_share` {self.test_share}"
            yield "val_share", f"{shares} leave no training data. Their sum must be below 1."
        if self.val_size:
            text = f"The validation set is a fraction of the text: use `val_share`, not `val_size: {self.val_size}`."
            yield "val_size", text
        if self.tokenizer is not None and self.level != "char":
            yield "level", f"`level: {self.level}` has no effect with a `tokenizer`. Remove one of them."
        if self.end_of_text is not None and self.tokenizer is None:
            yield "end_of_text", "`end_of_text` is a token of a `tokenizer`. Set one, or remove it."
        if self.separator is None and not self.pack:
            yield "pack", "`pack: false` needs a `separator` of documents."
        if self.separator == "":
            yield "separator", "`separator` is empty. Use null for one document."
        if self.normalize:
            yield "normalize", "Text cannot be normalized: remove `normalize: true`."


@register
class TextDataset(DatasetModule):
    """Next-token prediction on a text file; tokens are characters, bytes, or those of a `tokenizer`.

    An example is `context` tokens; its target is the same text shifted by one token. Examples do not overlap, and
    validation and test are the end of the text, so they contain no training text. The vocabulary is that of the
    complete text, or of the tokenizer.
    """

    config: TextConfig

    def __init__(self, config: TextConfig) -> None:
        file = Path(config.data_dir) / config.path
        if url := next((one for one in (config.path, f"{config.data_dir}/{config.path}") if is_url(one)), ""):
            file = local_copy(url)
        # before the text is read, which may be long
        tokenizer = None if config.tokenizer is None else Tokenizer(config.tokenizer)
        end = [] if tokenizer is None or config.end_of_text is None else [tokenizer.number_of(config.end_of_text)]
        text = _read(file)
        self.vocabulary: Vocabulary | Tokenizer = tokenizer or Vocabulary(text, config.level)
        documents = _documents(text, config.separator, self.vocabulary, end)
        parts = (
            _padded_parts(documents, config, file)
            if not config.pack
            else _parts(np.concatenate(documents), config, file)
        )
        super().__init__(
            config,
            parts["train"],
            parts["val"],
            parts["test"],
            metadata={
                "level": self.vocabulary.level,
                "context": config.context,
                "vocabulary": self.vocabulary.symbols,
                "vocab_size": len(self.vocabulary),
                "aux": dict(config.aux),
            },
        )

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, [n] int32."""
        return self.vocabulary.encode(text)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens."""
        return self.vocabulary.decode(tokens)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _read(file: Path) -> str:
    if not file.is_file():
        raise FileNotFoundError(
            f"The text file {file.absolute()} does not exist. Put it there, or set `data_dir` and `path`."
        )
    data = file.read_bytes()  # as bytes: text mode would change line endings
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text: {error.reason} at byte {error.start}. Convert it to UTF-8."
        ) from error


def _documents(
    text: str, separator: str | None, vocabulary: Vocabulary | Tokenizer, end: list[int]
) -> list[np.ndarray]:
    """The tokens of each document that is not empty, followed by `end`."""
    texts = [text] if separator is None else [one for one in text.split(separator) if one.strip()]
    is_tokenizer = isinstance(vocabulary, Tokenizer)
    encoded = vocabulary.encode_all(texts) if is_tokenizer else [vocabulary.encode(one) for one in texts]
    return [np.concatenate([one, np.asarray(end, np.int32)]) if end else one for one in encoded]


def _padded_parts(documents: list[np.ndarray], config: TextConfig, file: Path) -> dict[str, SupervisedBatch | None]:
    """Examples of one document each; the last documents are for validation and test."""
    shares = {"val": config.val_share, "test": config.test_share}
    sizes = {name: int(len(documents) * share) for name, share in shares.items()}
    sizes, start = {"train": len(documents) - sum(sizes.values()), **sizes}, 0
    parts = {}
    for name, size in sizes.items():
        used = name == "train" or shares[name] > 0
        rows = [row for one in documents[start : start + size] for row in _rows(one, config.context)]
        if used and not rows:
            raise ValueError(
                f"{file} has {len(documents)} documents, of which none with two tokens is in the {name!r} part. Use "
                "more documents, another `separator`, or other shares."
            )
        limit = config.limit_train_size if name == "train" else None
        examples = [np.stack(column) for column in zip(*rows, strict=True)] if used else []
        parts[name] = SupervisedBatch.of(*examples)[slice(limit)] if used else None
        start += size
    return parts


def _rows(document: np.ndarray, context: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Input, target and mask of each example of a document."""
    for start in range(0, len(document) - 1, context):
        piece = document[start : start + context + 1]
        missing = context + 1 - len(piece)
        padded = np.pad(piece, (0, missing))
        yield padded[:-1], padded[1:], np.arange(context) < context - missing


def _parts(numbers: np.ndarray, config: TextConfig, file: Path) -> dict[str, SupervisedBatch | None]:
    shares = {"val": config.val_share, "test": config.test_share}
    sizes = {name: int(len(numbers) * share) for name, share in shares.items()}
    sizes = {"train": len(numbers) - sum(sizes.values()), **sizes}
    parts, start = {}, 0
    level = config.level if config.tokenizer is None else Tokenizer.level
    for name, size in sizes.items():
        used = name == "train" or shares[name] > 0
        if used and size <= config.context:
            raise ValueError(
                f"{file} leaves {size} {level}s for the {name!r} part, but one example needs "
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
