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
from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.diagnostics.suggestions import suggestion

Level = Literal["char", "byte"]
Share = Annotated[float, AtLeast(0), Below(1)]
_TOKENIZER = "tokenizer.json"


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


class Tokenizer:
    """Encodes and decodes text with a tokenizer of Hugging Face.

    Args:
        path: a `tokenizer.json`, or a folder with one, such as that of a pretrained model.

    Attributes:
        level: what a token is, in messages.
        inner: the `tokenizers.Tokenizer`.
    """

    level = "token"

    def __init__(self, path: str | Path) -> None:
        with from_extra("hf"):
            from tokenizers import Tokenizer as Inner
        self.path = Path(path) / _TOKENIZER if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"The tokenizer {self.path.absolute()} does not exist. Name a {_TOKENIZER}, or a folder with one."
            )
        try:
            self.inner = Inner.from_file(str(self.path))
        except Exception as error:  # tokenizers raises a bare `Exception`
            raise ValueError(f"{self.path} is not a tokenizer: {error}.") from None

    def __len__(self) -> int:
        return self.inner.get_vocab_size()

    @property
    def symbols(self) -> tuple[str, ...]:
        """The texts of the tokens, indexed by token; "" for numbers without one."""
        return tuple(self.inner.id_to_token(token) or "" for token in range(len(self)))

    def encode(self, text: str) -> np.ndarray:
        """The tokens of `text`, [n] int32, without special tokens around it."""
        return np.asarray(self.inner.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of several texts, computed in parallel."""
        found: Any = self.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in found]

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of tokens, without special tokens."""
        return self.inner.decode(np.asarray(tokens).tolist())

    def number_of(self, token: str) -> int:
        """The number of a token, such as `<|endoftext|>`."""
        number = self.inner.token_to_id(token)
        if number is None:
            near = suggestion(token, self.inner.get_vocab())
            raise ValueError(f"{self.path} has no token {token!r}.{near}")
        return number


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
        texts = [text] if config.separator is None else [one for one in text.split(config.separator) if one.strip()]
        encoded = [self.encode(one) for one in texts] if tokenizer is None else tokenizer.encode_all(texts)
        documents = [np.concatenate([tokens, np.asarray(end, np.int32)]) for tokens in encoded] if end else encoded
        parts = _parts(documents, config, file)
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


def _parts(documents: list[np.ndarray], config: TextConfig, file: Path) -> dict[str, SupervisedBatch | None]:
    """The examples of each part: of all documents joined, or of one document each; validation and test are the last."""
    shares = {"train": 1.0, "val": config.val_share, "test": config.test_share}
    pieces: Any = np.concatenate(documents) if config.pack else documents
    val, test = (int(len(pieces) * shares[name]) for name in ("val", "test"))
    ends = {"train": len(pieces) - val - test, "val": len(pieces) - test, "test": len(pieces)}
    parts, start = {}, 0
    for name, end in ends.items():
        part, start = pieces[start:end], end
        examples = _examples(part, config.context) if config.pack else _padded(part, config.context)
        if not len(examples) and shares[name]:
            level = config.level if config.tokenizer is None else Tokenizer.level
            left = f"{len(part)} {level}s" if config.pack else f"{len(part)} of {len(pieces)} documents"
            needs = f"{config.context + 1} {level}s" if config.pack else "two tokens"
            raise ValueError(
                f"{file} leaves {left} for the {name!r} part, but one example needs {needs}. Use a longer text, a "
                "smaller `context`, or other shares."
            )
        parts[name] = examples[: config.limit_train_size if name == "train" else None] if shares[name] else None
    return parts


def _examples(tokens: np.ndarray, context: int) -> SupervisedBatch:
    count = max(0, len(tokens) - 1) // context
    return SupervisedBatch.of(*(tokens[at : at + count * context].reshape(count, context) for at in (0, 1)))


def _padded(documents: list[np.ndarray], context: int) -> SupervisedBatch:
    """Examples of one document each, with a mask of what is not padding."""
    tokens, masks = [np.zeros((0, context + 1), np.int32)], [np.zeros((0, context), bool)]
    for document in documents:
        count = -(-max(0, len(document) - 1) // context)
        padded = np.pad(document, (0, max(0, count * context + 1 - len(document))))
        rows = np.arange(count)[:, None] * context + np.arange(context + 1)
        tokens.append(padded[rows])
        masks.append(rows[:, 1:] < len(document))
    joined = np.concatenate(tokens)
    return SupervisedBatch.of(joined[:, :-1], joined[:, 1:], np.concatenate(masks))
