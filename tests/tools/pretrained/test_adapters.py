"""Adapters of LoRA are what peft reads, and merged weights what transformers reads."""

import json
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jax_trainer.adapters import nnx_program
from jax_trainer.core import LoRA, Precision, compile_program, model_params
from jax_trainer.core.lora import Adapting
from jax_trainer.models import Decoder, DecoderConfig
from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.testing import assert_same_bits
from jax_trainer.tools.pretrained import export_adapter, export_pretrained, from_pretrained_config, load_pretrained

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


def test_an_adapter_of_dora_has_a_magnitude_for_each_output_of_the_layer(tmp_path):
    config = DecoderConfig(**SIZES)
    lora = {"match": ".*query.kernel", "rank": 2, "use_dora": True}
    adapted = trained(program_of(Decoder(config, rngs=nnx.Rngs(0)), **lora))
    export_adapter(adapted, tmp_path, config=config)
    arrays = load_file(tmp_path / "adapter_model.safetensors")
    [adapter] = adapted.params.values()
    found = arrays["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"]
    assert_same_bits(found, np.asarray(adapter.magnitude))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["use_dora"]
    merged = model_params(adapted)["blocks"][0]["attention"]["query"]["kernel"]
    np.testing.assert_allclose(np.linalg.norm(np.asarray(merged), axis=0), np.abs(adapter.magnitude), rtol=1e-5)


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls what transformers has deprecated
@pytest.mark.parametrize(
    ("family", "match", "use_dora"),
    [
        ("llama", ".*(query|key|value|out|gate|hidden).kernel", False),
        ("llama", ".*(query|key|value|out|gate|hidden).kernel", True),
        ("gpt2", ".*kernel", False),
        ("gpt2", ".*kernel", True),
        ("qwen2", ".*attention.*kernel", False),
    ],
)
def test_peft_computes_the_same_with_the_exported_adapter(tmp_path, family, match, use_dora):
    import torch  # pyright: ignore[reportMissingImports]

    from tests.tools.pretrained import hf_models

    peft = import_module("peft")
    one = hf_models.FAMILIES[family]
    theirs = one.saved(tmp_path / "base")
    tokens = jnp.asarray(one.inputs, jnp.int32)
    ours = load_pretrained(from_pretrained_config(tmp_path / "base"), tmp_path / "base")
    ours.eval()
    config = ours.config
    program = program_of(ours, match=match, rank=4, alpha=8.0, use_dora=use_dora, alpha_pattern={".*out.kernel": 4.0})
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


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_gradients_of_dora_are_those_of_peft():
    import torch  # pyright: ignore[reportMissingImports]

    peft = import_module("peft")  # by name: see `hf_models`
    layer = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False))
    options = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"], use_dora=True)
    adapted: Any = peft.get_peft_model(layer, options)
    theirs = adapted.base_model.model[0]
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    kernel = theirs.base_layer.weight.detach().numpy().T
    loss = lambda params, state, batch, rng, *, train: (jnp.cos(batch @ params["w"]).sum(), (state, {}))
    adapting = Adapting(LoRA(match="w", rank=2, alpha=6.0, use_dora=True), loss, Precision())
    adapting.trace({"w": kernel}, {}, x, jax.random.key(0))
    adapters, frozen = adapting.split(jax.random.key(0), {"w": jnp.asarray(kernel)})
    rng = np.random.default_rng(1)
    moved = jax.tree.map(lambda leaf: np.asarray(leaf + rng.normal(0, 0.3, leaf.shape), np.float32), adapters)
    with torch.no_grad():
        theirs.lora_A.default.weight.copy_(torch.tensor(moved["w"].a.T))
        theirs.lora_B.default.weight.copy_(torch.tensor(moved["w"].b.T))
        theirs.lora_magnitude_vector.default.weight.copy_(torch.tensor(moved["w"].magnitude))
    torch.cos(theirs(torch.tensor(x))).sum().backward()
    gradients = jax.grad(lambda one: adapting.applied(loss, frozen)(one, {}, x, jax.random.key(0), train=True)[0])(
        moved
    )
    expected = [theirs.lora_A.default.weight, theirs.lora_B.default.weight, theirs.lora_magnitude_vector.default.weight]
    for ours, other in zip(gradients["w"], expected, strict=True):
        np.testing.assert_allclose(ours, other.grad.numpy().T, rtol=1e-5, atol=1e-6)


def load_with(model: Any, params: Any) -> Any:
    nnx.update(model, nnx.State(params))
    model.eval()
    return model
