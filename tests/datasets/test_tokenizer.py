"""Texts in tokens of Hugging Face's tokenizers, and documents in rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets.examples import TextConfig, TextDataset, Tokenizer
from tests.datasets.word_tokenizer import saved_tokenizer

WORDS = ["<end>", "the", "whale", "sea", "and", "a", "ship"]
THE, WHALE, SEA, AND, A, SHIP = range(1, 7)
DOCUMENTS = ["the whale and the sea", "a ship", "the sea and a ship and the whale", "the sea"]


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    return saved_tokenizer(tmp_path, WORDS)


def dataset(folder: Path, **options: Any) -> TextDataset:
    (folder / "a.txt").write_text("\n---\n".join(DOCUMENTS))
    shares = {"val_share": 0.0, "test_share": 0.0}
    config = {"data_dir": str(folder), "path": "a.txt", "context": 4, "global_batch_size": 1, **shares, **options}
    return TextDataset(TextConfig(tokenizer=str(folder), **config))


def test_a_tokenizer_is_a_file_or_the_folder_with_it(tokenizer):
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        found = Tokenizer(path)
        assert found.encode("the sea").tolist() == [THE, SEA] and found.encode("the sea").dtype == np.int32
        assert found.decode(np.array([THE, 0, SEA])) == "the sea"  # without special tokens
        assert (len(found), found.symbols) == (7, tuple(WORDS))
        assert [one.tolist() for one in found.encode_all(["the", "a ship"])] == [[THE], [A, SHIP]]
    with pytest.raises(FileNotFoundError, match=r"elsewhere.*tokenizer\.json"):
        Tokenizer(tokenizer / "elsewhere")
    (tokenizer / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json"):
        Tokenizer(tokenizer / "broken.json")


def test_documents_are_packed_one_after_the_other(tokenizer):
    data = dataset(tokenizer, separator="\n---\n", end_of_text="<end>")
    text = [THE, WHALE, AND, THE, SEA, 0, A, SHIP, 0, THE, SEA, AND, A, SHIP, AND, THE, WHALE, 0, THE, SEA, 0]
    assert data.train.input.tolist() == [text[at : at + 4] for at in (0, 4, 8, 12, 16)]
    assert data.train.target.tolist() == [text[at + 1 : at + 5] for at in (0, 4, 8, 12, 16)]
    assert data.train.mask is None
    assert data.metadata["level"] == "token" and data.metadata["vocab_size"] == len(data.vocabulary) == 7
    assert data.decode(data.encode("a ship")) == "a ship"


def test_documents_can_be_padded_to_one_per_example(tokenizer):
    data = dataset(tokenizer, separator="\n---\n", end_of_text="<end>", pack=False, test_share=0.25)
    masked = lambda part: [row[mask].tolist() for row, mask in zip(part.target, part.mask, strict=True)]
    assert masked(data.train) == [[WHALE, AND, THE, SEA], [0], [SHIP, 0], [SEA, AND, A, SHIP], [AND, THE, WHALE, 0]]
    assert data.train.input[2].tolist() == [A, SHIP, 0, 0]
    assert masked(data.test) == [[SEA, 0]]
    assert next(iter(data.train_loader)).mask.shape == (1, 4)


def test_keys_that_contradict_each_other_are_errors(subtests):
    for options, key in [
        ({"level": "byte"}, "level"),
        ({"pack": False}, "pack"),
        ({"tokenizer": None, "end_of_text": "<end>"}, "end_of_text"),
    ]:
        with subtests.test(options=options, key=key):
            with pytest.raises(SettingsError) as error:
                TextConfig(**{"tokenizer": "x", **options})
            assert [one for one, _ in error.value.problems] == [key]


def test_an_unknown_token_or_no_document_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="'<ende>'.*`<end>`"):
        dataset(tokenizer, end_of_text="<ende>")
    with pytest.raises(ValueError, match="0 of 4 documents.*'val'"):
        dataset(tokenizer, separator="\n---\n", pack=False, val_share=0.1)
    with pytest.raises(ValueError, match="3 tokens for the 'val' part"):
        dataset(tokenizer, val_share=0.15)
