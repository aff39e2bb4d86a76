import importlib
import re

import pytest

import jax_trainer
from jax_trainer.moved import MOVED


def test_a_module_that_moved_is_an_error_that_names_what_to_import():
    names = [(name, place) for name, text in MOVED.items() for place in re.findall(r"`(jax_trainer\.\w+)`", text)]
    assert len(names) > 5
    for name, place in names:
        with pytest.raises(ModuleNotFoundError, match=f"{re.escape(name)}.*{re.escape(place)}") as error:
            importlib.import_module(f"jax_trainer.{name}")
        assert error.value.name == f"jax_trainer.{name}"
        for word in re.findall(r"`(\w+)`", MOVED[name].partition("from")[0].partition(" of ")[0]):
            assert hasattr(importlib.import_module(place), word)


def test_a_module_that_moved_is_no_attribute_and_other_modules_are_missing_as_usual():
    assert not hasattr(jax_trainer, "utils")
    with pytest.raises(AttributeError, match="sharding.*mesh"):
        getattr(jax_trainer, "sharding")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match="jax_trainer.nowhere") as error:
        importlib.import_module("jax_trainer.nowhere")
    assert "There is no" not in str(error.value)
