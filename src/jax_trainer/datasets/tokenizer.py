"""`Tokenizer`: a `tokenizer.json` of Hugging Face's tokenizers, for text datasets and generation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_trainer.diagnostics.optional_import import from_extra
from jax_trainer.diagnostics.suggestions import suggestion

TOKENIZER = "tokenizer.json"


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
        self.path = Path(path) / TOKENIZER if Path(path).is_dir() else Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(
                f"The tokenizer {self.path.absolute()} does not exist. Name a {TOKENIZER}, or a folder with one."
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
