"""A mapping is data: what it says is checked when it is read."""

import pytest

from jax_trainer.config import ConfigError
from jax_trainer.config.describing import keys_of
from jax_trainer.models.pretrained import (
    ConfigRowConfig,
    InputConfig,
    MappingConfig,
    NumberingConfig,
    PretrainedError,
    TensorRowConfig,
    known_mappings,
)
from jax_trainer.models.pretrained.mapping import read_mapping
from jax_trainer.tools.pretrained.configs import hf_config, model_config

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 64,
    "n_positions": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "activation_function": "gelu_new",
}
LLAMA = {
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
}


def test_a_mistake_in_a_row_is_an_error_with_its_key(subtests):
    for row, key, words in [
        ({"tensor": "h.{i.weight", "array": "params.x"}, "tensor", "h.{i.weight"),
        ({"tensor": "w"}, "array", "'w'"),
        ({"tensor": "w", "array": "params.w", "ignore": "unused"}, "ignore", "'w'"),
        ({"tensor": ["q", "k"], "array": "params.w"}, "axis", "`axis`"),
        ({"tensor": ["q", "k"], "array": ["params.q", "params.k"], "axis": 0}, "array", "not both"),
        ({"tensor": "w", "array": "params.w", "rearrange": "a b"}, "rearrange", "'a b'"),
        ({"tensor": "h.{i}.w", "array": "params.w"}, "array", "same variables"),
        ({"tensor": ["q", "k"], "array": "params.w", "axis": 0, "parts": ["heads", 1]}, "parts", "'heads'"),
        ({"tensor": "w", "arrray": "params.w"}, "arrray", "`array`"),
    ]:
        with subtests.test(row=row):
            with pytest.raises(ConfigError, match=words) as error:
                read_mapping({"tensors": [row]})
            assert error.value.problems[0].key == f"tensors.0.{key}"


def test_a_mapping_that_is_neither_a_name_nor_a_file_names_the_known_ones(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'gpt-2'.*`gpt2`.*torchvision_resnet"):
        read_mapping("gpt-2")
    file = tmp_path / "mine.yaml"
    file.write_text('tensors:\n  - {tensor: "w", array: params.w}\n')
    assert read_mapping(file)[1] == MappingConfig(tensors=(TensorRowConfig("w", "params.w"),))


def test_each_key_of_a_mapping_is_explained(subtests):
    for kind in [ConfigRowConfig, InputConfig, MappingConfig, NumberingConfig, TensorRowConfig]:
        with subtests.test(kind=kind):
            assert all(key.help for key in keys_of(kind))


def test_everything_that_our_model_does_not_support_is_listed_at_once():
    wrong = {**GPT2, "activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}
    del wrong["n_embd"]
    with pytest.raises(PretrainedError) as error:
        model_config(wrong, *read_mapping("gpt2"))
    for words in (
        "`activation_function` is 'relu'",
        "`scale_attn_by_inverse_layer_idx` is True",
        "`n_embd` is missing",
    ):
        assert words in str(error.value)


def test_rotary_positions_are_read_from_files_of_all_versions(subtests):
    for rope, base in [
        ({}, 10_000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
    ]:
        with subtests.test(rope=rope):
            config = model_config({**LLAMA, **rope}, *read_mapping("llama"))
            assert (config.rotary_base, config.rotary_scaling) == (base, None)


def test_scaled_rotary_positions_are_read_and_written(subtests):
    for key in ["rope_scaling", "rope_parameters"]:
        with subtests.test(key=key):
            scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
            scaling["original_max_position_embeddings"] = 16
            config = model_config({**LLAMA, key: scaling}, *read_mapping("llama"))
            assert (config.rotary_scaling.factor, config.rotary_scaling.high, config.rotary_scaling.context) == (
                4.0,
                2.0,
                16,
            )
            assert hf_config(config, known_mappings()["llama"], {})["rope_scaling"] == scaling
            with pytest.raises(PretrainedError, match="'yarn'"):
                model_config({**LLAMA, key: {**scaling, "rope_type": "yarn"}}, *read_mapping("llama"))


def test_a_sliding_window_that_is_off_is_none():
    off = {**LLAMA, "sliding_window": 8}
    assert model_config({**off, "use_sliding_window": False}, *read_mapping("qwen2")).window is None
    assert model_config(off, *read_mapping("mistral")).window == 8
    with pytest.raises(PretrainedError, match="use_sliding_window"):
        model_config({**off, "use_sliding_window": True}, *read_mapping("qwen2"))
