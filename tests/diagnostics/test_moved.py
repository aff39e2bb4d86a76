import importlib
import re

import pytest

import jax_trainer
from jax_trainer.callbacks import EarlyStopping, EarlyStoppingConfig
from jax_trainer.diagnostics.optional_import import MOVED
from tests.rows import noted_row


def test_a_module_that_moved_is_an_error_that_names_what_to_import():
    for name, place in MOVED.items():
        with pytest.raises(ModuleNotFoundError, match=f"{re.escape(name)}.*`{re.escape(place)}`"):
            importlib.import_module(f"jax_trainer.{name}")
        package, _, word = place.partition(".")
        assert package == "jax_trainer" and (not word or getattr(jax_trainer, word))


def test_an_import_of_the_documents_is_answered_with_the_new_one():
    for statement, new in [
        ("from jax_trainer import training", "`jax_trainer`"),
        ("from jax_trainer.training import TrainLoop", "`jax_trainer`"),
        ("from jax_trainer.evaluation import EvalLoop", "`jax_trainer`"),
        ("from jax_trainer.model import RNNLM", "`jax_trainer.models`"),
        ("from jax_trainer import HigestCheckpointFileReader", "`jax_trainer.HighestCheckpointFileReader`"),
        ("from jax_trainer.checkpoint import CheckpointFileReader", "`jax_trainer.CheckpointFileReader`"),
    ]:
        with noted_row(statement, new), pytest.raises(ImportError, match=new):
            exec(statement, {})


def test_a_callback_with_the_arguments_of_earlier_packages_is_answered_with_what_it_has():
    for arguments, keywords in [((), {"trainer": 1}), ((1,), {}), ((1, None), {}), ((1, 2, 3), {})]:
        with (
            noted_row(arguments, keywords),
            pytest.raises(TypeError, match=r"EarlyStopping.*`self.trainer`.*`self.data_module`"),
        ):
            EarlyStopping(EarlyStoppingConfig(), *arguments, **keywords)


def test_a_module_that_moved_is_no_attribute_and_other_modules_are_missing_as_usual():
    assert not hasattr(jax_trainer, "training")
    with pytest.raises(AttributeError, match=r"HigestCheckpointFileReader.*HighestCheckpointFileReader"):
        jax_trainer.HigestCheckpointFileReader  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ModuleNotFoundError, match="jax_trainer.nowhere") as error:
        importlib.import_module("jax_trainer.nowhere")
    assert "There is no" not in str(error.value)
