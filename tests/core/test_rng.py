import jax
import jax.numpy as jnp

from jax_trainer.core import stream, streams
from jax_trainer.core.random import key_data, key_of
from jax_trainer.testing import assert_same_bits, digest

NAMES = ("init", "train", "eval", "model", "dropout", "params", "noise")


def test_a_key_is_restored_from_its_data():
    for impl in ["threefry2x32", "rbg"]:
        key = jax.random.key(3, impl=impl)
        assert key_data(key).dtype == jnp.uint32, impl
        assert key_of(key_data(key)).dtype == key.dtype, impl
        assert_same_bits(key_of(key_data(key)), key)


def test_key_data_is_unchanged():
    data = jax.random.PRNGKey(3)
    assert_same_bits(key_data(data), data)


def test_every_stream_has_its_own_key():
    key = jax.random.key(0)
    assert len({digest(key), *(digest(stream(key, name)) for name in NAMES)}) == len(NAMES) + 1


def test_a_stream_is_found_by_name_not_by_order():
    key = jax.random.key(0)
    assert_same_bits(streams(key, "noise", "dropout")["dropout"], stream(key, "dropout"))
    assert_same_bits(streams(key, "dropout")["dropout"], stream(key, "dropout"))


def test_a_stream_has_the_same_key_in_every_process():
    # an address computed with Python's salted `hash` would differ from run to run
    expected = jax.random.fold_in(jax.random.key(0), 0x5C66E4A3)
    assert_same_bits(stream(jax.random.key(0), "train"), expected)


def test_streams_can_be_found_while_tracing():
    key = jax.random.key(0)
    assert_same_bits(jax.jit(lambda k: stream(k, "train"))(key), stream(key, "train"))
