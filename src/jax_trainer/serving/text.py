"""Text of a language model: its vocabulary, and sampling token by token from the exported program.

The program has a fixed number of positions, and a token depends on those before it only: a shorter text is padded at
its end. A step computes all positions again, which is fine for small models.
"""

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_trainer.checkpoint.files import read_json, shown
from jax_trainer.optional_import import from_extra
from jax_trainer.serving.artifact import TOKENIZER, VOCABULARY, ExportedModel, ExportError
from jax_trainer.serving.wire import Refused

_MAX_BYTES = 1 << 26  # of a vocabulary
_KEYS = {"prompt", "length", "temperature", "top_k", "seed", "stop"}
Run = Callable[[Mapping[str, np.ndarray], int, int], Awaitable[Mapping[str, np.ndarray]]]


@dataclass(frozen=True)
class Prompt:
    """A text to continue.

    Args:
        tokens: the tokens of the text.
        length: number of tokens to add.
        temperature: softmax temperature; 0: the most likely token.
        top_k: sample from so many of the most likely tokens; None: from all.
        seed: of the random numbers.
        stop: the token that ends the text; None: none.
    """

    tokens: tuple[int, ...]
    length: int
    temperature: float
    top_k: int | None
    seed: int
    stop: int | None


class TextModel:
    """The text side of an exported language model.

    Args:
        model: the model.
        folder: its folder, with a tokenizer or a vocabulary.
    """

    def __init__(self, model: ExportedModel, folder: Path) -> None:
        self._codec = _codec(folder, str(model.manifest["text"]["file"]))
        (self._input,), (output,) = model.inputs, model.outputs
        if len(self._input.row) != 1 or len(output.row) != 2 or output.row[0] != self._input.row[0]:
            raise ExportError(f"{self._input} → {output} is not a language model, but {folder} has a vocabulary.")
        self._output, self._context, self._size = output.name, self._input.row[0], min(output.row[1], len(self._codec))

    def prompt(self, body: bytes, most: int) -> Prompt:
        """The prompt in the body of a request, of at most `most` tokens to generate."""
        try:
            data = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"The body is not JSON: {str(error)[:200]}.") from None
        if not isinstance(data, dict) or not isinstance(data.get("prompt"), str) or not data["prompt"]:
            raise Refused(422, 'The body must be a JSON object with a text "prompt" that is not empty.')
        if unknown := sorted(data.keys() - _KEYS):
            raise Refused(422, f"{str(unknown[0])[:80]!r} is no option. Options: {', '.join(sorted(_KEYS))}.")
        top_k, stop = data.get("top_k"), data.get("stop")
        try:
            return Prompt(
                tokens=tuple(self._codec.encode(data["prompt"])),
                length=_integer(data.get("length", min(100, most)), "length", 1, most),
                temperature=_number(data.get("temperature", 1.0), "temperature"),
                top_k=None if top_k is None else _integer(top_k, "top_k", 1, self._size),
                seed=_integer(data.get("seed", 0), "seed", 0, 2**63 - 1),
                stop=None if stop is None else self._codec.number_of(str(stop)),
            )
        except ValueError as error:
            raise Refused(422, str(error)[:400]) from None

    async def generate(self, prompt: Prompt, run: Run) -> tuple[str, int]:
        """The text of a prompt with its continuation, and the number of tokens that were added."""
        rng, tokens = np.random.default_rng(prompt.seed), list(prompt.tokens)
        for _ in range(prompt.length):
            window = tokens[-self._context :]
            padded = np.zeros((1, self._context), self._input.dtype)
            padded[0, : len(window)] = window
            logits = (await run({self._input.name: padded}, 1, len(window) - 1))[self._output][0, : self._size]
            token = sampled(logits, rng, prompt.temperature, prompt.top_k)
            if token == prompt.stop:
                break
            tokens.append(token)
        return self._codec.decode(tokens), len(tokens) - len(prompt.tokens)


def sampled(logits: np.ndarray, rng: np.random.Generator, temperature: float, top_k: int | None) -> int:
    """A token, drawn by the softmax of its logits.

    >>> sampled(np.array([0.0, 2.0, 1.0]), np.random.default_rng(0), temperature=0.0, top_k=None)
    1
    """
    logits = logits.astype(np.float64)
    if not temperature:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / temperature
    if top_k is not None:
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    weights = np.exp(scaled)
    return int(rng.choice(len(weights), p=weights / weights.sum()))


def _integer(value: Any, name: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name!r} must be an integer from {least} to {most}, got {str(value)[:40]}.")
    return value


def _number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= 1e6 or math.isnan(value):
        raise ValueError(f"{name!r} must be a number from 0 to 1000000, got {str(value)[:40]}.")
    return float(value)


# vocabularies


def _codec(folder: Path, file: str) -> Any:
    kinds = {TOKENIZER: _Tokenizer, VOCABULARY: _Characters}
    if file not in kinds:
        raise ExportError(f"{folder} names the vocabulary {shown(file)}, which is none of {', '.join(kinds)}.")
    try:
        return kinds[file](folder / file)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # tokenizers raises a bare `Exception`
        raise ExportError(f"{folder / file} is not a vocabulary: {error!r:.200}.") from None


class _Tokenizer:
    def __init__(self, file: Path) -> None:
        with from_extra("serve"):
            from tokenizers import Tokenizer
        self._inner = Tokenizer.from_file(str(file))

    def __len__(self) -> int:
        return self._inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        tokens = self._inner.encode(text, add_special_tokens=False).ids
        if not tokens:
            raise ValueError("The prompt has no tokens of the tokenizer. Write at least one.")
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self._inner.decode(list(tokens))

    def number_of(self, token: str) -> int:
        number = self._inner.token_to_id(token)
        if number is None:
            raise ValueError(f"{token[:80]!r} is no token of the tokenizer.")
        return number


class _Characters:
    """Characters, or UTF-8 bytes."""

    def __init__(self, file: Path) -> None:
        data = read_json(file, _MAX_BYTES)
        self._is_bytes, self._symbols = data["level"] == "byte", data["symbols"]
        self._numbers = {symbol: number for number, symbol in enumerate(self._symbols)}

    def __len__(self) -> int:
        return len(self._symbols)

    def encode(self, text: str) -> list[int]:
        symbols = text.encode() if self._is_bytes else text
        if missing := [symbol for symbol in symbols if symbol not in self._numbers]:
            raise ValueError(f"The character {missing[0]!r} of the prompt is not in the vocabulary of the model.")
        return [self._numbers[symbol] for symbol in symbols]

    def decode(self, tokens: Sequence[int]) -> str:
        symbols = [self._symbols[token] for token in tokens]
        return bytes(symbols).decode("utf-8", "replace") if self._is_bytes else "".join(symbols)

    def number_of(self, token: str) -> int:
        found = self.encode(token)
        if len(found) != 1:
            raise ValueError(f"'stop' must be one character, got {token[:80]!r}.")
        return found[0]
