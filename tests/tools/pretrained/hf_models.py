"""Tiny models of transformers, with weights so large that every part of them matters, saved as safetensors files.

Tests import it when they run: transformers and torch take seconds, in every process that only collects tests.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

hf: Any = import_module("transformers")  # by name: a type checker would read all of its 2,000 files

VOCAB, TIME, WIDTH, LAYERS, HEADS = 64, 12, 32, 2, 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 24,
}
DECODER: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
IMAGES: dict[str, Any] = {"num_labels": 5, "num_channels": 3}

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, VOCAB, (2, TIME))
PIXELS = RNG.normal(size=(2, 16, 16, 3)).astype(np.float32)
MASK = np.ones((2, TIME), bool)
MASK[0, :4] = False  # left
MASK[1, 9:] = False  # right


@dataclass(frozen=True)
class Family:
    """A kind of models of transformers: how a tiny one is made, and what it is called with."""

    make: Callable[[], Any]
    inputs: np.ndarray

    def saved(self, folder: Path, **options: Any) -> Any:
        """The model, saved in `folder`."""
        torch.manual_seed(0)
        model = self.make().eval()
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.normal_(1.0 if "norm" in name.lower() and "weight" in name else 0.0, 0.15)
            for name, one in model.named_buffers():
                if "running" in name:
                    one.uniform_(0.5, 1.5)
        model.save_pretrained(folder, **options)
        return model


def gpt2() -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_positions": 24,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
    }
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0))


def resnet(kind: str, depths: list[int], widths: list[int]) -> Any:
    config = hf.ResNetConfig(embedding_size=4, hidden_sizes=widths, depths=depths, layer_type=kind, **IMAGES)
    return hf.ResNetForImageClassification(config)


def bert(kind: Any, **more: Any) -> Any:
    return kind(hf.BertConfig(**SIZES, **more))


VIT: dict[str, Any] = {
    name: value for name, value in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")
}
FAMILIES = {
    "gpt2": Family(gpt2, TOKENS),
    "llama": Family(
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, rope_theta=5e3, rope_scaling=SCALING)), TOKENS
    ),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=5)), TOKENS),
    "qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**DECODER)), TOKENS),
    "qwen3": Family(
        lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, head_dim=16, tie_word_embeddings=True)), TOKENS
    ),
    "bert": Family(lambda: bert(hf.BertForPreTraining), TOKENS),
    "bert-masked": Family(lambda: bert(hf.BertForMaskedLM), TOKENS),
    "bert-classifier": Family(lambda: bert(hf.BertForSequenceClassification, num_labels=5), TOKENS),
    "bert-none": Family(lambda: bert(hf.BertModel), TOKENS),
    "vit": Family(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT, **IMAGES, image_size=16, patch_size=4)), PIXELS
    ),
    "resnet": Family(lambda: resnet("basic", [2, 2, 2, 2], [4, 8, 16, 32]), PIXELS),
    "resnet-50": Family(lambda: resnet("bottleneck", [3, 4, 6, 3], [16, 32, 64, 128]), PIXELS),
}


def outputs(model: Any, inputs: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """The logits, or hidden vectors, of a model of transformers; positions are counted from the first token."""
    options: dict[str, Any] = {}
    if mask is not None:
        options["attention_mask"] = torch.tensor(mask).long()
        if model.config.model_type != "bert":
            options["position_ids"] = torch.tensor(np.maximum(mask.cumsum(1) - 1, 0))
    is_image = inputs.ndim == 4
    with torch.no_grad():
        found = model(torch.tensor(inputs.transpose(0, 3, 1, 2) if is_image else inputs), **options)
    names = ("logits", "prediction_logits", "last_hidden_state")
    return next(found[name] for name in names if name in found).numpy()


def generated(model: Any, tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """What a model of transformers generates greedily after texts of which the first has padding; and its mask."""
    mask = np.ones_like(MASK)
    mask[0, :4] = False
    options = {"attention_mask": torch.tensor(mask).long(), "max_new_tokens": length, "do_sample": False}
    return model.generate(torch.tensor(tokens), **options).numpy(), mask
