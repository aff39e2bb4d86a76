"""Each family agrees with transformers in logits, padding, cache and generation, and in what is written."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jax_trainer.models import generate
from jax_trainer.tools.pretrained import export_pretrained, from_pretrained_config, load_pretrained

DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*DECODERS, "bert", "bert-masked", "bert-classifier", "bert-none", "vit", "resnet", "resnet-50")
USUAL = ("gpt2", "llama", "bert", "vit", "resnet")  # one of each, of those that share code
CASES = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in FAMILIES]

call = nnx.jit(lambda model, *inputs: model(*inputs))


class Pretrained(NamedTuple):
    """A model of transformers, its folder, what it is called with, and `hf_models`."""

    model: Any
    folder: Path
    inputs: np.ndarray
    hf: ModuleType


_SAVED: dict[str, Pretrained] = {}


@pytest.fixture
def pretrained(request, tmp_path_factory) -> Pretrained:
    """The model of a family, made once."""
    pytest.importorskip("torch", reason="`make integrations` installs torch")
    from tests.tools.pretrained import hf_models

    if (name := request.param) not in _SAVED:
        folder, family = tmp_path_factory.mktemp(name), hf_models.FAMILIES[name]
        _SAVED[name] = Pretrained(family.saved(folder), folder, family.inputs, hf_models)
    return _SAVED[name]


def close(ours: Any, theirs: np.ndarray) -> bool:
    assert np.asarray(ours).shape == theirs.shape
    return np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


def loaded(folder: Path) -> Any:
    model = load_pretrained(from_pretrained_config(folder), folder)
    model.eval()
    return model


@pytest.mark.parametrize("pretrained", CASES, indirect=True)
def test_its_outputs_are_those_of_transformers(pretrained):
    theirs, folder, inputs, hf = pretrained
    assert close(call(loaded(folder), inputs), hf.outputs(theirs, inputs))


@pytest.mark.parametrize("pretrained", CASES, indirect=True)
def test_what_is_loaded_and_written_has_the_same_bits(pretrained, tmp_path):
    folder = pretrained.folder
    export_pretrained(loaded(folder), tmp_path)
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path))
    if not any(name.startswith("bert.") for name in before):  # a model without a head has no prefix
        after = {name.removeprefix("bert."): value for name, value in after.items()}
    is_unused = lambda name: "seq_relationship" in name or (name.startswith("bert.pooler") and name not in after)
    assert set(after) == {name for name in before if not is_unused(name)}
    for name, value in after.items():
        assert value.dtype == before[name].dtype and value.shape == before[name].shape
        assert (value == before[name]).all() or "num_batches_tracked" in name


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", FAMILIES, indirect=True)
def test_transformers_loads_what_is_written_and_agrees(pretrained, tmp_path):
    theirs, folder, inputs, hf = pretrained
    export_pretrained(loaded(folder), tmp_path, shard_size="20kB")
    pretraining, masked_lm = hf.hf.BertForPreTraining, hf.hf.BertForMaskedLM
    kind = masked_lm if isinstance(theirs, pretraining) else type(theirs)
    again, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    np.testing.assert_array_equal(hf.outputs(again.eval(), inputs), hf.outputs(theirs, inputs))
    assert from_pretrained_config(tmp_path) == from_pretrained_config(folder)


@pytest.mark.parametrize(
    "pretrained",
    [pytest.param(name, marks=() if name == "gpt2" else pytest.mark.slow) for name in (*DECODERS, "bert")],
    indirect=True,
)
def test_padding_on_either_side_changes_nothing(pretrained):
    theirs, folder, tokens, hf = pretrained
    expected = hf.outputs(theirs, tokens, hf.MASK)
    assert close(np.asarray(call(loaded(folder), tokens, hf.MASK))[hf.MASK], expected[hf.MASK])


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", DECODERS, indirect=True)
def test_a_padded_text_in_pieces_has_the_logits_of_the_complete_one(pretrained):
    theirs, folder, tokens, hf = pretrained

    @nnx.jit
    def in_pieces(model, tokens, mask):
        cache, parts = model.empty_cache(len(tokens)), []
        for start, end in ((0, 5), (5, 6), (6, tokens.shape[1])):
            logits, cache = model.extend(tokens[:, start:end], cache, mask[:, start:end])
            parts.append(logits)
        return jax.numpy.concatenate(parts, 1)

    expected = hf.outputs(theirs, tokens, hf.MASK)
    assert close(np.asarray(in_pieces(loaded(folder), tokens, hf.MASK))[hf.MASK], expected[hf.MASK])


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", DECODERS, indirect=True)
def test_an_imported_decoder_generates_the_tokens_of_transformers(pretrained):
    theirs, folder, tokens, hf = pretrained
    expected, mask = hf.generated(theirs, tokens, 10)
    found = generate(loaded(folder), jax.random.key(0), tokens, 10, temperature=0.0, mask=mask)
    assert found.tolist() == expected.tolist()
    assert len({tuple(row) for row in expected[:, tokens.shape[1] :].tolist()}) == 2  # the rows differ
