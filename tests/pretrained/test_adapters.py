"""Adapters of LoRA are what peft reads, and merged weights what transformers reads."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jax_trainer.adapters import nnx_program
from jax_trainer.core import LoRA, compile_program, model_params
from jax_trainer.models import Decoder, DecoderConfig
from jax_trainer.pretrained import (
    PretrainedError,
    export_adapter,
    export_pretrained,
    from_pretrained_config,
    load_pretrained,
)
from jax_trainer.testing import assert_same_bits

TOKENS = np.array([[1, 2, 3, 4]], np.int32)
SIZES: dict[str, Any] = {"vocab_size": 16, "context": 8, "layers": 1, "heads": 2, "width": 8, "hidden": 12}


def program_of(model: Any, **lora: Any) -> Any:
    def loss(model: Any, batch: Any, train: bool) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch).mean()

    return compile_program(nnx_program(model, loss, optax.adam(0.1), lora=LoRA(**lora)))


def trained(program: Any, tokens: Any = TOKENS) -> Any:
    """A state as after training, without compiling a step."""
    state, rng = program.init(jax.random.key(0), tokens), np.random.default_rng(0)
    moved = lambda leaf: np.asarray(leaf) + rng.normal(0, 0.2, leaf.shape).astype(np.float32)
    return state.replace(params=jax.tree.map(moved, state.params))


@pytest.fixture(scope="module")
def state() -> Any:
    config = DecoderConfig(**SIZES)
    lora = {"match": ".*(query|value).kernel", "rank": 2, "alpha": 6.0, "rank_pattern": {".*value.*": 3}}
    return trained(program_of(Decoder(config, rngs=nnx.Rngs(0)), **lora)), config


def test_an_adapter_has_the_factors_as_they_were_trained(state, tmp_path):
    (adapted, config), folder = state, tmp_path / "adapter"
    export_adapter(adapted, folder, config=config, base_model="tiny")
    arrays = load_file(folder / "adapter_model.safetensors")
    written = json.loads((folder / "adapter_config.json").read_text())
    ours = adapted.params["blocks.0.attention.query.kernel"]
    module = "model.layers.0.self_attn.q_proj"
    assert_same_bits(arrays[f"base_model.model.{module}.lora_A.weight"], np.asarray(ours.a).T)
    assert_same_bits(arrays[f"base_model.model.{module}.lora_B.weight"], np.asarray(ours.b).T)
    assert written["target_modules"] == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    assert {written["r"], *written["rank_pattern"].values()} == {2, 3}
    assert not written["fan_in_fan_out"] and written["base_model_name_or_path"] == "tiny"
    with pytest.raises(FileExistsError, match="adapter_config.json"):
        export_adapter(adapted, folder, config=config)


def test_merged_weights_are_written_as_those_of_any_model(state, tmp_path):
    adapted, config = state
    export_pretrained(adapted, tmp_path, config=config)
    merged = model_params(adapted)["blocks"][0]["attention"]["query"]["kernel"]
    written = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert_same_bits(written, np.asarray(merged).T)


def test_what_has_no_adapters_is_an_error(state, tmp_path):
    adapted, config = state
    with pytest.raises(PretrainedError, match="`lora`"):
        export_adapter(adapted.replace(frozen={}), tmp_path, config=config)


def test_an_embedding_is_refused(tmp_path):
    config = DecoderConfig(**SIZES)
    adapted = program_of(Decoder(config, rngs=nnx.Rngs(0)), match="tokens", rank=2).init(jax.random.key(0), TOKENS)
    with pytest.raises(PretrainedError, match=r"tokens is model.embed_tokens.weight \[16, 8\]"):
        export_adapter(adapted, tmp_path, config=config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers has deprecated
@pytest.mark.parametrize(
    ("family", "match"),
    [("llama", ".*(query|key|value|out|gate|hidden).kernel"), ("gpt2", ".*kernel"), ("qwen2", ".*attention.*kernel")],
)
def test_peft_computes_the_same_with_the_exported_adapter(tmp_path, family, match):
    import hf_models
    import peft
    import torch

    one = hf_models.FAMILIES[family]
    theirs = one.saved(tmp_path / "base")
    tokens = jnp.asarray(one.inputs, jnp.int32)
    ours = load_pretrained(from_pretrained_config(tmp_path / "base"), tmp_path / "base")
    ours.eval()
    config = ours.config
    program = program_of(ours, match=match, rank=4, alpha=8.0)
    state = trained(program, tokens)
    bound = load_with(ours, model_params(state))
    export_adapter(state, tmp_path / "adapter", config=config, base_model=str(tmp_path / "base"))
    adapted = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        expected = adapted(torch.tensor(one.inputs)).logits.numpy()
        base = adapted.unload()(torch.tensor(one.inputs)).logits.numpy()
    found = np.asarray(bound(tokens))
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()
    assert np.abs(base - expected).max() > 0.01


def load_with(model: Any, params: Any) -> Any:
    nnx.update(model, nnx.State(params))
    model.eval()
    return model
