"""`BERT` and `ViT`; that they compute what those of transformers compute is tested in `tests/pretrained`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_trainer.config.settings import SettingsError
from jax_trainer.models import BERTConfig, ViTConfig
from tests.rows import each

TOKENS = np.zeros((2, 6), np.int32)
BERT: dict[str, Any] = {"vocab_size": 11, "context": 8, "layers": 1, "heads": 2, "width": 16}
VIT: dict[str, Any] = {"num_classes": 3, "patch": 4, "layers": 1, "heads": 2, "width": 16}


@each("head, shape", [("masked_lm", (2, 6, 11)), ("classifier", (2, 3)), ("none", (2, 6, 16))])
def test_the_head_of_bert_decides_what_it_returns(head: Any, shape: tuple[int, ...], outline):
    model = outline(BERTConfig(**BERT, head=head, num_classes=3), TOKENS.shape, np.int32)
    call = lambda model, *inputs: model(*inputs)
    assert nnx.eval_shape(call, model, TOKENS).shape == shape
    assert nnx.eval_shape(call, model, TOKENS, jnp.ones((2, 6), bool), TOKENS).shape == shape
    with pytest.raises(ValueError, match="9 tokens.*BERT is 8"):
        nnx.eval_shape(call, model, np.zeros((2, 9), np.int32))


def test_only_bert_without_masked_tokens_has_a_pooler(outline):
    model = outline(BERTConfig(**BERT), TOKENS.shape, np.int32)
    with pytest.raises(ValueError, match="masked_lm"):
        model.pooled(jnp.zeros((2, 6, 16)))


@pytest.mark.slow
def test_blocks_that_are_computed_again_give_the_same_outputs(filled, call):
    keys = {**BERT, "dropout": 0.0}
    once, again = (filled(BERTConfig(**keys, remat=remat), TOKENS.shape, np.int32) for remat in (False, True))
    np.testing.assert_allclose(call(once, TOKENS), call(again, TOKENS), rtol=1e-6)


@each(
    "keys, shape, words",
    [
        ({}, (2, 8, 6, 3), "got 4 for 8 × 6"),
        ({"image_size": 12}, (2, 8, 8, 3), "`image_size` is 12.*8, 8"),
        ({}, (2, 64), r"\(2, 64\)"),
    ],
)
def test_images_that_do_not_fit_are_errors(keys: dict[str, Any], shape: tuple[int, ...], words: str, outline):
    with pytest.raises(ValueError, match=words):
        outline(ViTConfig(**VIT, **keys), shape)


def test_images_of_another_size_than_the_example_are_errors(outline):
    model = outline(ViTConfig(**VIT), (2, 8, 4, 1))
    assert model.positions.shape == (3, 16)
    with pytest.raises(ValueError, match=r"8, 4, 1.*8, 8, 1"):
        nnx.eval_shape(lambda model, x: model(x), model, jax.ShapeDtypeStruct((2, 8, 8, 1), "float32"))


@each("config", [BERTConfig, ViTConfig])
def test_heads_must_divide_the_width(config: Any):
    keys = BERT if config is BERTConfig else VIT
    with pytest.raises(SettingsError, match="`width` 16.*3"):
        config(**{**keys, "heads": 3})
