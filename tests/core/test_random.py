"""Sequences of keys are determined by their seed, without duplicates."""

import itertools

import jax
import numpy as np

from jax_trainer import random


def key_words(keys: object) -> list[tuple[int, ...]]:
    return [tuple(jax.random.key_data(key).tolist()) for key in keys]  # type: ignore[attr-defined]


def test_a_seed_gives_the_same_sequence_again_and_no_key_twice():
    first, again, other = (key_words(itertools.islice(random.sequence(seed), 20)) for seed in (0, 0, 1))
    assert first == again
    assert len(set(first + other)) == 40


def test_several_sequences_differ():
    sequences = random.sequence(seed=0, num=3)
    assert isinstance(sequences, list)
    assert len({word for keys in sequences for word in key_words(itertools.islice(keys, 5))}) == 15


def test_a_collection_has_a_key_for_every_label():
    keys = random.into_collection(jax.random.key(0), ["params", "dropout"])
    assert list(keys) == ["params", "dropout"]
    assert len(set(key_words(keys.values()))) == 2
    assert random.into_collection(jax.random.key(0), []) == {}


def test_keys_can_be_used_for_sampling():
    assert np.isfinite(jax.random.normal(next(random.into_sequence(jax.random.key(0))), (3,))).all()
