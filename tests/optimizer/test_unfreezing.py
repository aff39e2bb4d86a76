"""Parameters that are unfrozen later: frozen to the bit until then, and as with a new optimizer from then on."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.config.settings import SettingsError
from jax_trainer.core import TrainState
from jax_trainer.core.state import hyperparameters_in, with_hyperparameters
from jax_trainer.diagnostics.leaves import leaf_path
from jax_trainer.optimizer import AdamW, AdamWConfig, GradClipNormConfig, LinearScheduleConfig
from jax_trainer.optimizer.reported import with_learning_rate_scale
from jax_trainer.optimizer.unfreezing import with_unfreezing
from jax_trainer.testing import assert_close, assert_same_bits
from tests.rows import noted_row

SWITCH, STEPS = 5, 9
SCHEDULE = {0: "head", 2: "block"}
X = np.random.default_rng(0).normal(size=(STEPS, 4)).astype(np.float32)


def init(key: jax.Array, batch: Any) -> Any:
    parts = dict(zip(("head", "block", "stem"), jax.random.split(key, 3), strict=True))
    return {name: {"w": jax.random.normal(one, (3, 4)), "b": jnp.ones(4)} for name, one in parts.items()}


def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
    """A sum of losses of the parts, so that the gradients of each depend on nothing else."""
    return sum(((one["w"] * batch + one["b"]) ** 2).mean() for one in params.values())  # type: ignore[return-value]


def rate(count: Any, start: int = 0) -> Any:
    return 0.1 / (1.0 + count + start)


OPTIMIZERS = {
    "sgd": lambda start: optax.sgd(0.1),
    "momentum": lambda start: optax.sgd(partial(rate, start=start), momentum=0.9),
    "adam": lambda start: optax.adam(0.1),
    "adamw with a schedule": lambda start: optax.adamw(partial(rate, start=start), weight_decay=0.1),
    "hyperparameters": lambda start: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "scheduled hyperparameters": lambda start: optax.inject_hyperparams(optax.adam)(partial(rate, start=start)),
    "adafactor": lambda start: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lion": lambda start: optax.lion(0.01),
}


def steps_of(tx: optax.GradientTransformation, **options: Any) -> list[TrainState]:
    """The states of a training whose block is unfrozen after `SWITCH` steps, and whose stem never is."""
    program = with_unfreezing(function_program(init, loss, tx, **options), SCHEDULE)
    states = [program.init(jax.random.key(0), X[0])]
    step = jax.jit(program.train_step)
    for number, batch in enumerate(X):
        state = states[-1]
        if number == SWITCH:
            state = with_hyperparameters(state, {"unfreeze_epoch": 2})
        states.append(step(state, batch)[0])
    return states


def own(part: str, params: Any, make: Any, first: int, **options: Any) -> Any:
    """What an optimizer of its own makes of one part, from the batch `first` on."""
    tx, params = make(first), {part: params[part]}
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda one: loss(one, batch, rng=jax.random.key(0), train=True))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for batch in X[first:]:
        params, state = step(params, state, batch)
    return params[part]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("adamw") else pytest.mark.slow) for name in OPTIMIZERS]
)
def test_each_part_trains_as_with_an_optimizer_of_its_own_from_when_it_is_unfrozen(name):
    make = OPTIMIZERS[name]
    states = steps_of(make(0))
    first, last = states[0].params, states[-1].params
    assert_close(last["head"], own("head", first, make, 0), rtol=1e-4, atol=1e-6)
    assert_close(last["block"], own("block", first, make, SWITCH), rtol=1e-4, atol=1e-6)
    assert_same_bits(last["stem"], first["stem"])


def test_what_is_frozen_keeps_its_bits_and_those_of_its_moments():
    for name in ["adamw with a schedule", "momentum"]:
        with noted_row(name):
            states = steps_of(OPTIMIZERS[name](0))

            def of(part: str, state: TrainState) -> dict[str, Any]:
                leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
                return {leaf_path(path): leaf for path, leaf in leaves if f".{part}." in leaf_path(path)}

            for before, after in zip(states[:SWITCH], states[1:], strict=False):
                assert_same_bits(of("block", after), of("block", before))
                assert_same_bits(of("stem", after), of("stem", before))
            assert any(
                (a != b).any()
                for a, b in zip(of("block", states[-1]).values(), of("block", states[0]).values(), strict=True)
            )


def test_frozen_parameters_do_not_count_in_the_clipped_norm_of_options_and_configured_optimizers():
    small = 1e-3
    by_option = steps_of(optax.sgd(1.0), clip_norm=small)
    config = AdamWConfig(
        learning_rate=LinearScheduleConfig(init_value=0.1, end_value=0.0, steps=STEPS),
        transforms={"clip": GradClipNormConfig(max_norm=small)},
    )
    steps_of(AdamW(config).build(STEPS))  # nested states, with groups

    def moved(part: str, number: int) -> float:
        changes = jax.tree.map(lambda a, b: a - b, by_option[number + 1].params[part], by_option[number].params[part])
        return float(optax.tree.norm(changes))

    assert moved("head", 0) == pytest.approx(small, rel=1e-2)
    both = [moved(part, SWITCH) for part in ("head", "block")]
    assert np.hypot(both[0], both[1]) == pytest.approx(small, rel=1e-2) and min(both) > 0


def test_an_expression_without_an_effect_is_an_error_when_the_state_is_made():
    for schedule, key, named in [
        ({0: "heads"}, "schedule.0", "'heads'.*head.b"),
        ({0: "head", 3: "blok"}, "schedule.3", "'blok'.*block.b"),
        ({0: ".*", 3: "head"}, "schedule.3", "'head'.*still frozen"),
    ]:
        with noted_row(schedule, key, named):
            program = with_unfreezing(function_program(init, loss, optax.sgd(0.1)), schedule)
            with pytest.raises(SettingsError, match=named) as caught:
                jax.eval_shape(program.init, jax.random.key(0), X[0])
            assert caught.value.problems[0][0] == key


def test_a_step_that_updates_the_parameters_itself_is_an_error():
    program = function_program(init, loss, optax.sgd(0.1))
    itself: Any = lambda state, batch: (state, None)
    wrapped = with_unfreezing(program._replace(train_step=itself), SCHEDULE)
    with pytest.raises(TypeError, match="apply_gradients"):
        wrapped.train_step(wrapped.init(jax.random.key(0), X[0]), X[0])


def test_unfreezing_can_be_combined_with_a_scaled_learning_rate():
    program = with_learning_rate_scale(with_unfreezing(function_program(init, loss, optax.sgd(0.1)), SCHEDULE))
    state = program.init(jax.random.key(0), X[0])
    assert set(hyperparameters_in(state)) == {"learning_rate_scale", "unfreeze_epoch"}
    after, _ = program.train_step(state, X[0])
    assert_same_bits(after.params["block"], state.params["block"])
    assert (after.params["head"]["w"] != state.params["head"]["w"]).any()
