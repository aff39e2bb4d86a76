import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_trainer.models.pretrained import PretrainedError
from jax_trainer.models.pretrained.patterns import Pattern, Rearrange


def test_a_pattern_finds_the_values_in_a_name(subtests):
    for text, name, values in [
        ("h.{i}.ln.weight", "h.11.ln.weight", {"i": 11}),
        ("layer{stage+1}.{i}.conv{c+1}", "layer2.0.conv3", {"stage": 1, "i": 0, "c": 2}),
        ("[model.]norm.weight", "norm.weight", {}),
        ("[model.]norm.weight", "model.norm.weight", {}),
        ("norm.(weight|gamma)", "norm.gamma", {}),
        ("body.*.kernel", "body.a.b.kernel", {"*0": "a.b"}),
        ("{i}.{i}", "2.2", {"i": 2}),
        ("{i}.{i}", "2.3", None),
        ("h.{i}.weight", "h.x.weight", None),
        ("a.b", "a_b", None),
        ("norm.(weight|gamma)", "norm.beta", None),
    ]:
        with subtests.test(text=text):
            assert Pattern.of(text).match(name) == values


@given(st.integers(0, 10**6), st.integers(0, 99), st.text("abc.", min_size=1, max_size=9))
def test_a_filled_pattern_matches_its_values(i: int, j: int, text: str):
    pattern, values = Pattern.of("[a.]{i}.*.(x|y){j-3}"), {"i": i, "*0": text, "j": j + 3}
    assert pattern.match(pattern.fill(values)) == values


def test_a_pattern_that_cannot_be_read_is_an_error(subtests):
    for text in ["h.{i", "h.i}", "a[b", "(a|b", "{I!}"]:
        with subtests.test(text=text), pytest.raises(PretrainedError, match=re.escape(repr(text))):
            Pattern.of(text)


AXES = st.permutations("abcd")
GROUPS = st.lists(st.booleans(), min_size=3, max_size=3)


def side(names: list[str], joins: list[bool]) -> str:
    """The names as axes, of which neighbours are joined to products."""
    groups = [[names[0]]]
    for name, joined in zip(names[1:], joins, strict=True):
        if joined:
            groups[-1].append(name)
        else:
            groups.append([name])
    return " ".join(one[0] if len(one) == 1 else f"({' '.join(one)})" for one in groups)


@given(AXES, GROUPS, AXES, GROUPS)
def test_a_rearrangement_is_that_of_einsum_and_has_an_inverse(before, joins, after, other_joins):
    sizes = {"a": 2, "b": 3, "c": 1, "d": 5}
    there = Rearrange.of(f"{side(before, joins)} -> {side(after, other_joins)}")
    full = np.arange(30).reshape([sizes[name] for name in before])
    x = full.reshape(Rearrange.of(f"{' '.join(before)} -> {side(before, joins)}").shape(full.shape, sizes))
    turned = there(x, sizes)
    expected = np.einsum(f"{''.join(before)}->{''.join(after)}", full)
    assert (turned.ravel() == expected.ravel()).all()
    assert turned.shape == there.shape(x.shape, sizes)
    assert (there.inverse(turned, sizes) == x).all() and there.inverse(turned, sizes).shape == x.shape


def test_sizes_that_follow_from_the_shape_need_not_be_known_and_a_one_is_dropped():
    assert Rearrange.of("1 (heads dim) -> dim heads")(np.zeros((1, 12)), {"heads": 3}).shape == (4, 3)


def test_a_rearrangement_that_does_not_fit_is_an_error(subtests):
    for text, shape, sizes, words in [
        ("a b", (1, 1), {}, "arrow"),
        ("a b -> a", (1, 1), {}, "same names"),
        ("a a -> a a", (1, 1), {}, "each once"),
        ("2 a -> a 2", (1, 1), {}, "'2'"),
        ("a b -> b a", (3,), {}, r"2 axes.*\[3\]"),
        ("(a b) -> b a", (6,), {}, "`a` or `b`"),
        ("(a b) -> b a", (6,), {"a": 4}, "size 6.*a × b"),
    ]:
        with subtests.test(text=text), pytest.raises(PretrainedError, match=words):
            Rearrange.of(text)(np.zeros(shape), sizes)
