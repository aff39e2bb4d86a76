import math
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.logger.values import bins_of, flat, json_text, number_of, numbers_of, plain_of
from tests.rows import noted_row


def test_single_numbers_become_plain_ones_and_nothing_else_does():
    for value, number in [
        *((1, 1), (0.5, 0.5), (True, 1), (np.int64(3), 3), (np.float16(0.5), 0.5), (np.array([[2.5]]), 2.5)),
        *((jnp.float32(0.5), 0.5), (jnp.bfloat16(1.5), 1.5), (jnp.array([7]), 7), (jnp.array(True), 1)),
        *((np.zeros(2), None), ([], None), ("0.5", None), (None, None), (object(), None), (np.str_("a"), None)),
    ]:
        with noted_row(value, number):
            assert number_of(value) == number
            assert type(number_of(value)) is type(number)


def test_only_the_single_numbers_of_a_row_count():
    assert numbers_of({"a": jnp.float32(0.5), "matrix": np.eye(2), "note": "x"}) == {"a": 0.5}


def test_plain_data_has_no_arrays_and_stays_as_it_was():
    matrix = np.eye(2)
    data = plain_of({"m": matrix, "b": jnp.ones(2, jnp.bfloat16), "n": [np.int32(1), None, "x", True], 3: jax})
    matrix[:] = 7
    assert data == {"m": [[1, 0], [0, 1]], "b": [1.0, 1.0], "n": [1, None, "x", True], "3": str(jax)}


def test_json_gets_texts_for_what_it_cannot_hold():
    assert json_text({"a": [math.nan, {"b": -math.inf}], "c": 1}) == '{"a": ["nan", {"b": "-inf"}], "c": 1}'


def test_nested_data_has_names_with_dots():
    data = {"a": {"b": {"c": 1}}, "d": [{"e": None}, 2], "f": (), "g": {}}
    assert flat(data) == {"a.b.c": 1, "d.0.e": None, "d.1": 2}


def test_bins_count_every_finite_value_once():
    values = np.concatenate([np.linspace(-1, 2, 301), [np.nan, np.inf, -np.inf]]).reshape(2, 152)
    bins = bins_of(values)
    assert (len(bins.counts), len(bins.edges), sum(bins.counts), bins.left_out) == (30, 31, 301, 3)
    assert (bins.edges[0], bins.edges[-1]) == (-1, 2)
    inside = [int(np.sum((values >= low) & (values < high))) for low, high in pairwise(bins.edges)]
    assert bins.counts[:-1] == inside[:-1]


def test_any_values_have_bins():
    for values in [
        np.zeros(0),
        np.full(3, np.nan),
        np.ones(4),
        np.array([True, False]),
        np.asarray(jnp.ones(2, "bfloat16")),
    ]:
        with noted_row(values):
            assert sum(bins_of(values).counts) == np.isfinite(values.astype(float)).sum()
