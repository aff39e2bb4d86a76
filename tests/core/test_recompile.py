import warnings
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import BatchChangedError, RecompileError, RecompileWarning, TrainState, compile_program
from jax_trainer.core.compile import CompiledStep
from jax_trainer.testing import linear_program, numbered_data


def batch_of(length: int = 8, **more: Any) -> dict[str, Any]:
    return {"x": np.ones((length, 3), np.float32), "y": np.ones(length, np.float32), **more}


class Sized(flax.struct.PyTreeNode):
    x: Any
    scale: float = flax.struct.field(pytree_node=False)
    size: int = flax.struct.field(pytree_node=False)


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    if isinstance(batch, Sized):
        return (batch.x @ params["w"] * batch.scale).mean()
    first = next(leaf for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf) == 2)
    return ((first.astype(jnp.float32) @ params["w"]) ** 2).mean()


def loss_with_callback(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    """A loss whose executables belong to `jax.jit`, which compares weak types and placements."""
    jax.debug.callback(lambda: None)
    return loss(params, batch, rng=rng, train=train)


class Run:
    """A compiled regression with its state and metric buffer."""

    def __init__(self, batch: Any = None, *, loss: Any = loss, **options: Any) -> None:
        batch = batch_of() if batch is None else batch
        program = function_program(lambda key, batch: {"w": jnp.ones(3)}, loss, optax.sgd(0.1))
        self.compiled = compile_program(program, **options)
        self.state = self.compiled.init(jax.random.key(0), batch)
        self.buffer = self.compiled.train_buffer(self.state, batch, 2)
        self.eval_buffer = self.compiled.eval_buffer(self.state, batch, 2)

    def step(self, batch: Any) -> TrainState:
        self.state, self.buffer, _ = self.compiled.train_step(self.state, self.buffer, batch)
        return self.state

    def evaluate(self, batch: Any) -> None:
        self.eval_buffer, _ = self.compiled.eval_step(self.state, self.eval_buffer, batch)


def compilations(step: Any) -> int:
    assert isinstance(step, CompiledStep)
    return step.compilations


def test_batches_of_the_same_shape_compile_once():
    run = Run()
    run.step(batch_of())
    run.step(jax.tree.map(jnp.asarray, batch_of()))
    run.step(batch_of())
    assert compilations(run.compiled.flat_train_step) == 1


def test_a_number_of_steps_in_a_chunk_is_not_a_recompilation():
    run = Run()
    batches = jax.tree.map(lambda x: np.stack([x] * 3), batch_of())
    for steps in (3, 1, 2):
        run.state, run.buffer, _ = run.compiled.train_chunk(run.state, run.buffer, batches, steps)
    assert compilations(run.compiled._train_chunk) == 1
    assert int(run.state.step) == 6


def test_another_length_warns_with_leaf_shapes_seconds_and_fix():
    run = Run()
    run.step(batch_of(8))
    message = r"`train_step`.*\(\d+\.\d s.*batch\.x changed from float32\[8,3\] to float32\[5,3\].*`drop_last=True`"
    with pytest.warns(RecompileWarning, match=message):
        run.step(batch_of(5))


def test_a_length_is_reported_once():
    run = Run()
    run.step(batch_of(8))
    with pytest.warns(RecompileWarning):
        run.step(batch_of(5))
    for length in (8, 5, 8, 5):
        run.step(batch_of(length))
    assert compilations(run.compiled.flat_train_step) == 2


def test_at_most_three_recompilations_of_a_step_are_warnings_and_the_log_has_all(caplog):
    caplog.set_level("INFO", "jax_trainer")
    run = Run()
    with warnings.catch_warnings(record=True) as message:
        warnings.simplefilter("always")
        for length in range(8, 2, -1):
            run.step(batch_of(length))
    assert [warning.category for warning in message] == [RecompileWarning] * 3
    assert "in the log" in str(message[-1].message)
    assert len([text for text in caplog.messages if text.startswith("`train_step` was compiled again")]) == 5
    assert compilations(run.compiled.flat_train_step) == 6


def test_the_fix_of_another_width_is_padding():
    run = Run({"x": np.ones((8, 3), np.float32), "z": np.ones((8, 4), np.float32)})
    run.step({"x": np.ones((8, 3), np.float32), "z": np.ones((8, 4), np.float32)})
    with pytest.warns(RecompileWarning, match=r"batch\.z changed from float32\[8,4\] to float32\[8,6\]\. Pad"):
        run.step({"x": np.ones((8, 3), np.float32), "z": np.ones((8, 6), np.float32)})


def test_a_changed_static_value_is_named():
    x = np.ones((8, 3), np.float32)
    run = Run(Sized(x, scale=1.0, size=8))
    run.step(Sized(x, scale=1.0, size=8))
    with pytest.warns(RecompileWarning, match=r"batch changed from \(1\.0, 8\) to \(2\.0, 8\)\. Keep static"):
        run.step(Sized(x, scale=2.0, size=8))


def test_a_weak_type_or_placement_that_the_executable_accepts_compiles_nothing():
    run = Run(batch_of(temperature=np.float32(2)))
    run.step(batch_of(temperature=np.float32(2)))
    for change in ({"temperature": 2.0}, {"y": jax.device_put(np.ones(8, np.float32), jax.devices()[0])}):
        run.step(batch_of(temperature=np.float32(2)) | change)
    assert compilations(run.compiled.flat_train_step) == 1


def test_a_changed_weak_type_is_named():
    run = Run(batch_of(temperature=np.float32(2)), loss=loss_with_callback)
    run.step(batch_of(temperature=np.float32(2)))
    message = r"batch\.temperature changed from float32\[\] to float32\[\] \(weak type\)\. Wrap Python numbers"
    with pytest.warns(RecompileWarning, match=message):
        run.step(batch_of(temperature=2.0))


def test_a_changed_placement_is_named():
    run = Run(loss=loss_with_callback)
    run.step(batch_of())
    placed = {**batch_of(), "y": jax.device_put(batch_of()["y"], jax.devices()[0])}
    message = r"batch\.y changed from float32\[8\] to float32\[8\] on 1 device\..*`layout`"
    with pytest.warns(RecompileWarning, match=message):
        run.step(placed)


CHANGED = {
    "dtype": (batch_of() | {"x": np.ones((8, 3), np.int32)}, r"batch\.x changed from float32\[8,3\] to int32\[8,3\]"),
    "rank": (batch_of() | {"y": np.ones((8, 1), np.float32)}, r"batch\.y changed from float32\[8\] to float32\[8,1\]"),
    "more": (batch_of(z=np.ones(8, np.float32)), r"batch\.z changed from absent to float32\[8\]"),
    "less": ({"x": batch_of()["x"]}, r"batch\.y changed from float32\[8\] to absent"),
    "other type": (tuple(batch_of().values()), r"batch\.0 changed from absent to float32\[8,3\]"),
}


def test_a_batch_of_another_kind_is_an_error_and_the_state_stays_usable():
    run = Run()
    before = run.step(batch_of())
    for batch, message in CHANGED.values():
        with pytest.raises(BatchChangedError, match=message):
            run.step(batch)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before)), message
    assert int(run.step(batch_of()).step) == 2


def test_a_batch_of_another_kind_is_an_error_whatever_on_recompile_is():
    for on_recompile in ("error", "ignore"):
        batch, message = CHANGED["dtype"]
        run = Run(on_recompile=on_recompile)
        run.step(batch_of())
        with pytest.raises(BatchChangedError, match=message):
            run.step(batch)


def test_a_list_instead_of_a_tuple_is_an_error():
    x = np.ones((8, 3), np.float32)
    run = Run((x,))
    run.step((x,))
    with pytest.raises(BatchChangedError, match=r"batch changed from tuple to list"):
        run.step([x])


def test_evaluation_of_a_batch_of_another_kind_is_an_error():
    run = Run()
    run.evaluate(batch_of())
    with pytest.raises(BatchChangedError, match=r"batch\.z"):
        run.evaluate(batch_of(z=np.ones(8, np.float32)))


def test_recompilation_can_be_an_error_that_leaves_the_state_alive():
    run = Run(on_recompile="error")
    before = run.step(batch_of(8))
    with pytest.raises(RecompileError, match=r"`train_step`.*batch\.x.*drop_last"):
        run.step(batch_of(5))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert int(run.step(batch_of(8)).step) == 2


def test_recompilation_can_be_ignored():
    run = Run(on_recompile="ignore")
    for length in (8, 5, 3):
        run.step(batch_of(length))
    assert compilations(run.compiled.flat_train_step) == 3


def test_a_smaller_last_batch_of_an_evaluation_is_not_reported():
    for on_recompile in ("warn", "error"):
        run = Run(on_recompile=on_recompile)
        for length in (8, 8, 5):
            run.evaluate(batch_of(length))
        assert compilations(run.compiled.flat_eval_step) == 2


def test_a_smaller_last_batch_with_a_size_is_not_reported():
    run = Run(Sized(np.ones((8, 3), np.float32), scale=1.0, size=8))
    run.evaluate(Sized(np.ones((8, 3), np.float32), scale=1.0, size=8))
    run.evaluate(Sized(np.ones((5, 3), np.float32), scale=1.0, size=5))
    assert compilations(run.compiled.flat_eval_step) == 2  # and no warning was raised


def test_with_error_a_changed_sharding_leaves_the_state_alive(key):
    batch = {name: array[:8] for name, array in numbered_data(8).items()}
    program = compile_program(linear_program(), on_recompile="error")
    state = program.init(key, batch)
    buffer = program.train_buffer(state, batch, 2)
    state, buffer, _ = program.train_step(state, buffer, batch)
    with pytest.raises(RecompileError, match="batch.* on 1 device"):
        program.train_step(state, buffer, jax.device_put(batch, jax.devices()[0]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_evaluation_over_many_lengths_is_reported(key):
    program = compile_program(linear_program())
    data = numbered_data(30)
    state = program.init(key, data)
    buffer = program.eval_buffer(state, data, 2)
    lengths = range(30, 22, -1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:
            buffer, _ = program.eval_step(state, buffer, {name: array[:length] for name, array in data.items()})
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, RecompileWarning)]
    assert len(texts) == 3
    assert "compilation 5" in texts[0]
