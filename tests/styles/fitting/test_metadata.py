import numpy as np
import pytest
import yaml

from jax_trainer.styles.fitting.metadata import config_text, name_of, plain_hparams


def test_hyperparameters_become_plain_data_that_yaml_reads_back():
    given = {"lr": np.float32(0.5), "layers": (8, np.int64(4)), "deep": {"name": "é", "none": None, "on": True}}
    told = {"num_epochs": 3, "hparams": plain_hparams(given)}
    assert yaml.safe_load(config_text(told)) == {
        "num_epochs": 3,
        "hparams": {"lr": 0.5, "layers": [8, 4], "deep": {"name": "é", "none": None, "on": True}},
    }


@pytest.mark.parametrize(
    ("hparams", "words"),
    [
        ({"model": {"act": [print]}}, r"`hparams\['model'\]\['act'\]\[0\]` is a builtin_function_or_method"),
        ({"weights": np.zeros(3)}, r"`hparams\['weights'\]` is a ndarray"),
        ({1: 2}, "has the key 1, a int"),
        ([1, 2], "must be a dict, got a list"),
    ],
)
def test_what_is_no_plain_data_is_named(hparams, words):
    with pytest.raises(TypeError, match=words):
        plain_hparams(hparams)


@pytest.mark.parametrize("name", ["password", "db_password", "api_key", "wandb_token", "token", "secret", "API-Key"])
def test_secrets_are_hidden_by_their_names(name):
    assert plain_hparams({"deep": {name: "hunter2"}}) == {"deep": {name: "<hidden>"}}


@pytest.mark.parametrize("name", ["pad_token", "max_tokens", "author", "key", "learning_rate"])
def test_ordinary_names_are_shown(name):
    assert plain_hparams({name: "x"}) == {name: "x"}


def test_addresses_lose_their_passwords():
    assert plain_hparams({"url": "https://me:hunter2@host/x"}) == {"url": "https://<hidden>@host/x"}


def test_functions_are_told_by_their_names():
    assert (name_of(plain_hparams), name_of(None)) == ("plain_hparams", None)
