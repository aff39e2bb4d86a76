import itertools
from typing import Any

import numpy as np

from jax_trainer import ArrayLoader
from jax_trainer.datasets.contents import MOST_BYTES, content_of, is_reproducible

X, Y = np.arange(48, dtype=np.float32).reshape(16, 3), np.arange(16) % 4


def digests(x: Any, y: Any = Y, **options: Any) -> dict[str, str]:
    return content_of(ArrayLoader((x, y), 8, **options))["digests"]


def test_digests_of_arrays_tell_values_types_and_shapes_apart():
    changed = X.copy()
    changed[5, 1] = 2
    first = digests(X)
    assert digests(X.copy()) == first
    for other in (digests(changed), digests(X.astype(np.float64)), digests(X[:, :2]), digests(X[::-1])):
        assert other["0"] != first["0"] and other["1"] == first["1"]
    assert digests(X, Y[::-1])["1"] != first["1"]


def test_the_order_of_batches_is_a_fact_and_shows_in_the_first_batch():
    assert digests(X)["first batch/0"] != digests(X, shuffle=True)["first batch/0"]
    assert digests(X)["0"] == digests(X, shuffle=True)["0"]
    facts = content_of(ArrayLoader((X, Y), {0: 8, 2: 16}, shuffle=True, seed=3))
    assert (facts["batch_size"], facts["batch_sizes"], facts["seed"]) == (8, {"0": 8, "2": 16}, 3)


def test_a_large_array_is_sampled_with_its_first_and_last_example():
    x = np.zeros((MOST_BYTES // 4 // 1024 + 1, 1024), np.float32)
    before = content_of(ArrayLoader(x, 8))["digests"]
    for row in (0, len(x) - 1):
        x[row] = 1
        assert content_of(ArrayLoader(x, 8))["digests"] != before
        x[row] = 0
    assert content_of(ArrayLoader(x, 8))["digests"] == before


def test_the_same_batches_in_another_kind_of_data_have_the_same_first_batch():
    loader = ArrayLoader((X, Y), 8)
    kinds = [loader, list(loader.epoch(1)), lambda: loader.epoch(1), iter([*loader.epoch(1)])]
    found = [content_of(one)["digests"] for one in kinds]
    assert len({one["first batch/0"] for one in found}) == 1


class Examples:
    """Examples by number, as the `dataset` of a torch loader."""

    def __init__(self, y: Any, noise: Any = None) -> None:
        self.y, self.noise = y, noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> Any:
        return X[number] + (0 if self.noise is None else self.noise.normal()), self.y[number]


class Shuffled:
    """A loader without a seed."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        rows = np.random.default_rng().permutation(len(self.dataset))
        yield from (tuple(map(np.stack, zip(*map(self.dataset.__getitem__, part), strict=True))) for part in (rows,))


def test_examples_tell_data_apart_whose_order_is_random():
    one, same, other = (content_of(Shuffled(Examples(y))) for y in (Y, Y.copy(), 3 - Y))
    assert one == same and one["digests"]["0"] == other["digests"]["0"] and one["digests"] != other["digests"]


def test_random_data_is_known_by_opening_it_again():
    noisy = Shuffled(Examples(Y, np.random.default_rng()))
    assert not is_reproducible(noisy, content_of(noisy)["digests"])
    fixed = lambda: ArrayLoader((X, Y), 8).epoch(1)
    assert is_reproducible(fixed, content_of(fixed)["digests"])


def test_data_with_a_digest_of_its_own_is_not_read():
    class Own:
        digest = "version 3"

        def __iter__(self) -> Any:
            raise AssertionError

    assert content_of(Own()) == {"kind": "Own", "digests": {"": "version 3"}}


def test_nothing_is_read_where_each_process_has_a_part(subtests):
    for data in [lambda: itertools.repeat(X), [X, X]]:
        with subtests.test(data=data):
            assert not any(name.startswith("first batch") for name in content_of(data, reads=False)["digests"])
