from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.optimizer import AdamWConfig, OptimizerInterface
from jax_trainer.optimizer.reported import rates_in, with_learning_rate
from jax_trainer.testing import assert_same_bits

SCHEDULE: Any = optax.linear_schedule(0.1, 0.0, 10)
CONFIGURED = AdamWConfig(learning_rate=0.25).instantiate(OptimizerInterface).build(10)
PARAMS = {"a": jnp.ones(2), "b": jnp.ones(2)}


@pytest.mark.parametrize(
    ("tx", "names"),
    [
        (optax.inject_hyperparams(optax.adam)(SCHEDULE), {"optimizer/lr": 0.1}),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(0.5)), {"optimizer/lr": 0.5}),
        (CONFIGURED, {"optimizer/lr": 0.25}),
        (optax.adam(SCHEDULE), {}),
        (
            optax.multi_transform(
                {"a": optax.inject_hyperparams(optax.sgd)(0.5), "b": optax.inject_hyperparams(optax.sgd)(0.25)},
                {"a": "a", "b": "b"},
            ),
            {"optimizer/lr": 0.5, "optimizer/lr_2": 0.25},
        ),
    ],
)
def test_rates_are_found_wherever_the_optimizer_keeps_them(tx, names):
    found = {name: float(rate) for name, rate in rates_in(tx.init(PARAMS)).items()}
    assert found == pytest.approx(names)


def test_steps_report_the_rate_they_used_and_do_the_same_as_without():
    batch = jnp.arange(4.0)
    program = function_program(
        lambda key, batch: jnp.zeros(()),
        lambda params, batch, *, rng, train: ((batch - params) ** 2).mean(),
        optax.inject_hyperparams(optax.sgd)(SCHEDULE),
    )
    state = program.init(jax.random.key(0), batch)
    plain, telling = jax.jit(program.train_step), jax.jit(with_learning_rate(program).train_step)
    for step in range(3):
        expected, _ = plain(state, batch)
        state, report = telling(state, batch)
        assert_same_bits(state, expected)
        metric = report.metrics.by_name["optimizer/lr"]
        assert float(metric.value) == pytest.approx(float(SCHEDULE(step)))
