"""Texts that a language model goes on with: token by token, with what attention remembers kept in between."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jax_trainer.core import compiled_function


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
) -> Int[Array, "batch total"]:
    """`prompt` and the `length` tokens that the model goes on with, each drawn from what it predicts.

    Compiled once for the shape of the prompt, `length`, `top_k` and `among`: other weights, keys, temperatures and
    values of `top_p` compile nothing. The model is used in evaluation mode, and stays in the mode that it is in.

    Args:
        model: one with `context`, `empty_cache` and `extend`, such as `GPT`.
        key: decides what is drawn.
        prompt: what the text begins with; at least one token.
        length: how many tokens follow; with the prompt, at most the model's context.
        temperature: below 1 the likely gets likelier, above 1 less so; 0 always takes the likeliest.
        top_k: draw among so many of the likeliest tokens only.
        top_p: draw among the fewest tokens that are together at least so likely.
        among: draw among the first so many tokens of the vocabulary only.
    """
    tokens, length = _checked(model, prompt, length)
    vocabulary = model.config.vocab_size
    _require(0 <= temperature < float("inf"), f"`temperature` must be a number of at least 0, got {temperature}.")
    _require(top_p is None or 0 < top_p <= 1, f"`top_p` must be above 0 and at most 1, got {top_p}.")
    for name, count in (("top_k", top_k), ("among", among)):
        known = count is None or 1 <= operator.index(count) <= vocabulary
        _require(known, f"`{name}` must be from 1 to the {vocabulary} tokens of the vocabulary, got {count}.")
    total = tokens.shape[1] + length
    _require(
        total <= model.context,
        f"{tokens.shape[1]} tokens of prompt and {length} more are {total}, and the model's context is "
        f"{model.context}. Use a smaller `length`, a shorter prompt, or `generate_in_rounds`.",
    )
    evaluating = nnx.clone(model)  # shares the weights
    evaluating.eval()
    top_p = None if top_p is None else jnp.float32(top_p)
    return _generated(evaluating, key, tokens, jnp.float32(temperature), top_p, length=length, top_k=top_k, among=among)


def generate_in_rounds(
    model: Any, key: PRNGKeyArray, prompt: Int[Array, "batch prompt"] | np.ndarray, length: int, **options: Any
) -> np.ndarray:
    """As `generate`, for a text of any length: int32 [batch, prompt + length], on the host.

    What does not fit into the context is written in rounds, each of which sees the last half of a context and fills
    the other half. All rounds but the first share one compilation.
    """
    text, length = _checked(model, prompt, length)
    total, half = text.shape[1] + length, max(1, model.context // 2)
    if total <= model.context:
        return np.asarray(generate(model, key, text, length, **options))
    _require(model.context > 1, "A model whose context is 1 cannot go on with a text.")
    number = 0
    while text.shape[1] < total:
        seen = text if text.shape[1] <= half else text[:, -half:]
        new = generate(model, jax.random.fold_in(key, number), seen, model.context - seen.shape[1], **options)
        text = np.concatenate([text, np.asarray(new)[:, seen.shape[1] :]], axis=1)
        number += 1
    return text[:, :total]


def next_tokens(
    key: PRNGKeyArray,
    logits: Float[Array, "batch vocab"],
    *,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | None = None,
    top_p: float | Float[Array, ""] | None = None,
    among: int | None = None,
) -> Int[Array, "batch"]:
    """A token for each row, drawn as `generate` says; for use in functions that are compiled."""
    if among is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < among, logits, -jnp.inf)
    cold = jnp.asarray(temperature, logits.dtype)
    scaled = logits / jnp.where(cold > 0, cold, 1)
    if top_k is not None:
        scaled = jnp.where(_likeliest(scaled, top_k), scaled, -jnp.inf)
    if top_p is not None:
        scaled = jnp.where(_nucleus(scaled, top_p), scaled, -jnp.inf)
    drawn = jax.random.categorical(key, scaled, axis=-1)
    return jnp.where(cold > 0, drawn, logits.argmax(-1)).astype(jnp.int32)


def _likeliest(logits: jax.Array, count: int) -> Bool[Array, "batch vocab"]:
    """Which are the `count` largest of each row; of equal ones the first."""
    _, places = lax.top_k(logits, count)
    rows = jnp.arange(len(logits))[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, places].set(True)


def _nucleus(logits: jax.Array, share: float | jax.Array) -> Bool[Array, "batch vocab"]:
    """Which are the fewest of each row that are together at least so likely: never none."""
    order = jnp.argsort(logits, axis=-1, descending=True)
    ranked = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), axis=-1)
    needed = jnp.cumsum(ranked, -1) - ranked < share  # what the likelier ones lack
    rows = jnp.arange(len(logits))[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(needed.at[:, 0].set(True))


def _generate(
    model: Any, key: Any, prompt: jax.Array, temperature: jax.Array, top_p: Any, *, length: int, top_k: Any, among: Any
) -> jax.Array:
    def draw(number: Any, logits: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, number)
        return next_tokens(own, logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p, among=among)

    def step(carry: Any, number: jax.Array) -> Any:
        token, cache = carry
        logits, cache = model.extend(token[:, None], cache)
        token = draw(number, logits)
        return (token, cache), token

    logits, cache = model.extend(prompt, model.empty_cache(len(prompt)))
    first = draw(0, logits)
    _, others = lax.scan(step, (first, cache), jnp.arange(1, length))
    return jnp.concatenate([prompt, first[:, None], others.T], axis=1)


_generated = compiled_function(_generate, static=("length", "top_k", "among"))


def _checked(model: Any, prompt: Any, length: int) -> tuple[np.ndarray, int]:
    """The prompt on the host, and the length, after everything that can be wrong with them was looked for."""
    if not all(hasattr(model, name) for name in ("extend", "empty_cache", "context")):
        raise TypeError(
            f"{type(model).__name__} cannot go on with a text: it has no `extend` and `empty_cache`, as `GPT` has."
        )
    tokens, length = np.asarray(prompt), operator.index(length)
    _require(length >= 1, f"`length` must be at least 1, got {length}.")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"A prompt is made of whole numbers, got an array of {tokens.dtype}.")
    fits = tokens.ndim == 2 and tokens.size > 0
    _require(fits, f"A prompt is [batch, time] with at least one token, got an array of shape {tokens.shape}.")
    vocabulary = model.config.vocab_size
    wrong = tokens[(tokens < 0) | (tokens >= vocabulary)]
    _require(not wrong.size, f"Tokens are from 0 to {vocabulary - 1}, and the prompt has {wrong[:1].tolist()}.")
    return tokens.astype(np.int32), length


def _require(is_right: bool, text: str) -> None:
    if not is_right:
        raise ValueError(text)
