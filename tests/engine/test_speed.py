"""The rates that every epoch ends with."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_trainer.adapters import function_program
from jax_trainer.callbacks import LogMetrics
from jax_trainer.core import compile_program
from jax_trainer.datasets import ArrayLoader
from jax_trainer.engine import EpochEnd, Event, Plan, run
from jax_trainer.testing import linear_program, numbered_loader


class Ends:
    """Keeps the ends of epochs."""

    def __init__(self) -> None:
        self.ends: list[EpochEnd] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, EpochEnd):
            self.ends.append(event)


def trained(program: Any, loader: Any, *observers: Any, **plan: Any) -> list[EpochEnd]:
    compiled, seen = compile_program(program, on_recompile="ignore"), Ends()
    state = compiled.init(jax.random.key(0), next(iter(loader)))
    run(compiled, state, loader, Plan(max_epochs=2, **plan), [seen, *observers])
    return seen.ends


def test_a_step_has_the_same_flops_alone_and_in_a_chunk(subtests):
    for steps_per_call in [1, 25]:
        with subtests.test(steps_per_call=steps_per_call):
            for end in trained(linear_program(), numbered_loader(30 * 32), steps_per_call=steps_per_call):
                assert end.speed["steps_per_second"] == pytest.approx(30 / end.seconds)
                assert end.speed["examples_per_second"] == pytest.approx(30 * 32 / end.seconds)
                per_step = end.speed["model_flops_per_second"] / end.speed["steps_per_second"]
                assert per_step == pytest.approx(2 * 2 * 32 * 8 * 4)
                assert "tokens_per_second" not in end.speed and "mfu" not in end.speed  # of a CPU


def test_the_share_of_the_peak_is_known_where_the_peak_is(monkeypatch: pytest.MonkeyPatch):
    device = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=dict)
    stats = {"memory_in_use": 2.0, "memory_peak": 3.0}
    monkeypatch.setattr("jax_trainer.engine.dispatcher.devices_of", lambda program: [device] * 2)
    monkeypatch.setattr("jax_trainer.engine.costs.memory_of", lambda devices: stats)
    for end in trained(linear_program(), numbered_loader(64)):
        assert end.speed["mfu"] == pytest.approx(end.speed["model_flops_per_second"] / (2 * 989e12))
        assert end.speed["memory_peak"] == 3.0


def test_rows_of_token_ids_have_tokens():
    def loss(params: Any, batch: Any, *, rng: jax.Array, train: bool) -> jax.Array:
        return params["table"][batch["tokens"]].mean()

    program = function_program(lambda key, batch: {"table": jnp.ones((11, 3))}, loss, optax.sgd(0.1))
    loader = ArrayLoader({"tokens": np.zeros((32, 7), np.int32)}, 8)
    for end in trained(program, loader):
        assert end.speed["tokens_per_second"] == pytest.approx(7 * end.speed["examples_per_second"])


def test_every_log_has_them():
    rows: list[dict[str, float]] = []
    writer: Any = SimpleNamespace(write=lambda step, values: rows.append(dict(values)), close=lambda status: None)
    trained(linear_program(), numbered_loader(64), LogMetrics(writer))
    assert [row["throughput/steps_per_second"] > 0 for row in rows if "train/time_epoch" in row] == [True, True]
