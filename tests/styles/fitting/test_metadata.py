import numpy as np
import pytest
import yaml

from jax_trainer.styles.fitting import config_text, name_of, plain_hparams


def test_hyperparameters_become_plain_data_that_yaml_reads_back():
    hparams = {"lr": np.float32(0.5), "layers": (8, np.int64(4)), "deep": {"name": "é", "none": None, "on": True}}
    metadata = {"num_epochs": 3, "hparams": plain_hparams(hparams)}
    assert yaml.safe_load(config_text(metadata)) == {
        "num_epochs": 3,
        "hparams": {"lr": 0.5, "layers": [8, 4], "deep": {"name": "é", "none": None, "on": True}},
    }


@pytest.mark.parametrize(
    ("hparams", "message"),
    [
        ({"model": {"act": [print]}}, r"`hparams\['model'\]\['act'\]\[0\]` is a builtin_function_or_method"),
        ({"weights": np.zeros(3)}, r"`hparams\['weights'\]` is a ndarray"),
        ({1: 2}, "has the key 1, a int"),
        ([1, 2], "must be a dict, got a list"),
    ],
)
def test_values_that_are_not_plain_data_are_refused_by_name(hparams, message):
    with pytest.raises(TypeError, match=message):
        plain_hparams(hparams)


@pytest.mark.parametrize("name", ["password", "db_password", "api_key", "wandb_token", "token", "secret", "API-Key"])
def test_secrets_are_hidden_by_their_names(name):
    assert plain_hparams({"deep": {name: "hunter2"}}) == {"deep": {name: "<hidden>"}}


@pytest.mark.parametrize("name", ["pad_token", "max_tokens", "author", "key", "learning_rate"])
def test_ordinary_names_are_shown(name):
    assert plain_hparams({name: "x"}) == {name: "x"}


def test_addresses_lose_their_passwords():
    assert plain_hparams({"url": "https://me:hunter2@host/x"}) == {"url": "https://<hidden>@host/x"}


def test_functions_are_stored_by_name():
    assert (name_of(plain_hparams), name_of(None)) == ("plain_hparams", None)
