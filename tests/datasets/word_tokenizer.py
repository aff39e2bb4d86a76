"""A tokenizer whose tokens are words."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers


def saved_tokenizer(folder: Path, words: Sequence[str]) -> Path:
    """`folder` with the `tokenizer.json` of `words`, of which "<end>" ends a document."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]  # as the library documents
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    return folder
