from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jax_trainer.models import GPT, GPTConfig, generation
from jax_trainer.models.generation import generate, generate_in_rounds, next_tokens
from tests.rows import each

VOCAB, CONTEXT = 7, 8
PROMPT = np.array([[1, 2, 3], [6, 0, 5]], np.int32)
KEY, OTHER_KEY = (jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 1))  # compiles in a fraction of the time


@pytest.fixture
def build(filled):
    """A model with diverse predictions."""

    def built(**keys: Any) -> Any:
        sizes = {"vocab_size": VOCAB, "context": CONTEXT, "heads": 2, "width": 8, "layers": 1}
        model = filled(GPTConfig(**{**sizes, "positions": "rotary", "tied": False, **keys}), PROMPT.shape, np.int32)
        model.own_head[...] = jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, 8)), jnp.float32)
        return model

    return built


@pytest.fixture
def model(build):
    return build(dropout=0.5)


@pytest.mark.parametrize(
    "keys",
    [pytest.param({"positions": "learned", "layers": 2}, marks=pytest.mark.slow), {"dropout": 0.5}],
    ids=["learned", "rotary"],
)
def test_a_greedy_text_is_the_one_that_computing_it_anew_for_every_token_gives(keys: dict[str, Any], build, call):
    model = build(**keys)
    written = generate(model, KEY, PROMPT, 5, temperature=0.0)
    model.eval()
    text = np.zeros((2, CONTEXT), np.int32)
    text[:, :3] = PROMPT
    for place in range(3, CONTEXT):
        text[:, place] = np.asarray(call(model, text))[:, place - 1].argmax(-1)
    assert np.array_equal(written, text)
    assert len(np.unique(text[:, 3:])) > 1
    assert written.dtype == jnp.int32


def test_the_key_decides_what_is_drawn_and_the_model_stays_in_its_mode(model):
    texts = [np.asarray(generate(model, key, PROMPT, 5, temperature=5.0)) for key in (KEY, KEY, OTHER_KEY)]
    assert np.array_equal(texts[0], texts[1]) and not np.array_equal(texts[0], texts[2])
    assert all(np.array_equal(text[:, :3], PROMPT) for text in texts)
    assert not model.dropout.deterministic and not model.blocks[0].dropout.deterministic


LOGITS = np.array([0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 0.5], np.float32)
BY_RANK = np.argsort(-LOGITS)
DRAWS = 4000


def likelihoods(logits: np.ndarray, kept: Any = slice(None), temperature: float = 1.0) -> np.ndarray:
    weights = np.zeros(VOCAB)
    weights[kept] = np.exp((logits - logits.max()) / temperature)[kept]
    return weights / weights.sum()


def is_fair(drawn: Any, expected: np.ndarray) -> bool:
    counts, likely = np.bincount(drawn, minlength=VOCAB), expected > 0
    spread = (counts - len(drawn) * expected)[likely] ** 2 / (len(drawn) * expected)[likely]
    return not counts[~likely].any() and spread.sum() < 25  # chi-square, at most six degrees of freedom: one in 3000


CASES: list[tuple[dict[str, Any], np.ndarray]] = [
    ({}, likelihoods(LOGITS)),
    ({"temperature": 0.5}, likelihoods(LOGITS, temperature=0.5)),
    ({"temperature": 3.0, "top_k": 3}, likelihoods(LOGITS, BY_RANK[:3], 3.0)),
    ({"top_p": 0.53}, likelihoods(LOGITS, BY_RANK[:2])),  # these two are 0.534 of all
    ({"top_p": 0.54}, likelihoods(LOGITS, BY_RANK[:3])),
    ({"top_p": 1e-6}, likelihoods(LOGITS, BY_RANK[:1])),
    ({"among": 2}, likelihoods(LOGITS, [0, 1])),
    ({"among": 2, "temperature": 0.0}, likelihoods(LOGITS, [0])),
]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    draw_all = jax.jit(lambda logits: [next_tokens(KEY, logits, **options) for options, _ in CASES])
    for drawn, (options, expected) in zip(draw_all(np.tile(LOGITS, (DRAWS, 1))), CASES, strict=True):
        assert is_fair(drawn, expected), options
    assert not is_fair(np.zeros(DRAWS, int), likelihoods(LOGITS))


def test_generate_draws_by_its_options_and_other_weights_keys_and_temperatures_compile_nothing(
    build, call, monkeypatch
):
    traced: list[int] = []
    extend = GPT.extend
    monkeypatch.setattr(GPT, "extend", lambda *arguments: [traced.append(1), extend(*arguments)][1])
    prompt = np.tile(PROMPT[:1], (DRAWS, 1))
    for number, (key, temperature) in enumerate([(KEY, 2.0), (OTHER_KEY, 6.0)]):
        model = build(dropout=0.5)
        model.own_head[...] = model.own_head[...] * (1 + number)
        draw = partial(generate, model, key, prompt, 1, temperature=temperature)
        drawn = np.asarray(draw(top_k=5, top_p=0.9, among=6))[:, -1]
        assert len(traced) == 2  # the prompt, and what follows
        model.eval()
        logits = np.asarray(call(model, PROMPT), np.float64)[0, -1]
        kept = np.argsort(-logits[:6])[:5]
        ranked = likelihoods(logits, kept, temperature)[kept]
        kept = kept[np.cumsum(ranked) - ranked < 0.9]
        assert 1 < len(kept) < 6
        assert is_fair(drawn, likelihoods(logits, kept, temperature))


def test_a_longer_text_continues_from_the_last_half_of_a_context(model):
    text = generate_in_rounds(model, KEY, PROMPT, 13, temperature=0.0)
    assert text.shape == (2, 16) and text.dtype == np.int32
    assert np.array_equal(text[:, :8], generate(model, KEY, PROMPT, 5, temperature=0.0))
    for end in (8, 12):
        assert np.array_equal(
            text[:, end - 4 : end + 4], generate(model, KEY, text[:, end - 4 : end], 4, temperature=0.0)
        )


def test_rounds_draw_differently_and_a_text_that_fits_is_one_round(model):
    assert np.array_equal(generate_in_rounds(model, KEY, PROMPT, 5), generate(model, KEY, PROMPT, 5))
    long = np.tile(PROMPT, (1, 4))
    text = generate_in_rounds(model, KEY, long, 8)  # the prompt is longer than the context
    assert np.array_equal(text[:, :12], long) and text.shape == (2, 20)
    assert np.array_equal(text, generate_in_rounds(model, KEY, long, 8))


@each(
    "prompt, options, words",
    [
        (PROMPT, {"length": 6}, "3 prompt tokens and 6 more are 9, .*8"),
        (PROMPT, {"length": 0}, "`length` must be at least 1, got 0"),
        (PROMPT[0], {}, r"`prompt` must be \[batch, time\].*\(3,\)"),
        (PROMPT[:, :0], {}, r"`prompt`.*\(2, 0\)"),
        (PROMPT + 1, {}, r"from 0 to 6, .*prompt.* has \[7\]"),
        (PROMPT - 1, {}, r"from 0 to 6, .*prompt.* has \[-1\]"),
        (PROMPT, {"top_k": 8}, "`top_k` must be.*got 8"),
        (PROMPT, {"top_k": 0}, "`top_k` must be"),
        (PROMPT, {"top_p": 0.0}, "`top_p` must be.*got 0.0"),
        (PROMPT, {"among": 9}, "`among` must be"),
        (PROMPT, {"temperature": -1.0}, "`temperature` must be.*got -1.0"),
        (PROMPT, {"temperature": float("nan")}, "`temperature` must be"),
    ],
)
def test_invalid_arguments_of_generate_are_refused(
    prompt: Any, options: dict[str, Any], words: str, model, monkeypatch
):
    monkeypatch.setattr(generation, "_generated", None)  # before anything is compiled
    with pytest.raises(ValueError, match=words):
        generate(model, KEY, prompt, **{"length": 2, **options})


def test_a_prompt_of_other_than_integers_is_refused(model):
    with pytest.raises(TypeError, match="`prompt`.*float32"):
        generate(model, KEY, PROMPT.astype(np.float32), 2)


def test_a_model_that_cannot_generate_is_refused():
    with pytest.raises(TypeError, match="Dense .*`extend`"):
        generate(nn.Dense(3), KEY, PROMPT, 2)


MASK = np.array([[False, True, True], [True, True, False]])


@pytest.mark.slow
@each("positions", ["rotary", "learned"])
def test_padded_prompts_are_continued_as_if_they_were_alone(build, positions: str):
    model = build(positions=positions)
    found = np.asarray(generate(model, KEY, PROMPT, 4, temperature=0.0, mask=MASK))
    assert (found[:, :3] == PROMPT).all()
    for row, mask, text in zip(PROMPT, MASK, found, strict=True):
        alone = np.asarray(generate(model, KEY, row[mask][None], 4, temperature=0.0))[0]
        assert text[3:].tolist() == alone[2:].tolist()


@pytest.mark.slow
def test_nothing_follows_the_token_that_ends_a_text(build):
    model = build()
    free = np.asarray(generate(model, KEY, PROMPT, 5))
    stop = int(free[0, 4])
    ended = np.asarray(generate(model, KEY, PROMPT, 5, stop=stop))
    for one, other in zip(free[:, 3:].tolist(), ended[:, 3:].tolist(), strict=True):
        first = one.index(stop) if stop in one else 5
        assert other == one[:first] + [stop] * (5 - first)


@each("mask, words", [(np.ones((2, 2), bool), r"\(2, 3\).*\(2, 2\)"), (np.zeros((2, 3), bool), "complete row")])
def test_a_mask_that_does_not_fit_is_an_error(build, mask: np.ndarray, words: str):
    with pytest.raises(ValueError, match=words):
        generate(build(), KEY, PROMPT, 2, mask=mask)
