import io

import jax
from rich.console import Console

from jax_trainer.callbacks import ProgressBar
from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Every, Plan, run
from jax_trainer.testing import numbered_data, numbered_loader, tiny_program

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}
PROGRAM = compile_program(tiny_program("linen"), on_recompile="ignore")


def shown(*, terminal: bool, **options) -> str:
    screen = io.StringIO()
    bar = ProgressBar(console=Console(file=screen, force_terminal=terminal, width=200), **options)
    data = Data(numbered_loader(), {"val": numbered_loader(64)})
    state = PROGRAM.init(jax.random.key(0), EXAMPLE)
    run(PROGRAM, state, data, Plan(max_epochs=2, eval_every=Every(epochs=1), metrics_every=5), [bar])
    return screen.getvalue()


def test_a_terminal_sees_steps_speed_and_the_latest_metrics():
    text = shown(terminal=True, refresh_seconds=0.0)
    assert "32/32" in text
    assert "starting" in text
    assert "/s" in text
    assert "loss" in text
    assert "epoch 2 val" in text


def test_without_a_terminal_there_is_one_line_per_epoch_and_evaluation():
    lines = shown(terminal=False).splitlines()
    assert [line.split("loss")[0].split() for line in lines] == [
        ["epoch", "1", "train"],
        ["epoch", "1", "val"],
        ["epoch", "2", "train"],
        ["epoch", "2", "val"],
    ]


def test_drawing_is_limited_by_time_not_by_steps():
    assert shown(terminal=True, refresh_seconds=60.0).count("epoch 1 ") < shown(
        terminal=True, refresh_seconds=0.0
    ).count("epoch 1 ")
