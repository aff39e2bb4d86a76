import pytest

from jax_trainer.diagnostics.optional_import import MissingExtraError, from_extra


def test_a_missing_package_is_named_with_the_extra_that_installs_it():
    with (
        pytest.raises(MissingExtraError, match=r"no_such_tool.*jax-trainer\[drawing\]") as raised,
        from_extra("drawing"),
    ):
        import no_such_tool  # noqa: F401  # pyright: ignore[reportMissingImports]
    assert raised.value.name == "no_such_tool"
