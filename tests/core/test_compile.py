from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import (
    BatchChangedError,
    FlatState,
    MetricWindow,
    Precision,
    Program,
    RecompileWarning,
    ResidentBatch,
    TrainState,
    compile_program,
    with_ema,
    with_finite_guard,
)
from jax_trainer.core.setup import uses
from jax_trainer.core.steps import make_predict_step
from jax_trainer.sharding import Layout
from jax_trainer.testing import (
    assert_close,
    assert_no_implicit_transfers,
    assert_same_bits,
    linear_program,
    numbered_data,
    tiny_program,
)

BATCH = {"x": np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)}


def squares(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    each = (batch["x"] @ params["w"] - 1) ** 2
    return each.mean(), {
        "draw": jax.random.key_data(rng)[-1].astype(jnp.float32),  # another number for every key
        "each": {"value": each, "mode": "concat"},
        "trained": {"value": each.max(), "log_mode": "train"},
        "evaluated": {"value": each.max(), "log_mode": "eval"},
    }


def regression(loss: Any = squares) -> Program:
    return function_program(lambda key, batch: {"w": jnp.arange(3.0)}, loss, optax.sgd(0.1, momentum=0.9))


@cache
def expected_step() -> Any:
    """A step of `regression`, compiled without the library."""
    return jax.jit(regression().train_step)


class Run:
    """A compiled program with its state and metric buffer."""

    def __init__(self, program: Program, batch: Any = BATCH, **options: Any) -> None:
        self.compiled = compile_program(program, **options)
        self.state = self.compiled.init(jax.random.key(0), batch)
        self.buffer = self.compiled.train_buffer(self.state, batch, 4)
        self.format = self.buffer.format

    def step(self, batch: Any = BATCH) -> Any:
        self.state, self.buffer, out = self.compiled.train_step(self.state, self.buffer, batch)
        return out

    def chunk(self, batches: Any, steps: int) -> Any:
        self.state, self.buffer, out = self.compiled.train_chunk(self.state, self.buffer, batches, steps)
        return out

    def rows(self, steps: int, loose: list[Any]) -> MetricWindow:
        return MetricWindow(1, self.format, np.asarray(self.buffer.rows)[-steps:], tuple(jax.device_get(loose)))


def evaluated(run: Run, batches: list[Any], state: TrainState | None = None) -> dict[str, np.ndarray]:
    state = run.state if state is None else state
    buffer = run.compiled.eval_buffer(state, batches[0], 8)
    fmt = buffer.format
    loose = []
    for batch in batches:
        buffer, more = run.compiled.eval_step(state, buffer, batch)
        loose.append(jax.device_get(more))
    return {name: c.values for name, c in fmt.read(np.asarray(buffer.rows)[-len(batches) :], loose).items()}


def test_a_compiled_step_does_what_the_program_does():
    run = Run(regression(), donate=False)
    expected, report = expected_step()(run.state, BATCH)
    loose, _ = run.step()
    assert_close(run.state, expected)
    column = run.rows(1, [loose]).columns["loss"]
    assert_close(column.values[0], np.float64(report.metrics.by_name["loss"].value))
    assert column.weights == [6]


def test_training_reports_no_metric_of_evaluation_and_the_other_way_round():
    run = Run(regression())
    loose, _ = run.step()
    trained, metrics = set(run.rows(1, [loose]).columns), set(evaluated(run, [BATCH]))
    assert metrics - trained == {"evaluated"}
    assert {"trained", "optimizer/grad_global_norm"} <= trained - metrics


def test_a_step_deletes_its_input_state():
    run = Run(regression())
    before = run.state
    run.step()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))


def test_without_donation_the_state_stays():
    run = Run(regression(), donate=False)
    before = run.state
    run.step()
    assert_same_bits(before.params, {"w": jnp.arange(3.0)})


def test_the_input_buffer_of_a_step_stays_readable():
    run = Run(regression())
    before = run.buffer
    run.step()
    assert not before.rows.is_deleted()
    assert not np.asarray(before.rows).any()


def test_evaluation_does_not_change_the_state():
    run = Run(regression())
    before = jax.tree.map(np.array, run.state)
    evaluated(run, [BATCH])
    assert_same_bits(run.state, before)


def test_a_program_that_starts_from_existing_arrays_leaves_them_alive():
    mine = {"w": jnp.arange(3.0)}
    program = function_program(lambda key, batch: mine, squares, optax.sgd(0.1), init_is_traced=False)
    run = Run(program)
    run.step()
    assert_same_bits(mine, {"w": jnp.arange(3.0)})


def test_a_step_moves_nothing_between_host_and_device():
    run = Run(regression())
    batch = jax.tree.map(jnp.asarray, BATCH)
    run.step(batch)
    with assert_no_implicit_transfers():
        run.step(batch)


def test_gradients_are_returned_when_kept():
    kept, dropped = Run(regression(), keep_grads=True), Run(regression())
    _, report = expected_step()(kept.state, BATCH)
    assert_close(kept.step()[1], report.grads)
    assert dropped.step()[1] is None


def test_every_batch_of_an_evaluation_has_its_own_key_the_same_in_every_evaluation():
    run = Run(regression())
    first = evaluated(run, [BATCH] * 3)["draw"]
    run.step()
    assert len(set(first)) == 3
    np.testing.assert_array_equal(evaluated(run, [BATCH] * 3)["draw"], first)


@pytest.mark.slow
def test_debug_runs_python_at_every_step():
    calls = []

    def loss(params, batch, *, rng, train):
        calls.append(train)
        return params["w"].sum() * batch["x"].sum()

    def calls_per_step(**options) -> list[int]:
        start = lambda key, batch: {"w": jnp.ones(())}
        run = Run(function_program(start, loss, optax.sgd(0.1), log_norms=False), **options)
        run.step()
        counts = []
        for _ in range(3):
            calls.clear()
            run.step()
            counts.append(len(calls))
        return counts

    assert calls_per_step(debug=True) == [1, 1, 1]
    assert calls_per_step() == [0, 0, 0]


def test_debug_shows_values_to_the_loss():
    seen = []

    def loss(params, batch, *, rng, train):
        seen.append(float(batch["x"].sum()))
        if batch["x"][0, 0] > 1e6:
            return params["w"].sum()
        return params["w"].sum()

    run = Run(regression(loss), debug=True)
    run.step()
    evaluated(run, [BATCH])
    assert len(seen) >= 2
    assert_close(seen, [float(BATCH["x"].sum(dtype=np.float64))] * len(seen), rtol=1e-5)


def test_debug_shows_values_inside_functions_that_the_user_compiled():
    seen = []

    @jax.jit
    def mean(x):
        seen.append(float(x.sum()))
        return x.mean()

    run = Run(regression(lambda params, batch, *, rng, train: params["w"].sum() * mean(batch["x"])), debug=True)
    run.step()
    assert len(seen) == 2


@pytest.mark.slow
def test_debug_gives_the_same_numbers(flavour):
    batch = numbered_data(8)
    fast, slow = (Run(tiny_program(flavour, optax.sgd(0.1)), batch, debug=debug) for debug in (False, True))
    for _ in range(2):
        fast.step(batch)
        slow.step(batch)
    assert_close(slow.state, fast.state, rtol=1e-5, atol=1e-5)
    assert_close(slow.rows(2, []).columns["loss"].values, fast.rows(2, []).columns["loss"].values, rtol=1e-5)


def stacked(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)


def unlike(value: Any) -> Any:
    """A batch of the same kind that would make the state non-finite."""
    return jax.tree.map(lambda x: np.full_like(x, np.nan if x.dtype.kind == "f" else 0), value)


@pytest.mark.slow
def test_a_chunk_equals_its_steps_and_ignores_further_batches(flavour):
    batches = [numbered_data(8, seed=seed) for seed in range(3)]
    program = tiny_program(flavour, optax.sgd(0.1, momentum=0.9), dropout=0.5)
    single, chunked = Run(program, batches[0]), Run(program, batches[0])
    for batch in batches:
        single.step(batch)
    chunked.chunk(stacked([*batches, unlike(batches[0])]), steps=3)
    assert_close(chunked.state, single.state)
    expected = single.rows(3, []).columns
    assert_close(
        {name: column.values for name, column in chunked.rows(3, []).columns.items()},
        {name: column.values for name, column in expected.items()},
    )


@cache
def chunk_and_steps() -> tuple[Any, list[Any], Run, Run]:
    """The results of a chunk of 2 steps (and one more batch), of single steps, and both runs."""
    batches = [BATCH, jax.tree.map(lambda x: x + 1, BATCH)]
    single, chunked = Run(regression(), keep_grads=True), Run(regression(), keep_grads=True)
    result = chunked.chunk(stacked([*batches, unlike(BATCH)]), steps=2)
    return result, [single.step(batch) for batch in batches], chunked, single


def test_a_chunk_leaves_the_state_and_the_rows_of_its_steps():
    _, _, chunked, single = chunk_and_steps()
    assert_close(chunked.state, single.state)
    assert_close(chunked.buffer.rows[-2:].view(jnp.float32), single.buffer.rows[-2:].view(jnp.float32))


def test_a_full_chunk_on_an_accelerator_has_a_static_length(monkeypatch):
    run, batches = Run(regression()), stacked([BATCH, unlike(BATCH), BATCH])
    traced = [jax.make_jaxpr(run.compiled._train_on_all)(run.state, run.buffer, batches, n) for n in (None, 2)]
    assert [(uses(one, "while"), uses(one, "scan")) for one in traced] == [(False, True), (True, False)]
    given = []
    monkeypatch.setattr(run.compiled, "_train_chunk", lambda flat, buffer, batches, steps: given.append(steps))
    for backend, steps in (("gpu", 3), ("gpu", 2), ("cpu", 3)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        run.compiled.flat_train_chunk(FlatState.of(run.state), run.buffer, batches, steps)
    assert given == [None, 2, 3]


def test_full_and_partial_chunks_are_compiled_separately_without_a_warning():
    run, batches = Run(regression(), on_recompile="error"), stacked([BATCH, unlike(BATCH)])
    step, flat = run.compiled._train_chunk, FlatState.of(run.state)
    for steps in (None, np.int32(1), None, np.int32(2)):
        flat, run.buffer, _ = step(flat, run.buffer, batches, steps)
    assert int(flat.state.step) == 7 and step.compilations == 2


def test_batches_of_resident_data_are_gathered_in_front_of_the_same_step():
    for steps in [1, 2]:
        data = {"x": np.random.default_rng(1).normal(size=(20, 3)).astype(np.float32)}
        rows = np.random.default_rng(2).permutation(20)[:12].reshape(2, 6).astype(np.int32)
        picked, resident = Run(regression(), on_recompile="error"), Run(regression(), on_recompile="error")
        arrays = resident.compiled.store(data)
        if steps == 1:
            picked.step({"x": data["x"][rows[0]]})
            resident.step(ResidentBatch(rows[0], arrays))
            resident.compiled.train_buffer(resident.state, BATCH, 4)  # starts other data
            resident.step({"x": data["x"][rows[1]]})  # another form of batch is no recompilation
            picked.step({"x": data["x"][rows[1]]})
        else:
            picked.chunk({"x": data["x"][rows]}, 2)
            resident.chunk(ResidentBatch(rows, arrays), 2)
        assert_same_bits(resident.state, picked.state)
        assert_same_bits(resident.buffer.rows, picked.buffer.rows)


def test_metrics_of_another_format_than_that_of_the_buffer_are_an_error():
    run, other = (
        Run(regression()),
        Run(linear_program(), numbered_data(8)),
    )
    with pytest.raises(ValueError, match="metrics changed.*acc.*to draw"):
        run.compiled.train_step(run.state, other.buffer, BATCH)


def test_a_chunk_returns_the_gradients_of_every_step():
    (_, grads), singles, *_ = chunk_and_steps()
    assert_close(jax.tree.map(lambda x: x[:2], grads), stacked([grads for _, grads in singles]))


def test_a_chunk_returns_the_metrics_outside_the_buffer_of_every_step():
    (loose, _), singles, *_ = chunk_and_steps()
    assert set(loose) == {"each"}
    assert_close(loose["each"][:2], np.stack([loose["each"] for loose, _ in singles]))


def test_a_start_from_python_numbers_compiles_once():
    loss = lambda params, batch, *, rng, train: ((batch["x"] - params) ** 2).mean()
    run = Run(function_program(lambda key, batch: jnp.full((), 1.0), loss, optax.adam(0.1)), on_recompile="error")
    run.step()
    run.step()
    assert int(run.state.step) == 2  # and nothing was raised


def test_init_takes_an_example_of_any_kind_of_array():
    compiled = compile_program(regression())
    from_numpy, from_jax = (compiled.init(jax.random.key(0), {"x": kind(BATCH["x"])}) for kind in (np.array, jnp.array))
    assert_same_bits(from_numpy, from_jax)


@pytest.mark.parametrize("report", [lambda x: {f"m{len(x)}": x.sum()}, lambda x: {"m": {"value": x[:, 0]}}])
def test_metrics_that_change_between_batches_are_an_error(report, key):
    def loss(params, batch, *, rng, train):
        return ((batch @ params) ** 2).mean(), report(batch)

    program = compile_program(
        function_program(lambda key, batch: jnp.ones(3), loss, optax.sgd(0.1)), on_recompile="ignore"
    )
    state = program.init(key, np.ones((8, 3), np.float32))
    buffer = program.train_buffer(state, np.ones((8, 3), np.float32), 2)
    state, buffer, _ = program.train_step(state, buffer, np.ones((8, 3), np.float32))
    with pytest.raises(ValueError, match=r"metrics changed.* from .* to "):
        program.train_step(state, buffer, np.ones((5, 3), np.float32))
    assert not state.params.is_deleted()


TRAINED = {"w": jnp.asarray(np.array([3.0, 4.0, 5.0], np.float32))}


@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_state_starts_from_existing_weights_without_deleting_them(debug):
    program = with_finite_guard(with_ema(regression(), 0.9))
    run = Run(program, debug=debug)
    run.state = run.compiled.init_from_params(jax.random.key(1), TRAINED, {})
    fresh = run.compiled.init(jax.random.key(1), BATCH)
    extra = {**fresh.extra, "ema": TRAINED}
    assert_same_bits(run.state, fresh.replace(params=TRAINED, extra=extra))
    run.step()
    assert_same_bits(TRAINED, {"w": np.array([3.0, 4.0, 5.0], np.float32)})


def test_initial_weights_may_be_numpy_arrays_and_are_sharded_by_the_layout():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = lambda path, shape: jax.sharding.PartitionSpec("data")
    compiled = compile_program(
        function_program(lambda key, batch: jnp.zeros(16), squares, optax.adam(0.1)),
        layout=Layout(mesh=mesh, param_spec=split),
    )
    mine = jax.device_put(jnp.arange(16.0), jax.devices()[3])
    for weights in (np.arange(16, dtype=np.float32), mine):
        state = compiled.init_from_params(jax.random.key(0), weights, {})
        assert_same_bits(state.params, jnp.arange(16.0))
        for leaf in (state.params, state.opt_state[0].mu):
            assert {shard.data.shape for shard in leaf.addressable_shards} == {(2,)}
    assert not mine.is_deleted()


def test_a_program_without_init_from_params_is_an_error_that_names_it():
    compiled = compile_program(regression().with_info(init_from_params=None))
    with pytest.raises(ValueError, match=r"existing weights.*`init_from_params`"):
        compiled.init_from_params(jax.random.key(0), TRAINED, {})


@pytest.mark.parametrize(
    ("flavour", "debug"),
    [
        ("nnx", False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("linen", False), ("linen", True), ("nnx", True))),
    ],
)
def test_predictions_are_the_outputs_in_evaluation_mode(flavour, debug):
    batch = numbered_data(8)
    run = Run(tiny_program(flavour, optax.sgd(0.1), dropout=0.5), batch, debug=debug)
    before = jax.tree.map(np.asarray, run.state)
    logits = run.compiled.predict(run.state, batch)
    hidden = batch["x"] @ before.params["hidden"]["kernel"]  # biases, means are 0, variances and scales 1
    expected = np.maximum(hidden / np.sqrt(1 + 1e-5), 0) @ before.params["out"]["kernel"]
    assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert_same_bits(run.state, before)


def predictor(predict_step: Any, **options: Any) -> Any:
    program = regression()._replace(predict_step=predict_step)
    compiled = compile_program(program, **options)
    state = compiled.init(jax.random.key(0), BATCH)
    return lambda batch, number=0: compiled.predict(state, batch, number)


def test_outputs_may_be_any_tree_of_arrays():
    predict = predictor(lambda state, batch: [batch["x"], {"sum": batch["x"].sum(), "nothing": None}])
    (same, rest), n = predict(BATCH), len(BATCH["x"])
    assert_same_bits(same, jnp.asarray(BATCH["x"]))
    assert rest["nothing"] is None
    assert rest["sum"].shape == ()
    assert predictor(lambda state, batch: [batch["x"]])(BATCH)[0].shape == (n, 3)


def test_every_predicted_batch_has_the_random_numbers_of_an_evaluation():
    run = Run(regression())
    drawn = evaluated(run, [BATCH] * 3)["draw"]
    program = regression()
    step = lambda state, batch: program.eval_step(state, batch).by_name["draw"].value
    predict = predictor(step)
    np.testing.assert_array_equal([predict(BATCH, number) for number in range(3)], drawn.astype(np.float32))


def test_predicting_batches_of_many_shapes_warns():
    predict = predictor(lambda state, batch: batch["x"] * 2)
    sized = lambda size: {"x": np.ones((size, 3), np.float32)}
    for number, size in enumerate((8, 7, 6, 5)):
        predict(sized(size), number)
    with pytest.warns(RecompileWarning, match="`predict_step`"):
        predict(sized(4), 4)


def test_a_set_to_predict_has_batches_of_one_kind_and_the_next_set_may_have_another():
    predict = predictor(lambda state, batch: batch["x"] * 2)
    predict(BATCH, 0)
    integers = {"x": np.ones((6, 3), np.int32)}
    with pytest.raises(BatchChangedError, match="batch.x changed from float32.* to int32"):
        predict(integers, 1)
    assert predict(integers, 0).dtype == jnp.int32


def test_a_program_without_predict_step_is_an_error_that_names_the_fix():
    compiled = compile_program(regression())
    with pytest.raises(ValueError, match=r"`predict_step` is None.*`linen_program`.*`nnx_program`"):
        compiled.predict(compiled.init(jax.random.key(0), BATCH), BATCH)


def test_predictions_compute_as_evaluations_do():
    seen = []

    def predict_fn(params, model_state, batch, rng):
        seen.append((params["hidden"]["kernel"].dtype, batch["x"].dtype))
        return batch["x"]

    tiny = tiny_program("linen", precision="bf16")
    assert tiny.predict_step is not None
    state = jax.eval_shape(tiny.init, jax.random.key(0), numbered_data(8))
    assert jax.eval_shape(tiny.predict_step, state, numbered_data(8)).dtype == jnp.float32
    step = make_predict_step(predict_fn, Precision.named("bf16"))
    assert jax.eval_shape(step, state, numbered_data(8)).dtype == jnp.float32
    assert seen == [(jnp.bfloat16, jnp.bfloat16)]


@pytest.mark.parametrize("impl", ["threefry2x32", pytest.param("rbg", marks=pytest.mark.slow)])
def test_with_eval_seed_evaluations_do_not_depend_on_the_training_seed(impl):
    def draws(seed: int, **options: Any) -> list[float]:
        run = Run(regression(), **options)
        run.state = run.compiled.init(jax.random.key(seed, impl=impl), BATCH)
        return [*evaluated(run, [BATCH] * 2)["draw"]]

    assert draws(0, eval_seed=7) == draws(1, eval_seed=7)
    assert len({*draws(0, eval_seed=7), *draws(0, eval_seed=8), *draws(0), *draws(1)}) == 8


def test_a_seed_for_evaluations_changes_no_bit_of_training():
    runs = [Run(regression(), **options) for options in ({}, {"eval_seed": 7})]
    for run in runs:
        evaluated(run, [BATCH])
        run.step()
    assert_same_bits(runs[1].state, runs[0].state)


@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_report_equals_that_of_a_step_without_taking_it(debug):
    run = Run(regression(), debug=debug)
    report = run.compiled.report(run.state, BATCH)
    _, expected = expected_step()(run.state, BATCH)
    assert_close(report.grads, expected.grads)
    assert_close(report.metrics.by_name["loss"].value, expected.metrics.by_name["loss"].value)
    assert "evaluated" not in report.metrics.by_name
    assert int(run.state.step) == 0


def test_an_unknown_on_recompile_is_an_error():
    with pytest.raises(ValueError, match="warn, error, ignore.*'wrn'"):
        compile_program(linear_program(), on_recompile="wrn")  # pyright: ignore[reportArgumentType]
