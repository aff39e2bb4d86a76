"""Autoregressive generation with a language model, with a KV cache: of tokens, and of text with a tokenizer."""

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_trainer.core import compiled_function
from jax_trainer.datasets.examples import Tokenizer
from jax_trainer.diagnostics.suggestions import checks_keywords


def generate(
    model: Any,
    key: PRNGKeyArray,
    prompt: Int[Array, "batch prompt"] | np.ndarray,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    among: int | None = None,
    mask: Bool[Array, "batch prompt"] | np.ndarray | None = None,
    stop: int | None = None,
) -> Int[Array, "batch total"]:
    """Samples `length` tokens after `prompt`; returns the prompt followed by them.

    Compiled once per prompt shape, `length`, `top_k` and `among`: other weights, keys, temperatures and values of
    `top_p` need no compilation. The model runs in evaluation mode; its own mode is not changed.

    Args:
        model: a model with `context`, `empty_cache` and `extend`, such as `GPT`.
        key: random key of the sampling.
        prompt: tokens to continue; at least one.
        length: number of tokens to sample; with the prompt, at most the context of the model.
        temperature: sampling temperature; 0 is greedy decoding.
        top_k: sample from the `top_k` most likely tokens only.
        top_p: nucleus sampling: sample from the smallest set of tokens with at least this probability.
        among: sample from the first `among` tokens of the vocabulary only.
        mask: False where `prompt` is padding, on either side: each row is continued as if it had none.
        stop: the token that ends a text; what follows it is this token again.
    """
    tokens, length = _checked(model, prompt, length)
    seen, mask = (tokens, None) if mask is None else _left_padded(tokens, mask)
    vocabulary = model.config.vocab_size
    _require(0 <= temperature < float("inf"), f"`temperature` must be a number of at least 0, got {temperature}.")
    _require(top_p is None or 0 < top_p <= 1, f"`top_p` must be above 0 and at most 1, got {top_p}.")
    for name, count in (("top_k", top_k), ("among", among)):
        is_valid = count is None or 1 <= operator.index(count) <= vocabulary
        _require(is_valid, f"`{name}` must be from 1 to the {vocabulary} tokens of the vocabulary, got {count}.")
    total = tokens.shape[1] + length
    _require(
        total <= model.context,
        f"{tokens.shape[1]} prompt tokens and {length} more are {total}, but the context of the model is "
        f"{model.context}. Use a smaller `length`, a shorter prompt, or `generate_in_rounds`.",
    )
    evaluating = nnx.clone(model)  # shares the weights
    evaluating.eval()
    top_p = None if top_p is None else jnp.float32(top_p)
    options = {"length": length, "top_k": top_k, "among": among}
    text = _generated(evaluating, key, seen, jnp.float32(temperature), top_p, mask, **options)
    if mask is None and stop is None:
        return text
    new = text[:, tokens.shape[1] :]
    if stop is not None:
        new = jnp.where(jnp.cumsum(new == stop, axis=1) > 0, jnp.int32(stop), new)
    return jnp.concatenate([tokens, new], axis=1)


def generate_in_rounds(
    model: Any, key: PRNGKeyArray, prompt: Int[Array, "batch prompt"] | np.ndarray, length: int, **options: Any
) -> np.ndarray:
    """`generate` for texts longer than the context: int32 [batch, prompt + length], on the host.

    Beyond the context, it generates in rounds, each of which conditions on the last half of a context and fills the
    other half. All rounds but the first share one compilation.
    """
    text, length = _checked(model, prompt, length)
    total, half = text.shape[1] + length, max(1, model.context // 2)
    if total <= model.context:
        return np.asarray(generate(model, key, text, length, **options))
    _require(model.context > 1, "A model with a context of 1 cannot continue a text.")
    number = 0
    while text.shape[1] < total:
        seen = text if text.shape[1] <= half else text[:, -half:]
        new = generate(model, jax.random.fold_in(key, number), seen, model.context - seen.shape[1], **options)
        text = np.concatenate([text, np.asarray(new)[:, seen.shape[1] :]], axis=1)
        number += 1
    return text[:, :total]


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
    ends = [length if end is None else int(np.argmax(np.append(row == end, True))) for row in rows]
    texts = [np.concatenate([tokens, row[:stop]]) for tokens, row, stop in zip(encoded, rows, ends, strict=True)]
    return [tokenizer.decode(text) for text in texts]


def next_tokens(
    key: PRNGKeyArray,
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    among: int | None = None,
) -> Int[Array, "batch"]:
    """Samples a token for each row, as `generate` does; can be used inside compiled functions."""
    if among is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < among, logits, -jnp.inf)
    cold = jnp.asarray(temperature, logits.dtype)
    scaled = logits / jnp.where(cold > 0, cold, 1)
    rows = jnp.arange(len(logits))[:, None]
    if top_k is not None:  # ties go to the first
        _, likeliest = lax.top_k(scaled, top_k)
        scaled = jnp.where(jnp.zeros(scaled.shape, bool).at[rows, likeliest].set(True), scaled, -jnp.inf)
    if top_p is not None:  # the smallest set with at least this probability; never empty
        order = jnp.argsort(scaled, axis=-1, descending=True)
        ranked = jax.nn.softmax(jnp.take_along_axis(scaled, order, -1), axis=-1)
        needed = (jnp.cumsum(ranked, -1) - ranked < top_p).at[:, 0].set(True)  # by that of the likelier tokens
        scaled = jnp.where(jnp.zeros(scaled.shape, bool).at[rows, order].set(needed), scaled, -jnp.inf)
    drawn = jax.random.categorical(key, scaled, axis=-1)
    return jnp.where(cold > 0, drawn, logits.argmax(-1)).astype(jnp.int32)


def _generate(
    model: Any,
    key: Any,
    prompt: jax.Array,
    temperature: jax.Array,
    top_p: Any,
    mask: Any,
    *,
    length: int,
    top_k: Any,
    among: Any,
) -> jax.Array:
    def draw(number: Any, logits: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, number)
        return next_tokens(own, logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p, among=among)

    def step(carry: Any, number: jax.Array) -> Any:
        token, cache = carry
        logits, cache = model.extend(token[:, None], cache)
        token = draw(number, logits)
        return (token, cache), token

    masks = () if mask is None else (mask,)
    logits, cache = model.extend(prompt, model.empty_cache(len(prompt)), *masks)
    first = draw(0, logits)
    _, others = lax.scan(step, (first, cache), jnp.arange(1, length))
    return jnp.concatenate([prompt, first[:, None], others.T], axis=1)


_generated = compiled_function(_generate, static=("length", "top_k", "among"))


def _left_padded(tokens: np.ndarray, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """The tokens with all padding before them, and their mask: the logits of the last column continue every row."""
    mask = np.asarray(mask, bool)
    _require(mask.shape == tokens.shape, f"`mask` must have the shape {tokens.shape} of `prompt`, got {mask.shape}.")
    _require(mask.any(1).all(), "`mask` is False for a complete row of `prompt`: each must have at least one token.")
    shifts = mask[:, ::-1].argmax(1)
    columns = (np.arange(mask.shape[1]) - shifts[:, None]) % mask.shape[1]
    return np.take_along_axis(tokens, columns, 1), np.take_along_axis(mask, columns, 1)


def _checked(model: Any, prompt: Any, length: int) -> tuple[np.ndarray, int]:
    """The prompt on the host, and the length; raises if either is invalid."""
    if not all(hasattr(model, name) for name in ("extend", "empty_cache", "context")):
        raise TypeError(
            f"{type(model).__name__} cannot generate text: it has no `extend` and `empty_cache`, as `GPT` has."
        )
    tokens, length = np.asarray(prompt), operator.index(length)
    _require(length >= 1, f"`length` must be at least 1, got {length}.")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"`prompt` must be an integer array, got {tokens.dtype}.")
    fits = tokens.ndim == 2 and tokens.size > 0
    _require(fits, f"`prompt` must be [batch, time] with at least one token, got the shape {tokens.shape}.")
    vocabulary = model.config.vocab_size
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    _require(not wrong.size, f"Tokens must be from 0 to {vocabulary - 1}, but `prompt` has {wrong[:1].tolist()}.")
    return tokens.astype(np.int32), length


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
