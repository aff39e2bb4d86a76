"""Each family agrees with transformers in logits, padding, cache and generation, and in what is written."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from hf_models import DECODERS, FAMILIES, MASK, TIME, TOKENS, USUAL, VOCAB, hf, outputs, torch
from safetensors.numpy import load_file

from jax_trainer.models import generate
from jax_trainer.pretrained import export_pretrained, from_pretrained_config, load_pretrained

CASES = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in FAMILIES]
EVERY_DECODER = [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in DECODERS]

call = nnx.jit(lambda model, *inputs: model(*inputs))
_SAVED: dict[str, tuple[Any, Path]] = {}


@pytest.fixture
def pretrained(request, tmp_path_factory) -> tuple[Any, Path]:
    """The model of transformers and its folder, made once."""
    name = request.param
    if name not in _SAVED:
        folder = tmp_path_factory.mktemp(name)
        _SAVED[name] = (FAMILIES[name].saved(folder), folder)
    return _SAVED[name]


def close(ours: Any, theirs: np.ndarray) -> bool:
    assert np.asarray(ours).shape == theirs.shape
    return np.abs(np.asarray(ours) - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


def loaded(folder: Path) -> Any:
    model = load_pretrained(from_pretrained_config(folder), folder)
    model.eval()
    return model


@pytest.mark.parametrize("pretrained", CASES, indirect=True)
def test_its_outputs_are_those_of_transformers(pretrained, request):
    theirs, folder = pretrained
    inputs = FAMILIES[request.node.callspec.params["pretrained"]].inputs
    assert close(call(loaded(folder), inputs), outputs(theirs, inputs))


@pytest.mark.parametrize("pretrained", CASES, indirect=True)
def test_what_is_loaded_and_written_has_the_same_bits(pretrained, tmp_path):
    _, folder = pretrained
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
def test_transformers_loads_what_is_written_and_agrees(pretrained, request, tmp_path):
    theirs, folder = pretrained
    export_pretrained(loaded(folder), tmp_path, shard_size="20kB")
    kind = hf.BertForMaskedLM if isinstance(theirs, hf.BertForPreTraining) else type(theirs)
    again, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    inputs = FAMILIES[request.node.callspec.params["pretrained"]].inputs
    np.testing.assert_array_equal(outputs(again.eval(), inputs), outputs(theirs, inputs))
    assert from_pretrained_config(tmp_path) == from_pretrained_config(folder)


@pytest.mark.parametrize("pretrained", [*EVERY_DECODER, pytest.param("bert", marks=pytest.mark.slow)], indirect=True)
def test_padding_on_either_side_changes_nothing(pretrained):
    theirs, folder = pretrained
    expected = outputs(theirs, TOKENS, MASK)
    assert close(np.asarray(call(loaded(folder), TOKENS, MASK))[MASK], expected[MASK])


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", DECODERS, indirect=True)
def test_a_padded_text_in_pieces_has_the_logits_of_the_complete_one(pretrained):
    theirs, folder = pretrained
    model = loaded(folder)

    @nnx.jit
    def in_pieces(model, tokens, mask):
        cache, parts = model.empty_cache(len(tokens)), []
        for start, end in ((0, 5), (5, 6), (6, TIME)):
            logits, cache = model.extend(tokens[:, start:end], cache, mask[:, start:end])
            parts.append(logits)
        return jax.numpy.concatenate(parts, 1)

    expected = outputs(theirs, TOKENS, MASK)
    assert close(np.asarray(in_pieces(model, TOKENS, MASK))[MASK], expected[MASK])


@pytest.mark.slow
@pytest.mark.parametrize("pretrained", DECODERS, indirect=True)
def test_it_generates_the_tokens_of_transformers(pretrained):
    theirs, folder = pretrained
    mask = np.ones_like(MASK)
    mask[0, :4] = False
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = theirs.generate(torch.tensor(TOKENS), attention_mask=torch.tensor(mask).long(), **options).numpy()
    found = generate(loaded(folder), jax.random.key(0), TOKENS, 10, temperature=0.0, mask=mask)
    assert found.tolist() == expected.tolist()
    assert len({tuple(row) for row in expected[:, TIME:].tolist()}) == 2  # the rows differ
    assert expected.max() < VOCAB
