"""What a curve of losses suggests: the steepest descent, or nothing if there is none."""

import json
import math

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jax_trainer.optimizer.lr_finder import LRFindResult, diverged_at, suggested

COUNT = 100
RATES = np.geomspace(1e-8, 1.0, COUNT)
X = np.log10(RATES)


def curve(fall: float, width: float = 0.5, drop: float = 0.5, end: float = 1.5, noise: float = 0.0, seed: int = 0):
    """Losses that fall around the rate 10**`fall`, and rise `end` decades later."""
    losses = (
        2 - 2 * drop / (1 + np.exp(-(X - fall) / width)) + 0.5 * np.exp(np.clip(4 * (X - fall - end), None, 3)) * 1e-1
    )
    return losses + noise * np.random.default_rng(seed).normal(size=COUNT)


FALLS = st.floats(-6, -2)


@settings(deadline=None, derandomize=True)
@given(FALLS, st.floats(0.2, 0.8), st.floats(0.1, 0.9), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.05]))
def test_the_suggestion_is_the_rate_of_the_steepest_descent(fall, width, drop, seed, noise):
    found = suggested(RATES, curve(fall, width, drop, noise=noise * drop, seed=seed))
    assert found.suggestion is not None
    assert abs(math.log10(found.suggestion) - fall) < 0.5 + width


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.01, 0.5]), st.floats(0.1, 10))
def test_a_loss_that_is_flat_or_noise_has_no_suggestion(seed, noise, level):
    losses = level * (1 + noise * np.random.default_rng(seed).normal(size=COUNT))
    found = suggested(RATES, losses)
    assert found.suggestion is None
    assert "noisy" in found.reason or "not fall" in found.reason or "rises" in found.reason


@settings(deadline=None, derandomize=True)
@given(FALLS, st.floats(0.1, 100), st.integers(0, 2**32 - 1))
def test_the_unit_of_the_loss_does_not_matter(fall, unit, seed):
    losses = curve(fall, noise=0.02, seed=seed)
    assert suggested(RATES, unit * losses).suggestion == suggested(RATES, losses).suggestion


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 30))
def test_a_descent_in_much_noise_needs_a_smaller_noise(seed):
    clear, noisy = (suggested(RATES, curve(-4, drop=0.05, noise=noise, seed=seed)) for noise in (0.002, 0.2))
    assert clear.suggestion is not None and noisy.suggestion is None


def test_a_loss_that_explodes_and_falls_again_suggests_the_descent_before():
    losses = curve(-4, end=4, noise=0.01)
    losses[80:90], losses[90:] = 20.0, np.linspace(10, 0.1, 10)
    found = suggested(RATES, losses)
    assert found.suggestion is not None and abs(math.log10(found.suggestion) + 4) < 1


def test_a_loss_that_only_rises_has_no_suggestion():
    found = suggested(RATES, 1 + RATES * 10)
    assert found.suggestion is None and "rises" in found.reason


def test_a_loss_that_still_falls_at_the_end_is_reported():
    found = suggested(RATES, 2 - RATES)
    assert found.suggestion is not None and "max_lr" in found.reason


def test_too_few_steps_have_no_suggestion():
    found = suggested(RATES[:5], np.array([1.0, 2.0, 4.0, 8.0, 16.0]))
    assert found.suggestion is None and "min_lr" in found.reason


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40), st.integers(0, 60))
def test_a_sweep_ends_at_what_is_not_finite(losses, at):
    assume(at < len(losses))
    assert diverged_at([*losses[:at], math.nan, *losses[at:]], None) == at


def test_a_sweep_ends_where_the_loss_explodes():
    losses = [1.0, 0.9, 0.8, 0.7] + [50.0] * 10
    assert diverged_at(losses, 4.0) is not None and diverged_at(losses, None) is None
    assert diverged_at([-1.0, -1.1, -1.2], 4.0) is None  # negative losses do not count as many times the best


def result() -> LRFindResult:
    return suggested(RATES, curve(-4, noise=0.01))


def test_a_result_is_drawn_shown_and_written(tmp_path):
    found = result()
    figure = found.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG") and len(figure.axes) == 1
    assert (found._repr_png_() or b"").startswith(b"\x89PNG")
    assert json.loads(json.dumps(found.data(), allow_nan=False))["suggestion"] == found.suggestion
    assert len(found.curve) == COUNT and f"{found.suggestion:.3g}" in str(found)
    none = suggested(RATES, np.ones(COUNT))
    assert "no suggestion" in str(none)
