import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.core import compile_program, with_ema
from jax_trainer.datasets import ArrayLoader, DataError
from jax_trainer.engine import predictions
from jax_trainer.sharding import Layout
from jax_trainer.testing import assert_close, assert_same_bits, numbered_data, tiny_program

DATA = numbered_data(203)
EXAMPLE = {name: array[:32] for name, array in DATA.items()}


@functools.cache
def prepared(layout=None, debug=False):
    program = compile_program(tiny_program("linen", optax.sgd(0.1)), layout=layout, debug=debug, on_recompile="ignore")
    return program, program.init(jax.random.key(0), EXAMPLE)


def loader(batch_size=32):
    return ArrayLoader(DATA, batch_size)


def joined(outputs):
    return np.concatenate(list(outputs))


@functools.cache
def expected():
    program, state = prepared()
    return np.asarray(program.predict(state, DATA))


def test_every_example_is_predicted_once_in_order_whatever_the_batches(subtests):
    for batch_size in [32, 100]:
        with subtests.test(batch_size=batch_size):
            found = list(predictions(*prepared(), loader(batch_size)))
            assert [len(outputs) for outputs in found] == [len(batch["id"]) for batch in loader(batch_size)]
            assert_close(joined(found), expected(), rtol=1e-5, atol=1e-5)


def test_outputs_are_on_the_host():
    assert all(type(outputs) is np.ndarray for outputs in predictions(*prepared(), loader()))


def batches():
    return list(loader())


def test_any_kind_of_data_can_be_predicted(subtests):
    for source in [
        batches,
        lambda: iter(batches()),
        lambda: batches,
        lambda: (batch for batch in batches()),
    ]:
        with subtests.test(source=source):
            assert_close(joined(predictions(*prepared(), source())), expected(), rtol=1e-5, atol=1e-5)


def test_many_devices_predict_what_one_does():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    found = joined(predictions(*prepared(layout=Layout(mesh=mesh)), loader()))
    assert_close(found, expected(), rtol=1e-5, atol=1e-5)


def test_at_most_so_many_batches_are_predicted():
    endless = itertools.repeat(EXAMPLE)
    assert len(list(predictions(*prepared(), endless, max_batches=3))) == 3
    with pytest.raises(ValueError, match="`max_batches`.* 1.*got 0"):
        predictions(*prepared(), endless, max_batches=0)


def test_the_next_batch_is_dispatched_before_outputs_are_yielded():
    traced = []

    def predict_step(state, batch):
        traced.append(len(batch["x"]))  # each batch has a shape of its own, and so is traced when it is dispatched
        return batch["x"]

    program = compile_program(
        tiny_program("linen", optax.sgd(0.1))._replace(predict_step=predict_step), on_recompile="ignore"
    )
    sizes = [5, 6, 7, 8]
    found = predictions(program, prepared()[1], [numbered_data(size) for size in sizes])
    seen = [(len(outputs), list(traced)) for outputs in found]
    assert seen == [(5, [5, 6]), (6, [5, 6, 7]), (7, sizes), (8, sizes)]


def test_outputs_do_not_wait_for_a_batch_that_is_late(monkeypatch):
    monkeypatch.setitem(predictions.__globals__, "PATIENCE", 0.05)
    handed_out, in_time = [], []

    def source():
        for number in range(3):
            yield EXAMPLE
            deadline = time.monotonic() + 20
            while len(handed_out) <= number and time.monotonic() < deadline:
                time.sleep(0.01)
            in_time.append(time.monotonic() < deadline)

    for outputs in predictions(*prepared(), source):
        handed_out.append(outputs)
    assert (len(handed_out), in_time) == (3, [True] * 3)


def test_predictions_use_the_averaged_weights():
    tiny = with_ema(tiny_program("linen", optax.sgd(0.1)), 0.5)
    program = compile_program(tiny)
    state = program.init(jax.random.key(0), EXAMPLE)
    averaged = jax.tree.map(lambda leaf: leaf + 1, state.params)
    found = joined(predictions(program, state.replace(extra={"ema": averaged}), [EXAMPLE]))
    plain, _ = prepared()
    assert_same_bits(found, np.asarray(plain.predict(state.replace(params=averaged, extra={}), EXAMPLE)))


def test_debug_mode_shows_values_to_the_model():
    seen = []

    def predict_step(state, batch):
        seen.append(float(batch["x"].sum()))
        return batch["x"] * 2

    program = compile_program(tiny_program("linen", optax.sgd(0.1))._replace(predict_step=predict_step), debug=True)
    _, state = prepared()
    found = joined(predictions(program, state, loader()))
    np.testing.assert_array_equal(found, DATA["x"] * 2)
    assert len(seen) == 7


def test_an_error_says_on_which_batch(subtests):
    for number in [0, 2]:
        with subtests.test(number=number):

            def predict_step(state, batch):
                if len(batch["x"]) == 5:
                    raise KeyError("label")
                return batch["x"]

            program = compile_program(tiny_program("linen", optax.sgd(0.1))._replace(predict_step=predict_step))
            sizes = [5 if index == number else 8 for index in range(4)]
            with pytest.raises(KeyError, match="label") as caught:
                list(predictions(program, prepared()[1], [numbered_data(size) for size in sizes]))
            assert f"This happened on batch {number} of epoch 1 of the 'predict' data." in caught.value.__notes__


def test_a_batch_of_another_kind_is_named():
    odd = {**EXAMPLE, "x": EXAMPLE["x"].astype(np.float16)}
    with pytest.raises(DataError, match="batch 1 of epoch 1 of the 'predict' data differs.*x.*float16"):
        list(predictions(*prepared(), [EXAMPLE, odd]))


def test_no_data_is_an_error(subtests):
    for empty in [list, lambda: lambda: iter([])]:
        with subtests.test(empty=empty), pytest.raises(DataError, match="'predict' data.*empty"):
            list(predictions(*prepared(), empty()))


def test_a_program_that_is_not_compiled_is_an_error_at_once():
    with pytest.raises(TypeError, match="A Program .*compile_program"):
        predictions(tiny_program("linen", optax.sgd(0.1)), prepared()[1], [EXAMPLE])  # pyright: ignore[reportArgumentType]


def test_what_is_random_in_a_prediction_belongs_to_the_batch():
    step = lambda state, batch: jax.random.normal(state.key, (2,)) + 0 * batch["x"].sum()
    program = compile_program(tiny_program("linen", optax.sgd(0.1))._replace(predict_step=step))
    _, state = prepared()
    first, second = (list(predictions(program, state, [EXAMPLE] * 3)) for _ in range(2))
    assert_same_bits(first, second)
    assert len({float(outputs[0]) for outputs in first}) == 3
    assert jnp.isfinite(first[0]).all()


def test_unused_predictions_end_the_making_of_batches():
    closed = []

    def source():
        try:
            yield from itertools.repeat(EXAMPLE)
        finally:
            closed.append(True)

    found = predictions(*prepared(), source)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert closed
