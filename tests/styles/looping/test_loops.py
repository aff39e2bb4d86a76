"""A loop yields checkpoints at exactly the right steps, however it is iterated and whatever ends it."""

import gc
import itertools
import logging
import math
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jax_trainer import testing
from jax_trainer.adapters import linen_program
from jax_trainer.core import NonFiniteError, compile_program
from jax_trainer.datasets import ArrayLoader, Data, DataError, SupervisedBatch
from jax_trainer.engine import Plan, run
from jax_trainer.styles.checkpoints import Checkpoint, CheckpointFileReader, CheckpointFileWriter
from jax_trainer.styles.loop_tasks import EvalTask, TrainTask
from jax_trainer.styles.looping import EvalLoop, TrainLoop
from jax_trainer.testing import assert_close, assert_same_bits, digest, numbered_data

DATA = numbered_data(100)
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(12, 4, 3)).astype(np.float32), RNG.normal(size=(12, 4)).astype(np.float32)
RATE = 0.1
MOMENTUM = optax.sgd(0.1, momentum=0.9)


# a line, as plain functions: quick to compile


def line_init(rngs: dict[str, jax.Array], x: jax.Array) -> dict[str, Any]:
    return {"params": jnp.ones(x.shape[-1])}


def line(variables: dict[str, Any], x: jax.Array) -> jax.Array:
    return x @ variables["params"]


def square(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return ((outputs - targets) ** 2).mean()


def points(length: int | None = None) -> Iterator[Any]:
    return zip(itertools.islice(itertools.cycle(X), length), itertools.cycle(Y), strict=False)


def line_loop(data: Any = None, *, init: Any = line_init, **options: Any) -> TrainLoop:
    task = TrainTask(apply=line, optimizer=optax.sgd(RATE), loss=square, data=points() if data is None else data)
    options = {"n_steps": 8, "n_steps_per_checkpoint": 3, "stdout": False, **options}
    return TrainLoop(init=init, task=task, **options)


# a network with dropout, a running mean and momentum: everything that exactness may miss


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        mean = self.variable("means", "input", lambda: jnp.zeros(x.shape[-1]))
        if train:
            mean.value = 0.9 * mean.value + 0.1 * x.mean(0)
        x = nn.Dropout(0.2, deterministic=not train)(x - mean.value)
        return nn.Dense(4, kernel_init=nn.initializers.zeros, name="out")(x)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return testing.cross_entropy(logits, labels).mean()


def loader() -> ArrayLoader:
    return ArrayLoader((DATA["x"], DATA["y"]), 16, shuffle=True, drop_last=True, seed=1)  # 6 batches


def stream() -> Iterator[Any]:
    return (batch for epoch in itertools.count(1) for batch in loader().epoch(epoch))


def net_task(data: Any) -> TrainTask:
    return TrainTask(apply=Net().apply, optimizer=MOMENTUM, loss=cross_entropy, data=data)


def net_loop(data: Any, *, init: Any = None, **options: Any) -> TrainLoop:
    init = Net().init if init is None else init
    given = {"rnkey": jax.random.key(5), "n_steps": 17, "n_steps_per_checkpoint": 5, "stdout": False, **options}
    return TrainLoop(init=init, task=net_task(data), **given)


def all_of(checkpoint: Checkpoint) -> tuple[Any, ...]:
    """What must be the same bit for bit."""
    state = (checkpoint.model_params, checkpoint.model_state, checkpoint.optimizer_state)
    return (*state, checkpoint.grads, checkpoint.rng, checkpoint.extra, np.float32(checkpoint.loss))


def steps_until(error: type[BaseException], loop: TrainLoop) -> list[tuple[int, int]]:
    """The checkpoints that iterating gives before it raises `error`."""
    steps: list[tuple[int, int]] = []
    with pytest.raises(error):
        steps.extend((checkpoint.step, checkpoint.n_completed_steps) for checkpoint in iter(loop))
    return steps


def last_of(checkpoints: Any) -> Checkpoint:
    *_, last = checkpoints
    return last


SOURCES = {"loader": loader, "stream": stream}
DURABLE = pytest.fixture(params=list(SOURCES))


@DURABLE
def source(request: pytest.FixtureRequest) -> Any:
    return SOURCES[request.param]


_THROUGH: dict[Any, Checkpoint] = {}


@pytest.fixture
def through(source: Any) -> Checkpoint:
    """The checkpoint of a loop that ran through."""
    if source not in _THROUGH:
        _THROUGH[source] = last_of(net_loop(source()))
    return _THROUGH[source]


def test_checkpoints_fall_on_multiples_and_on_the_last_step():
    given = [(c.step, c.n_completed_steps) for c in line_loop()]
    assert given == [(3, 3), (6, 3), (8, 2)]


def test_a_checkpoint_holds_the_weights_the_loss_and_the_gradients_of_its_step():
    weights = np.ones(3)
    expected = {}
    for step, (x, y) in enumerate(points(8), 1):
        error = x @ weights - y
        grads = 2 * x.T @ error / len(y)
        weights = weights - RATE * grads
        expected[step] = (weights, (error**2).mean(), grads)
    for checkpoint in line_loop():
        weights, loss, grads = expected[checkpoint.step]
        assert_close(checkpoint.model_params, weights, rtol=1e-5)
        assert_close(checkpoint.grads, grads, rtol=1e-5)
        assert checkpoint.loss == pytest.approx(loss, rel=1e-5)
        assert isinstance(checkpoint.loss, float)
        assert checkpoint.elapsed_time > 0


def test_a_checkpoint_that_is_kept_stays_as_it_was():
    loop = net_loop(loader())
    kept = loop.next_step()
    before = digest(all_of(kept))
    for _ in loop:
        pass
    assert digest(all_of(kept)) == before
    assert kept.step == 1


@pytest.mark.parametrize("source", [pytest.param("loader", marks=pytest.mark.slow), "stream"], indirect=True)
def test_a_loop_trains_as_the_engine_does(source: Any, through: Checkpoint):
    def loss(params: Any, state: Any, batch: Any, rng: jax.Array, train: bool) -> Any:
        logits, mutable = state.apply(params, batch[0], train=train)
        return cross_entropy(logits, batch[1]), (mutable, {})

    program = linen_program(Net(), loss, MOMENTUM, to_input=lambda batch: batch[0])
    compiled = compile_program(program)
    state = compiled.init(jax.random.key(5), next(iter(source().epoch(1) if source is loader else source())))
    state = run(compiled, state, source(), Plan(max_steps=17))
    assert_same_bits((through.model_params, through.model_state), (state.params, state.model_state))


def test_every_way_to_iterate_gives_the_same_weights(source: Any, through: Checkpoint):
    loop = net_loop(source(), n_steps=6)
    evaluate = EvalLoop(EvalTask(Net().apply, {"loss": cross_entropy}, loader()))
    steps = [evaluate(loop.next_step()).step, loop.next_checkpoint().step]
    steps += [checkpoint.step for checkpoint in loop]
    loop.n_steps_per_checkpoint = 2
    for checkpoint in loop(n_steps=17):
        steps.append(checkpoint.step)
        if checkpoint.step == 10:
            break
    steps.append(next(loop(n_steps=17)).step)
    last = last_of(loop.run(17))
    assert steps == [1, 5, 6, 8, 10, 12]
    assert_same_bits(all_of(last), all_of(through))


def test_a_loop_resumes_from_disk_to_the_same_bits(source: Any, through: Checkpoint, tmp_path: Path):
    writer, reader = CheckpointFileWriter(tmp_path), CheckpointFileReader(tmp_path, Net().init)
    for step in (10, 15, 17):  # in the middle of an epoch, and with another cadence than the one that ran through
        loop = net_loop(source(), init=reader, rnkey=None if step > 10 else jax.random.key(5))
        last = last_of(writer(checkpoint) for checkpoint in loop(n_steps=step))
        loop.close()
    assert_same_bits(all_of(last), all_of(through))


def test_a_loop_resumes_from_a_checkpoint_in_memory(source: Any, through: Checkpoint):
    first = last_of(net_loop(source())(n_steps=9))
    loop = net_loop(source(), init=first)
    assert loop.step == 9
    assert_same_bits(all_of(last_of(loop)), all_of(through))


def test_a_checkpoint_of_another_optimizer_is_refused():
    task = TrainTask(line, optax.adam(RATE), square, points())
    with pytest.raises(ValueError, match="step 1 .*`opt_state`"):
        TrainLoop(line_loop().next_step(), task)


def test_a_list_of_batches_begins_anew_when_it_ends():
    batches = list(points(3))
    again = last_of(line_loop(batches))
    assert_same_bits(again.model_params, last_of(line_loop(batches * 3)).model_params)


def test_inputs_and_targets_may_be_several_none_or_named():
    pairs = [((x, x), (y, y)) for x, y in points(3)]
    task = TrainTask(lambda v, a, b: (line(v, a), line(v, b)), optax.sgd(RATE), lambda o, p, y, z: square(o, y), pairs)
    init = lambda rngs, a, b: line_init(rngs, a)
    several = TrainLoop(init, task, n_steps=4, stdout=False)
    no_targets = [(batch, ()) for batch in points(3)]
    named = line_loop([SupervisedBatch(size=4, input=x, target=y) for x, y in points(3)], n_steps=4)
    alone = TrainLoop(
        lambda rngs, x, y: line_init(rngs, x),
        TrainTask(lambda v, x, y: square(line(v, x), y), optax.sgd(RATE), jnp.mean, no_targets),
        n_steps=4,
        stdout=False,
    )
    expected = last_of(line_loop(list(points(3)), n_steps=4)).model_params
    for loop in (several, named, alone):
        assert_close(last_of(loop).model_params, expected)


def test_next_step_and_next_checkpoint_go_behind_the_end_and_leave_it():
    loop = line_loop(n_steps=4)
    last_of(loop)
    assert [loop.next_step().step, loop.next_checkpoint().step, loop.n_steps] == [5, 6, 4]


def test_the_end_can_be_moved_while_the_loop_runs():
    loop, given = line_loop(n_steps=100), []
    for checkpoint in loop:
        given.append(checkpoint)
        loop.n_steps = 7
    assert [checkpoint.step for checkpoint in given] == [3, 6, 7]
    assert loop.checkpoint is given[-1]


def test_numbers_of_steps_that_make_no_sense_are_refused(subtests):
    for options in [{"n_steps": -1}, {"n_steps_per_checkpoint": 0}, {"n_steps": 1.5}]:
        with (
            subtests.test(options=options),
            pytest.raises(ValueError, match=f"`{next(iter(options))}` must be .* of at least"),
        ):
            line_loop(**options)


def test_a_stream_that_ends_early_gives_its_last_steps_and_then_an_error():
    loop = line_loop(points(5), n_steps_per_checkpoint=4)
    assert [next(loop).step, next(loop).step] == [4, 5]
    with pytest.raises(DataError, match="used only once") as raised:
        next(loop)
    assert "at step 5" in "".join(raised.value.__notes__)
    with pytest.raises(RuntimeError, match=r"ended at step 5 \(DataError.*init=loop.checkpoint"):
        loop.next_step()
    loop = line_loop(points(5), n_steps_per_checkpoint=4)
    loop.next_checkpoint()
    with pytest.raises(DataError):
        loop.next_checkpoint()
    assert loop.checkpoint is not None
    assert loop.checkpoint.step == 5


def test_a_stream_of_exactly_as_many_batches_as_steps_is_enough():
    assert last_of(line_loop(points(8))).step == 8


def test_an_error_of_the_data_comes_after_the_steps_before_it():
    def failing() -> Iterator[Any]:
        yield from points(4)
        raise OSError("the disk is gone")

    loop = line_loop(failing())
    assert [next(loop).step, next(loop).step] == [3, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loop)


def test_a_failing_loss_is_reported_before_anything_is_computed():
    def wrong(outputs: Any, targets: Any) -> Any:
        return outputs @ jnp.ones(77)  # the line of the user

    task = TrainTask(apply=line, optimizer=optax.sgd(RATE), loss=wrong, data=points())
    with pytest.raises(TypeError) as raised:
        TrainLoop(line_init, task, n_steps=3)
    assert raised.value.__notes__[0].startswith("In your code")
    assert "the line of the user" in raised.value.__notes__[0]


def test_a_loss_that_is_not_one_number_is_refused(subtests):
    for loss, message in [
        (lambda o, y: (o - y) ** 2, "Take its mean"),
        (lambda o, y: (o.mean(), {}), "TrainTask.loss.*tuple"),
    ]:
        with subtests.test(loss=loss, message=message), pytest.raises((TypeError, ValueError), match=message):
            TrainLoop(line_init, TrainTask(line, optax.sgd(RATE), loss, points()), n_steps=3)


def test_a_batch_that_is_no_pair_is_refused_by_what_it_is():
    with pytest.raises(DataError, match="pair.*dict.* x, y"):
        line_loop([{"x": X[0], "y": Y[0]}])


def test_an_unknown_kind_of_collections_is_refused():
    with pytest.raises(ValueError, match="key 'inti'"):
        line_loop(collections={"inti": ["params"]})


def test_a_loss_that_is_not_finite_ends_the_loop_and_leaves_checkpoints_alone():
    batches = list(points(5))
    batches[4] = (np.full_like(X[0], np.nan), Y[0])
    loop = line_loop(batches)
    kept = next(loop)
    with pytest.raises(NonFiniteError, match="Step 5: the loss was nan"):
        next(loop)
    assert loop.checkpoint is kept
    assert math.isfinite(kept.loss)


# interruptions


def interrupting(at: int, number: int = signal.SIGINT) -> Data:
    """Gives a signal while batch `at` is made."""

    def batches() -> Iterator[Any]:
        for index, batch in enumerate(points()):
            if index == at:
                signal.raise_signal(number)
            yield batch

    return Data(batches(), prefetch=0)


def test_an_interruption_gives_a_last_checkpoint_and_is_raised_at_the_next_pull():
    loop = line_loop(interrupting(4))
    assert steps_until(KeyboardInterrupt, loop) == [(3, 3), (5, 2)]
    rest = list(loop)  # continues with the same iterator
    assert [checkpoint.step for checkpoint in rest] == [6, 8]
    assert_same_bits(all_of(rest[-1]), all_of(last_of(line_loop())))


def test_an_interruption_in_the_last_steps_is_not_forgotten():
    loop = line_loop(interrupting(7))
    assert steps_until(KeyboardInterrupt, loop)[-1] == (8, 2)
    assert list(loop) == []


def test_an_interruption_of_next_step_or_next_checkpoint_is_raised_at_once():
    loop = line_loop(interrupting(1))
    loop.next_step()
    with pytest.raises(KeyboardInterrupt):
        loop.next_step()
    assert loop.checkpoint is not None
    assert loop.checkpoint.step == 2
    loop = line_loop(interrupting(1, signal.SIGTERM))
    with pytest.raises(SystemExit) as raised:
        loop.next_checkpoint()
    assert raised.value.code == 143
    assert loop.checkpoint is not None
    assert loop.checkpoint.step == 2
    assert loop.next_step().step == 3


@pytest.mark.slow
def test_an_interruption_does_not_wait_for_a_batch_that_does_not_come():
    late = threading.Event()

    def hanging() -> Iterator[Any]:
        yield from points(2)
        late.wait(2.5)

    loop = line_loop(hanging())
    threading.Timer(0.5, lambda: signal.raise_signal(signal.SIGINT)).start()
    threading.Timer(1.8, late.set).start()
    assert next(loop).step == 2
    with pytest.raises(KeyboardInterrupt):
        next(loop)


# the model's state, and options


class Counting(nn.Module):
    """Counts its calls, in a collection of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        calls = self.variable("calls", "number", lambda: jnp.zeros((), jnp.int32))
        self.sow("intermediates", "input", x)
        if not self.is_initializing():
            calls.value = calls.value + 1
        return nn.Dense(1, kernel_init=nn.initializers.zeros, name="out")(x)[..., 0]


@pytest.mark.parametrize(
    ("mutable", "calls"), [(True, 4), (False, 0), pytest.param(["calls"], 4, marks=pytest.mark.slow)]
)
def test_only_mutable_collections_are_changed(mutable: Any, calls: int):
    task = TrainTask(Counting().apply, optax.sgd(RATE), square, points())
    loop = TrainLoop(Counting().init, task, n_steps=4, mutable_collections=mutable, stdout=False)
    *_, last = loop
    assert set(last.model_state) == {"calls"}
    assert last.model_state["calls"]["number"] == calls


def test_a_model_gets_the_random_streams_that_collections_name():
    def noisy(variables: dict[str, Any], x: jax.Array, rngs: dict[str, jax.Array]) -> jax.Array:
        assert set(rngs) == {"noise", "more"}
        return line(variables, x) + jax.random.normal(rngs["noise"])

    task = TrainTask(noisy, optax.sgd(0.0), square, list(points(1)))
    options: Any = {"collections": {"apply": ["noise", "more"]}, "n_steps": 2, "stdout": False}
    first, second = TrainLoop(line_init, task, **options)
    again, other = TrainLoop(line_init, task, **options), TrainLoop(line_init, task, jax.random.key(1), **options)
    assert first.loss != second.loss
    assert next(again).loss == first.loss
    assert next(TrainLoop(line_init, task, jax.random.PRNGKey(0), **options)).loss == first.loss
    assert next(other).loss != first.loss


def test_with_an_input_sample_one_batch_is_read_before_the_first_step_and_trained_on():
    drawn: list[int] = []

    def watched() -> Iterator[Any]:
        for batch in points():
            drawn.append(1)
            yield batch

    loop = line_loop(watched(), input_sample=X[0])
    assert len(drawn) == 1
    assert_same_bits(last_of(loop).model_params, last_of(line_loop()).model_params)


def test_several_devices_share_the_batches_and_give_the_same_weights(tmp_path: Path):
    devices, writer = jax.devices()[:4], CheckpointFileWriter(tmp_path)
    first = next(line_loop(devices=devices))
    assert len(first.model_params.sharding.device_set) == 4
    writer(first)
    one = last_of(line_loop())
    for init in (first, CheckpointFileReader(tmp_path, line_init)):
        last = last_of(line_loop(init=init, devices=devices))
        assert len(last.model_params.sharding.device_set) == 4
        assert_close(last.model_params, one.model_params, rtol=1e-5)


def test_a_loop_prints_the_size_of_the_model_once_unless_silent(capsys: pytest.CaptureFixture[str]):
    loop = line_loop(stdout=True, devices=jax.devices()[:2])
    assert "Total model initialization time is " in capsys.readouterr().out
    for _ in loop:
        pass
    assert capsys.readouterr().out.splitlines() == ["Total number of trainable weights: 3 ~ 0.0 MB."]
    for _ in loop:
        pass
    assert "at step 8, and `n_steps` is 8" in capsys.readouterr().out
    for _ in line_loop()(n_steps=1):
        pass
    assert not capsys.readouterr().out


def test_the_threads_of_a_loop_end_with_it():
    others = set(threading.enumerate())

    def prefetching() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in others and "prefetch" in thread.name]

    loop = line_loop(points())
    loop.next_step()
    assert prefetching()
    del loop
    gc.collect()
    assert not prefetching()
    loop = line_loop(points())
    loop.next_step()
    loop.close()
    assert not prefetching()
    with pytest.raises(RuntimeError, match="it was closed"):
        loop.next_step()


def test_what_the_engine_has_to_say_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="jax_trainer"):
        line_loop().next_step()
    assert "keeps no position" in caplog.text
