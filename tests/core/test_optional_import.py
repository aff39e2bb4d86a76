import pytest

from jax_trainer.core import lazy_import


def test_only_the_listed_packages_can_be_loaded():
    with pytest.raises(ValueError, match="'os'.*orbax"):
        lazy_import("os", extra="system")


def test_a_part_of_a_package_is_that_part():
    assert hasattr(lazy_import("orbax.checkpoint"), "PyTreeCheckpointHandler")
