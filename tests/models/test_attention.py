from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import attention
from jax_trainer.models.attention import (
    KVCache,
    RotaryScalingConfig,
    attend,
    real_positions,
    rotary_rates,
    rotated,
)
from tests.rows import each

RNG = np.random.default_rng(0)
BATCH, TIME, HEADS, DIM = 2, 5, 2, 8


def drawn(time: int = TIME, dim: int = DIM) -> np.ndarray:
    return RNG.normal(size=(BATCH, time, HEADS, dim)).astype(np.float32)


def by_hand(query: np.ndarray, key: np.ndarray, value: np.ndarray, may: np.ndarray) -> np.ndarray:
    out = np.zeros(query.shape)
    for row in range(BATCH):
        for head in range(HEADS):
            scores = query[row, :, head] @ key[row, :, head].T / np.sqrt(query.shape[-1])
            weights = np.where(may, np.exp(scores), 0.0)
            out[row, :, head] = weights / weights.sum(1, keepdims=True) @ value[row, :, head]
    return out


def test_a_position_attends_to_the_mean_of_the_unmasked_ones():
    query, key, value = drawn(), drawn(), drawn()
    may = RNG.uniform(size=(TIME, TIME)) < 0.6
    may |= np.eye(TIME, dtype=bool)
    cases = [
        ({}, np.ones((TIME, TIME), bool)),
        ({"is_causal": True}, np.tri(TIME, dtype=bool)),
        ({"mask": may[None, None]}, may),
        ({"is_causal": True, "window": 2}, np.tri(TIME, dtype=bool) & ~np.tri(TIME, k=-2, dtype=bool)),
    ]
    for options, seen in cases:
        found = jax.jit(partial(attend, **options))(query, key, value)
        np.testing.assert_allclose(found, by_hand(query, key, value, seen), rtol=1e-4, atol=1e-5)


@each(
    "backend, dtype, dim, masked, implementation",
    [
        ("gpu", jnp.bfloat16, 64, False, "cudnn"),
        ("gpu", jnp.float16, 128, False, "cudnn"),
        ("gpu", jnp.bfloat16, 64, True, None),
        ("gpu", jnp.float32, 64, False, None),
        ("gpu", jnp.bfloat16, 36, False, None),
        ("gpu", jnp.bfloat16, 136, False, None),
        ("cpu", jnp.bfloat16, 64, False, None),
    ],
)
def test_fused_attention_is_used_where_it_exists(monkeypatch, backend, dtype, dim, masked, implementation):
    seen: list[Any] = []
    monkeypatch.setattr(attention.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(
        attention.jax.nn, "dot_product_attention", lambda *arrays, **options: seen.append(options["implementation"])
    )
    x = jnp.zeros((1, 2, 1, dim), dtype)
    attend(x, x, x, mask=jnp.ones((1, 1, 2, 2), bool) if masked else None, is_causal=not masked)
    assert seen == [implementation]


def test_attention_is_not_fused_in_a_program_for_any_batch_size_which_other_devices_may_run(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(attention.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        attention.jax.nn, "dot_product_attention", lambda *arrays, **options: seen.append(options["implementation"])
    )
    for size in (4, *jax.export.symbolic_shape("batch")):
        x: Any = jax.ShapeDtypeStruct((size, 2, 1, 64), jnp.bfloat16)
        jax.eval_shape(lambda x: attend(x, x, x, is_causal=True), x)
    assert seen == ["cudnn", None]


turn = jax.jit(rotated)


def test_rotated_vectors_are_the_complex_numbers_turned_by_the_position():
    x, places = drawn(), np.array([0, 1, 2, 7, 100])
    rates = 10_000.0 ** (-2 * np.arange(DIM // 2) / DIM)
    turned = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * places[:, None] * rates)[:, None]
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(turn(x, places), expected, rtol=1e-4, atol=1e-4)


def test_products_of_rotated_vectors_depend_on_distances_only():
    query, key = drawn(), drawn()
    products = [
        np.einsum("btnd,bsnd->bnts", *(turn(x, np.arange(TIME) + shift) for x in (query, key))) for shift in (0, 40)
    ]
    np.testing.assert_allclose(products[0], products[1], rtol=1e-3, atol=1e-3)


def test_rotated_vectors_keep_their_type_and_each_row_may_have_its_own_positions():
    x = drawn()
    assert jax.eval_shape(rotated, jnp.asarray(x, jnp.bfloat16), np.arange(TIME)).dtype == jnp.bfloat16
    places = np.stack([np.arange(TIME), np.arange(TIME) + 3])
    np.testing.assert_allclose(turn(x, places)[1], turn(x, places[1])[1], rtol=1e-6)


def test_half_a_pair_cannot_be_turned():
    with pytest.raises(ValueError, match="head size, got 7"):
        rotated(jnp.asarray(drawn(dim=7)), jnp.arange(TIME))


def test_a_cache_gives_what_attending_to_the_complete_text_gives():
    @jax.jit
    def both(query, key, value):
        cache, parts = KVCache.empty(3, BATCH, 9, HEADS, DIM, jnp.float32), []
        for part in (slice(0, 3), slice(3, 4), slice(4, 5)):
            cache = cache.written(1, key[:, part], value[:, part])
            parts.append(cache.attended(1, query[:, part]))
            cache = cache.advanced(part.stop - part.start)
        return attend(query, key, value, is_causal=True), jnp.concatenate(parts, 1), cache

    full, parts, cache = both(drawn(), drawn(), drawn())
    np.testing.assert_allclose(parts, full, rtol=1e-5, atol=1e-5)
    assert int(cache.position) == TIME and cache.position.dtype == jnp.int32
    assert not np.any(cache.keys[0]) and not np.any(cache.keys[2])
    assert len(jax.tree.leaves(cache)) == 3


def test_a_cache_may_be_kept_in_fewer_bits_than_what_is_computed():
    def kept(x):
        cache = KVCache.empty(1, BATCH, 9, HEADS, DIM, jnp.bfloat16).written(0, x, x)
        return cache.keys, cache.attended(0, x)

    keys, seen = jax.eval_shape(kept, drawn())
    assert (keys.dtype, seen.dtype) == (jnp.bfloat16, jnp.float32)


def test_query_heads_share_the_keys_of_their_group():
    query, key, value = drawn(), drawn(), drawn()
    first = slice(0, 1)  # of the two heads of keys and values
    shared = jax.jit(attend)(query, key[:, :, first], value[:, :, first])
    keys, values = (np.repeat(x[:, :, first], HEADS, 2) for x in (key, value))
    expected = by_hand(query, keys, values, np.ones((TIME, TIME), bool))
    np.testing.assert_allclose(shared, expected, rtol=1e-4, atol=1e-5)


PADDED = np.array([[False, False, True, True, True], [True, True, True, False, True]])


@each("window", [None, 2])
def test_a_cache_with_padding_sees_only_what_is_none(window: int | None):
    query, key, value = drawn(), drawn(), drawn()

    @jax.jit
    def parts(query, key, value):
        cache, found, places = KVCache.empty(1, BATCH, 9, HEADS, DIM, jnp.float32), [], []
        for part in (slice(0, 3), slice(3, 5)):
            cache = cache.masked(jnp.asarray(PADDED[:, part]), part.stop - part.start).written(
                0, key[:, part], value[:, part]
            )
            places.append(cache.positions(part.stop - part.start))
            found.append(cache.attended(0, query[:, part], window))
            cache = cache.advanced(part.stop - part.start)
        return jnp.concatenate(found, 1), jnp.concatenate(places, 1), cache.masked(None, 1).mask

    found, places, mask = parts(query, key, value)
    np.testing.assert_array_equal(places, real_positions(jnp.asarray(PADDED)))
    np.testing.assert_array_equal(mask[:, :6], np.pad(PADDED, ((0, 0), (0, 1)), constant_values=True))
    for row in range(BATCH):
        near = np.tri(TIME, dtype=bool) & (True if window is None else ~np.tri(TIME, k=-window, dtype=bool))
        seen = near & PADDED[row]
        expected = by_hand(query, key, value, seen | ~seen.any(1, keepdims=True))
        rows = seen.any(1)
        np.testing.assert_allclose(found[row][rows], expected[row][rows], rtol=1e-4, atol=1e-5)


def test_slow_rotations_are_slowed_down_and_fast_ones_are_not():
    scaling = RotaryScalingConfig(factor=8.0, low=1.0, high=4.0, context=64)
    plain, scaled = rotary_rates(16, 100.0), rotary_rates(16, 100.0, scaling)
    turns = plain * 64 / (2 * np.pi)
    assert (scaled[turns > 4] == plain[turns > 4]).all() and (turns > 4).any()
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-6)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (turns < 1).any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()
    with pytest.raises(SettingsError, match="`low`.*`high` 1"):
        RotaryScalingConfig(low=2.0, high=1.0)
