from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jax_trainer.styles.checkpointer import get_default_checkpointer
from jax_trainer.styles.hooks import every_n_steps, get_ema_hook
from jax_trainer.testing import assert_close, assert_same_bits
from tests.styles.functional.functional_runs import arrays, data, every_weight, fresh, straight, trained

DECAY = 0.8


def average(weights: list[Any]) -> Any:
    """By hand: the first, and what comes after it."""
    found = jax.tree.map(np.float64, weights[0])
    for new in weights[1:]:
        found = jax.tree.map(lambda old, one: DECAY * old + (1 - DECAY) * one, found, new)
    return found


def params(model: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_the_average_is_that_of_all_steps_and_what_is_trained_stays_the_same():
    subject = fresh()
    hook, get_ema_model = get_ema_hook(subject[0], DECAY)
    seen = []

    @every_n_steps(5)
    def look(step: int, **kwargs: Any) -> None:
        seen.append(params(get_ema_model()))

    trained(subject, hooks=[hook, look])
    assert_same_bits(arrays(subject), straight())
    weights = every_weight()
    assert_close(params(get_ema_model()), average(weights), rtol=1e-5)
    assert_close(seen[0], average(weights[:6]), rtol=1e-5)


def test_a_passed_module_provides_all_but_the_averaged_parameters():
    model, optimizer = fresh()
    hook, get_ema_model = get_ema_hook(model, DECAY)
    trained((model, optimizer), hooks=[hook])
    other, _ = fresh()
    averaged: Any = get_ema_model(other)
    assert_same_bits(params(averaged), params(get_ema_model()))
    np.testing.assert_array_equal(averaged.norm.mean[...], other.norm.mean[...])
    assert averaged is not other
    with pytest.raises(ValueError, match=r"bias is \(3,\)"):
        get_ema_model(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_only_parameters_are_averaged_and_the_module_is_a_new_one():
    model, optimizer = fresh()
    hook, get_ema_model = get_ema_hook(model)
    before = get_ema_model()
    assert_same_bits(params(before), params(model))
    trained((model, optimizer), hooks=[hook])
    averaged: Any = get_ema_model()
    again: Any = get_ema_model()
    assert averaged is not model
    np.testing.assert_array_equal(averaged.norm.mean[...], model.norm.mean[...])
    assert averaged.dropout.deterministic
    averaged.out.kernel[...] += 1
    assert np.abs(np.asarray(averaged.out.kernel[...] - again.out.kernel[...])).min() > 0.9


def test_a_second_training_continues_the_average():
    subject = fresh()
    hook, get_ema_model = get_ema_hook(subject[0], DECAY)
    trained(subject, hooks=[hook], n_steps=6)  # an epoch
    trained(subject, hooks=[hook], source=[*data().epoch(2)])
    assert_close(params(get_ema_model()), average(every_weight()), rtol=1e-5)


def test_giving_the_command_of_a_finished_run_again_leaves_the_average_as_it_is(tmp_path):
    def command() -> Any:
        subject = fresh()
        save, _, restore_last = get_default_checkpointer(tmp_path, save_every_n_steps=5)
        restore_last(*subject)
        hook, get_ema_model = get_ema_hook(subject[0], DECAY)
        trained(subject, hooks=[save, hook])
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        return arrays(subject), params(get_ema_model()), files

    (first, average_of_first, files), (again, average_of_again, files_again) = command(), command()
    assert_same_bits((again, average_of_again), (first, average_of_first))
    assert files_again == files


def test_in_another_loop_it_averages_when_it_is_called():
    model, _ = fresh()
    hook, get_ema_model = get_ema_hook(model, DECAY)
    weights = [jax.tree.map(np.asarray, params(model))]
    for step in (1, 2, 3):
        nnx.update(model, jax.tree.map(lambda leaf: leaf + 1, nnx.state(model, nnx.Param)))
        hook(step, model=model, optimizer=None)
        weights.append(jax.tree.map(np.asarray, params(model)))
    assert_close(params(get_ema_model()), average(weights), rtol=1e-5)


def test_what_cannot_be_is_refused():
    model, _ = fresh()
    with pytest.raises(ValueError, match="`decay`.* got 1"):
        get_ema_hook(model, 1)
    with pytest.raises(ValueError, match="one hook.*`get_ema_hook`"):
        trained(hooks=[get_ema_hook(model)[0], get_ema_hook(model)[0]])
