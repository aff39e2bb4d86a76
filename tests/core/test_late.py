import pytest

from jax_trainer.core import load_late


def test_only_the_listed_packages_can_be_loaded():
    with pytest.raises(ValueError, match="'os' is not one of the packages that are loaded late: orbax"):
        load_late("os", extra="system")


def test_a_part_of_a_package_is_that_part():
    assert hasattr(load_late("orbax.checkpoint"), "PyTreeCheckpointHandler")
