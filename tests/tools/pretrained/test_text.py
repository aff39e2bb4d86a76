"""Text in, text out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jax_trainer.models import Decoder, DecoderConfig
from jax_trainer.models.pretrained import generate_text
from tests.datasets.word_tokenizer import saved_tokenizer

WORDS = ["<end>", *"abcdefghijklmnop"]
PROMPTS = ["a b c d e", "f", "g h c"]


@pytest.fixture(scope="module")
def model() -> Any:
    config = DecoderConfig(vocab_size=20, context=16, layers=1, heads=2, width=16, window=4)
    model = Decoder(config, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    rng = np.random.default_rng(3)
    params = nnx.to_pure_dict(params)
    replaced = {
        name: rng.normal(size=value.shape).astype(np.float32)
        for name, value in params.items()
        if name in ("tokens", "own_head")
    }
    return nnx.merge(graph, nnx.State({**params, **replaced}), rest)


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    return saved_tokenizer(tmp_path, WORDS)


@pytest.mark.slow
def test_a_prompt_is_continued_as_if_it_were_alone_and_up_to_the_end(model, tokenizer):
    together = generate_text(model, tokenizer, PROMPTS, 8, temperature=0.0)
    alone = [generate_text(model, tokenizer, [prompt], 8, temperature=0.0)[0] for prompt in PROMPTS]
    assert together == alone
    assert all(text.startswith(prompt) for text, prompt in zip(together, PROMPTS, strict=True))
    end = together[0].split()[-1]
    stopped = generate_text(model, tokenizer, PROMPTS, 8, temperature=0.0, stop=end)
    assert stopped != together
    for prompt, text, cut in zip(PROMPTS, together, stopped, strict=True):
        new = text.split()[len(prompt.split()) :]
        expected = new[: new.index(end)] if end in new else new
        assert cut.split() == [*prompt.split(), *expected]


def test_what_is_no_list_of_texts_with_tokens_is_an_error(tokenizer):
    with pytest.raises(TypeError, match=r"\['a b'\]"):
        generate_text(None, tokenizer, "a b", 3)
    with pytest.raises(ValueError, match="''"):
        generate_text(None, tokenizer, ["a", ""], 3)
    with pytest.raises(ValueError, match="'</s>'"):
        generate_text(None, tokenizer, ["a"], 3, stop="</s>")
