"""When samples are drawn, and with which random numbers; what is drawn is looked at with real trainers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jax_trainer.callbacks import RunContext, Sampling, SamplingConfig
from jax_trainer.engine import Plan
from tests.callbacks.callback_runs import fit, rows, scripted, scripted_program


class Drawing(Sampling):
    """Notes when it draws, and one number of what it draws with."""

    config: SamplingConfig
    trainer_method = "sample"

    def reset(self) -> None:
        super().reset()
        self.drawn: dict[int, float] = {}

    def draw(self, key: jax.Array, step: int) -> int:
        assert step not in self.drawn
        self.drawn[step] = float(jax.random.uniform(key))
        return 10


def drawing(run: RunContext, **config: Any) -> Drawing:
    return Drawing(SamplingConfig(**config), replace(run, trainer=SimpleNamespace(sample=None)))


def trained(callback: Drawing, **plan: Any) -> dict[int, float]:
    """What is drawn in two epochs of four steps."""
    data = scripted([1.0] * 32, batch_size=8)
    fit(callback, plan=Plan(**{"max_epochs": 2, **plan}), train=data, program=scripted_program(), evals={})
    return callback.drawn


def test_samples_are_drawn_at_their_steps_epochs_and_the_end_and_never_twice(folder_run):
    for config, steps in [
        ({}, [4, 8]),
        ({"every_n_epochs": 2}, [8]),
        ({"every_n_steps": 3, "every_n_epochs": 0}, [3, 6, 8]),
        ({"every_n_steps": 2}, [2, 4, 6, 8]),
        ({"every_n_epochs": 0}, []),
    ]:
        for steps_per_call in (1, 3, "epoch"):
            callback = drawing(folder_run, **config)
            assert list(trained(callback, steps_per_call=steps_per_call)) == steps, (config, steps_per_call)


def test_seed_and_step_alone_decide_what_is_drawn(folder_run):
    drawn = [trained(drawing(folder_run, seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0].values(), *drawn[2].values()}) == 4


def test_the_speed_is_logged_but_for_the_first_time_which_compiles(folder_run):
    trained(drawing(folder_run))
    (row,) = rows(folder_run)
    assert row["step"] == 8 and row["samples/per_second"] > 0


def test_what_was_drawn_before_an_interruption_is_not_drawn_again(folder_run):
    first, second = drawing(folder_run), drawing(folder_run)
    trained(first, max_epochs=1)
    second.load_state_dict(first.state_dict())
    assert list(trained(second)) == [8]


def test_a_trainer_that_cannot_draw_is_refused_at_once(folder_run):
    with pytest.raises(TypeError, match="`sample`.*no trainer"):
        Drawing(SamplingConfig(), folder_run)
