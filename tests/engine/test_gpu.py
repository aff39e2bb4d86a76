"""What only a GPU can show: on the CPU, reading an array is not a transfer, so no guard catches it."""

import itertools

import jax
import pytest

from jax_trainer.core import compile_program
from jax_trainer.datasets import Data
from jax_trainer.engine import Event, Every, Plan, StepEnd, run
from jax_trainer.testing import assert_close, numbered_data, numbered_loader, tiny_program

EXAMPLE = {name: array[:32] for name, array in numbered_data().items()}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
]


class ReadsEveryLoss:
    def handle(self, event: Event) -> None:
        if isinstance(event, StepEnd):
            float(event.state.params["out"]["bias"][0])


def test_the_loop_makes_no_implicit_transfer_to_the_host(flavour, key, subtests):
    for steps_per_call in [1, 4]:
        with subtests.test(steps_per_call=steps_per_call):
            program = compile_program(tiny_program(flavour))
            data = Data(itertools.repeat(EXAMPLE), {"val": [EXAMPLE]})
            plan = Plan(max_steps=120, eval_every=Every(steps=40), steps_per_call=steps_per_call)
            with jax.transfer_guard_device_to_host("disallow"):
                assert int(jax.device_get(run(program, program.init(key, EXAMPLE), data, plan).step)) == 120


def test_the_guard_would_notice(flavour, key):
    program = compile_program(tiny_program(flavour))
    with jax.transfer_guard_device_to_host("disallow"), pytest.raises(Exception, match="Disallowed device-to-host"):
        run(program, program.init(key, EXAMPLE), Data([EXAMPLE]), Plan(max_epochs=1), [ReadsEveryLoss()])


def test_batches_made_ahead_and_resident_data_train_alike(flavour, key, subtests):
    for options in [{"prefetch": 0}, {"prefetch": 3}, {"resident": True}]:
        for steps_per_call in [1, 4, "epoch"]:
            with subtests.test(steps_per_call=steps_per_call, options=options):
                loader = numbered_loader(203, drop_last=True)
                states = []
                for data in (Data(loader, prefetch=0), Data(loader, **options)):
                    program = compile_program(tiny_program(flavour))
                    with jax.transfer_guard_device_to_host("disallow"):
                        states.append(
                            run(
                                program,
                                program.init(key, EXAMPLE),
                                data,
                                Plan(max_epochs=3, steps_per_call=steps_per_call),
                            )
                        )
                assert_close(*(jax.device_get(state.params) for state in states))
