import importlib
import re

import pytest

import jax_trainer
from jax_trainer.callbacks import EarlyStopping, EarlyStoppingConfig
from jax_trainer.moved import MOVED


def test_a_module_that_moved_is_an_error_that_names_what_to_import():
    names = [(name, place) for name, text in MOVED.items() for place in re.findall(r"`(jax_trainer(?:\.\w+)?)`", text)]
    assert len(names) > 5
    for name, place in names:
        with pytest.raises(ModuleNotFoundError, match=f"{re.escape(name)}.*{re.escape(place)}"):
            importlib.import_module(f"jax_trainer.{name}")
        for word in re.findall(r"`(\w+)`", MOVED[name].partition("from")[0].partition(" of ")[0]):
            assert hasattr(importlib.import_module(place), word)


@pytest.mark.parametrize(
    ("statement", "new"),
    [
        ("from jax_trainer import utils", "class_name"),
        ("from jax_trainer.training import TrainLoop", "`TrainLoop`.*`jax_trainer`"),
        ("from jax_trainer.evaluation import EvalLoop", "`EvalLoop`.*`jax_trainer`"),
        ("from jax_trainer.model import RNNLM", "`RNNLM`.*`jax_trainer.models`"),
        ("from jax_trainer import HigestCheckpointFileReader", "`HighestCheckpointFileReader`"),
        ("from jax_trainer.checkpoint import CheckpointFileReader", "`CheckpointFileReader`.*`jax_trainer`"),
    ],
)
def test_an_import_of_the_documents_is_answered_with_the_new_one(statement: str, new: str):
    with pytest.raises(ImportError, match=new):
        exec(statement, {})


@pytest.mark.parametrize(
    ("arguments", "keywords"), [((), {"trainer": 1}), ((1,), {}), ((1, None), {}), ((1, 2, 3), {})]
)
def test_a_callback_with_the_arguments_of_earlier_packages_is_answered_with_what_it_has(arguments, keywords):
    with pytest.raises(TypeError, match=r"EarlyStopping.*`self.trainer`.*`self.data_module`"):
        EarlyStopping(EarlyStoppingConfig(), *arguments, **keywords)


def test_a_module_that_moved_is_no_attribute_and_other_modules_are_missing_as_usual():
    assert not hasattr(jax_trainer, "utils")
    with pytest.raises(AttributeError, match="sharding.*mesh"):
        getattr(jax_trainer, "sharding")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match="jax_trainer.nowhere") as error:
        importlib.import_module("jax_trainer.nowhere")
    assert "There is no" not in str(error.value)
