import jax
import pytest

from jax_trainer.engine.costs import MARGIN, described_devices, device_memory, largest_batch, parse_bytes
from jax_trainer.sharding.mesh import LayoutError


def line(fixed, slope):
    return lambda size: fixed + slope * size


def test_the_largest_batch_leaves_the_margin_and_no_more(subtests):
    for fixed, known in [(0, 0), (30_000, 30_000), (30_000, 0), (90_000, 45_000)]:
        for start in [1, 16, 700, 1024, 60_000]:
            with subtests.test(start=start, fixed=fixed, known=known):
                limit = 1_000_000
                size, tried = largest_batch(line(fixed, 97), start, limit, fixed=known)
                assert tried[size] == fixed + 97 * size <= (1 - MARGIN) * limit
                assert fixed + 97 * 1.1 * size > limit
                assert len(tried) <= 4


def test_three_compilations_are_enough_where_memory_is_linear():
    assert len(largest_batch(line(3_000, 50), 32, 2_000_000, fixed=2_500)[1]) == 3


def test_a_curve_that_bends_is_followed():
    bent = lambda size: 1000 * size if size < 400 else 400_000 + 300 * (size - 400)  # rematerialised from there on
    size, tried = largest_batch(bent, 32, 600_000)
    assert bent(size) <= 0.97 * 600_000 < bent(round(1.1 * size))
    assert len(tried) <= 6


def test_batches_that_devices_share_are_multiples():
    size, tried = largest_batch(line(0, 1000), 24, 101_000, multiple=8)
    assert size == 96
    assert all(one % 8 == 0 for one in tried)


def test_no_batch_fits_if_a_single_example_does_not():
    size, tried = largest_batch(line(2_000_000, 1), 64, 1_000_000)
    assert size == 0
    assert min(tried) == 1


def test_there_is_no_larger_batch_than_the_data():
    assert largest_batch(line(0, 1), 32, 1_000_000, largest=500)[0] == 500


def test_sizes_have_units(subtests):
    for text, count in [("512", 512), ("80GB", 80 * 10**9), ("4GiB", 4 * 2**30), ("1.5 mib", 3 * 2**19), ("2kB", 2000)]:
        with subtests.test(count=count):
            assert parse_bytes(text or "0") == count


def test_other_sizes_are_refused(subtests):
    for text in ["", "GB", "4 apples", "-1GB", "1e9"]:
        with subtests.test(), pytest.raises(ValueError, match="4GiB"):
            parse_bytes(text)


def test_devices_that_cannot_be_described_are_refused():
    with pytest.raises(LayoutError, match="16.*8.*cpu.*device_count=16"):
        described_devices(16)
    assert described_devices(2) == jax.devices()[:2]


def test_devices_of_a_cpu_share_its_memory():
    assert device_memory(jax.devices()) == device_memory(jax.devices()[:1]) // 8
