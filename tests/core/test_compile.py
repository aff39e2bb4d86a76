from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.core import Program, StepRows, TrainState, compile_program
from jax_trainer.testing import (
    assert_close,
    assert_no_implicit_transfers,
    assert_same_bits,
    numbered_data,
    tiny_program,
)

BATCH = {"x": np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)}


def squares(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> Any:
    each = (batch["x"] @ params["w"] - 1) ** 2
    return each.mean(), {
        "draw": jax.random.normal(rng),
        "each": {"value": each, "mode": "concat"},
        "trained": {"value": each.max(), "log_mode": "train"},
        "judged": {"value": each.max(), "log_mode": "eval"},
    }


def regression(loss: Any = squares) -> Program:
    return function_program(lambda key, batch: {"w": jnp.arange(3.0)}, loss, optax.sgd(0.1, momentum=0.9))


class Run:
    """A compiled program with its state and tape."""

    def __init__(self, program: Program, batch: Any = BATCH, **options: Any) -> None:
        self.compiled = compile_program(program, **options)
        self.state = self.compiled.init(jax.random.key(0), batch)
        self.format, self.tape = self.compiled.train_tape(self.state, batch, 4)

    def step(self, batch: Any = BATCH) -> Any:
        self.state, self.tape, out = self.compiled.train_step(self.state, self.tape, batch)
        return out

    def chunk(self, batches: Any, steps: int) -> Any:
        self.state, self.tape, out = self.compiled.train_chunk(self.state, self.tape, batches, steps)
        return out

    def rows(self, steps: int, loose: list[Any]) -> StepRows:
        return StepRows(1, self.format, np.asarray(self.tape)[-steps:], tuple(jax.device_get(loose)))


def evaluated(run: Run, batches: list[Any], state: TrainState | None = None) -> dict[str, np.ndarray]:
    state = run.state if state is None else state
    fmt, tape = run.compiled.eval_tape(state, batches[0], 8)
    loose = []
    for batch in batches:
        tape, more = run.compiled.eval_step(state, tape, batch)
        loose.append(jax.device_get(more))
    return {name: c.values for name, c in fmt.read(np.asarray(tape)[-len(batches) :], loose).items()}


def test_a_compiled_step_does_what_the_program_does():
    run = Run(regression(), donate=False)
    expected, report = regression().train_step(run.state, BATCH)
    loose, _ = run.step()
    assert_close(run.state, expected)
    column = run.rows(1, [loose]).columns["loss"]
    assert_close(column.values[0], np.float64(report.metrics.by_name["loss"].value))
    assert column.weights == [6]


def test_training_reports_no_metric_of_evaluation_and_the_other_way_round():
    run = Run(regression())
    loose, _ = run.step()
    trained, judged = set(run.rows(1, [loose]).columns), set(evaluated(run, [BATCH]))
    assert judged - trained == {"judged"}
    assert {"trained", "optimizer/grad_global_norm"} <= trained - judged


def test_a_step_deletes_the_state_it_is_given():
    run = Run(regression())
    before = run.state
    run.step()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.opt_state)))


def test_without_donation_the_state_stays():
    run = Run(regression(), donate=False)
    before = run.state
    run.step()
    assert_same_bits(before.params, {"w": jnp.arange(3.0)})


def test_the_tape_given_to_a_step_stays_readable():
    run = Run(regression())
    before = run.tape
    run.step()
    assert not before.is_deleted()
    assert not np.asarray(before).any()


def test_evaluation_leaves_the_state_alone():
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


def test_gradients_are_handed_out_when_kept():
    kept, dropped = Run(regression(), keep_grads=True), Run(regression())
    _, report = regression().train_step(kept.state, BATCH)
    assert_close(kept.step()[1], report.grads)
    assert dropped.step()[1] is None


def test_every_batch_of_an_evaluation_draws_for_itself_and_the_same_every_time():
    run = Run(regression())
    first = evaluated(run, [BATCH] * 3)["draw"]
    run.step()
    assert len(set(first)) == 3
    np.testing.assert_array_equal(evaluated(run, [BATCH] * 3)["draw"], first)


def test_debug_runs_python_at_every_step():
    passed = []

    def loss(params, batch, *, rng, train):
        passed.append(train)
        return squares(params, batch, rng=rng, train=train)

    def passages(**options) -> list[int]:
        run = Run(regression(loss), **options)
        run.step()
        counts = []
        for _ in range(3):
            passed.clear()
            run.step()
            counts.append(len(passed))
        return counts

    assert passages(debug=True) == [1, 1, 1]
    assert passages() == [0, 0, 0]


def test_debug_shows_values_to_the_loss():
    seen = []

    def loss(params, batch, *, rng, train):
        seen.append(float(batch["x"].sum()))
        if batch["x"][0, 0] > 1e6:
            return params["w"].sum()
        return squares(params, batch, rng=rng, train=train)[0]

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
    """A batch of the same kind that would spoil everything."""
    return jax.tree.map(lambda x: np.full_like(x, np.nan if x.dtype.kind == "f" else 0), value)


def test_a_chunk_does_what_its_steps_do_and_does_not_look_further(flavour):
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
def chunk_and_steps() -> tuple[Any, list[Any]]:
    """What a chunk of 2 steps (and one more batch) hands out, and what single steps do."""
    batches = [BATCH, jax.tree.map(lambda x: x + 1, BATCH)]
    single, chunked = Run(regression(), keep_grads=True), Run(regression(), keep_grads=True)
    return chunked.chunk(stacked([*batches, unlike(BATCH)]), steps=2), [single.step(batch) for batch in batches]


def test_a_chunk_hands_out_the_gradients_of_every_step():
    (_, grads), singles = chunk_and_steps()
    assert_close(jax.tree.map(lambda x: x[:2], grads), stacked([grads for _, grads in singles]))


def test_a_chunk_hands_out_what_is_off_the_tape_of_every_step():
    (loose, _), singles = chunk_and_steps()
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


@pytest.mark.parametrize("report", [lambda x: {f"m{len(x)}": x.sum()}, lambda x: {"m": x[:, 0]}])
def test_metrics_that_change_between_batches_are_refused(report, key):
    def loss(params, batch, *, rng, train):
        return ((batch @ params) ** 2).mean(), report(batch)

    program = compile_program(
        function_program(lambda key, batch: jnp.ones(3), loss, optax.sgd(0.1)), on_recompile="ignore"
    )
    state = program.init(key, np.ones((8, 3), np.float32))
    _, tape = program.train_tape(state, np.ones((8, 3), np.float32), 2)
    state, tape, _ = program.train_step(state, tape, np.ones((8, 3), np.float32))
    with pytest.raises(ValueError, match="The reported metrics changed while training, from .* to "):
        program.train_step(state, tape, np.ones((5, 3), np.float32))
    assert not state.params.is_deleted()


def test_an_unknown_choice_for_recompiling_is_refused():
    with pytest.raises(ValueError, match="must be one of warn, error, ignore, got 'wrn'"):
        compile_program(tiny_program("linen"), on_recompile="wrn")  # pyright: ignore[reportArgumentType]
