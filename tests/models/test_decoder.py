"""`Decoder`; that it computes what Llama, Mistral and Qwen compute is tested in `tests/pretrained`."""

from typing import Any

import numpy as np
import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import DecoderConfig
from tests.rows import each

TOKENS = np.zeros((2, 6), np.int32)


def tiny(**keys: Any) -> DecoderConfig:
    return DecoderConfig(**{"vocab_size": 11, "layers": 3, "heads": 4, "width": 16, **keys})


def test_a_decoder_has_the_parameters_of_the_formula(outline, parameters):
    model = outline(tiny(kv_heads=2, head_size=6, hidden=40, qk_norm=True, qkv_bias=True), TOKENS.shape, np.int32)
    attention = 16 * 6 * (4 + 2 + 2 + 4) + 6 * (4 + 2 + 2) + 2 * 6
    assert parameters(model) == 2 * 11 * 16 + 3 * (attention + 3 * 16 * 40 + 2 * 16) + 16
    assert (
        parameters(outline(tiny(tied=True), TOKENS.shape, np.int32))
        == parameters(outline(tiny(), TOKENS.shape, np.int32)) - 11 * 16
    )


def test_a_cache_has_the_heads_of_keys_and_values(outline):
    model = outline(tiny(kv_heads=2, head_size=6), TOKENS.shape, np.int32)
    assert model.empty_cache(5, np.float32).keys.shape == (3, 5, 6, 2, 6)


@each(
    "keys, key, words",
    [
        ({"kv_heads": 3}, "kv_heads", "`heads` 4.*3"),
        ({"width": 18}, "heads", "`width` 18.*4"),
        ({"width": 12}, "heads", "even.*3"),
        ({"head_size": 5}, "head_size", "even.*5"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(keys: dict[str, int], key: str, words: str):
    with pytest.raises(SettingsError, match=words) as error:
        tiny(**keys)
    assert error.value.problems[0][0] == key


def test_a_text_that_is_too_long_is_an_error_with_the_name_of_the_model(outline):
    with pytest.raises(ValueError, match="6 tokens.*Decoder is 4"):
        outline(tiny(context=4), TOKENS.shape, np.int32)
