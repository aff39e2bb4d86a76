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


def test_hyperparameters_that_are_not_plain_data_are_refused():
    nested, array = {"model": {"act": [print]}}, {"w": np.zeros(3)}
    for hparams, message in ((nested, "function print"), (array, "array"), ([1, 2], "dict, got a list")):
        with pytest.raises(TypeError, match=message):
            plain_hparams(hparams)


def test_secrets_among_hyperparameters_are_hidden_by_their_names():
    for name in ("password", "db_password", "api_key", "wandb_token", "token", "secret", "API-Key"):
        assert plain_hparams({"deep": {name: "hunter2"}}) == {"deep": {name: "<hidden>"}}
    for name in ("pad_token", "max_tokens", "author", "key", "learning_rate"):
        assert plain_hparams({name: "x"}) == {name: "x"}


def test_addresses_lose_their_passwords():
    assert plain_hparams({"url": "https://me:hunter2@host/x"}) == {"url": "https://<hidden>@host/x"}


def test_functions_are_stored_by_name():
    assert (name_of(plain_hparams), name_of(None)) == ("plain_hparams", None)
