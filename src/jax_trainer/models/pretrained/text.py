"""`generate_text`: text in, text out, with a language model and its tokenizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_trainer.datasets.examples import Tokenizer
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.models import generate


@checks_keywords
def generate_text(
    model: Any,
    tokenizer: Tokenizer | str | Path,
    prompts: Sequence[str],
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: str | None = None,
    seed: int | jax.Array = 0,
) -> list[str]:
    """Continues each prompt by at most `length` tokens; returns the prompts with their continuations.

    Prompts of different lengths are padded, which does not change the result. Compiled once per length of the longest
    prompt and continuation.

    Args:
        model: a model with `context`, `empty_cache` and `extend`, such as `Decoder`.
        tokenizer: that of the model, or its path.
        prompts: the texts to continue.
        length: maximum number of tokens to generate.
        temperature, top_k, top_p: see `generate`.
        stop: the token that ends a text, such as `<|endoftext|>`; it is not part of the result.
        seed: random seed or key.
    """
    if isinstance(prompts, str):
        raise TypeError(f"`prompts` must be a list of texts, got the text {prompts!r}. Write `[{prompts!r}]`.")
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer(tokenizer)
    encoded = tokenizer.encode_all(prompts)
    if empty := [text for text, tokens in zip(prompts, encoded, strict=True) if not len(tokens)]:
        raise ValueError(f"The prompt {empty[0]!r} has no tokens. Start with at least one.")
    longest = max(map(len, encoded))
    mask = np.stack([np.arange(longest) >= longest - len(tokens) for tokens in encoded])
    padded = np.stack([np.pad(tokens, (longest - len(tokens), 0)) for tokens in encoded])
    end = None if stop is None else tokenizer.number_of(stop)
    key = jax.random.key(seed) if isinstance(seed, int) else seed
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "stop": end}
    # a model may have a larger vocabulary: these tokens have no text
    options["among"] = min(len(tokenizer), model.config.vocab_size)
    rows = np.asarray(generate(model, key, padded, length, mask=mask, **options))[:, longest:]
    texts = [np.concatenate([tokens, row[: _length(row, end)]]) for tokens, row in zip(encoded, rows, strict=True)]
    return [tokenizer.decode(text) for text in texts]


def _length(row: np.ndarray, end: int | None) -> int:
    """The number of tokens before the first `end`."""
    is_end = row == end
    return int(is_end.argmax()) if end is not None and is_end.any() else len(row)
