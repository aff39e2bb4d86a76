import time

import jax.numpy as jnp

from jax_trainer.engine.processes import SingleProcess
from jax_trainer.sharding.watchdog import IdleTimer


def test_the_time_between_the_end_of_a_step_and_the_next_one_is_idle():
    with IdleTimer() as timer:
        timer.before_dispatch()  # the first one: nothing was waited for
        timer.after_dispatch(jnp.zeros(3).block_until_ready())
        time.sleep(0.1)
        timer.before_dispatch()
        first = timer.seconds
        timer.after_dispatch(jnp.ones(3).block_until_ready())
        time.sleep(0.05)
        timer.before_dispatch()
    assert 0.08 < first < 0.5
    assert 0.04 < timer.seconds - first < 0.5


def test_devices_that_still_compute_are_not_idle():
    class Busy:
        """Is there after a while."""

        def block_until_ready(self) -> None:
            time.sleep(0.2)

    with IdleTimer() as timer:
        timer.after_dispatch(Busy())  # type: ignore[arg-type]
        time.sleep(0.05)
        timer.before_dispatch()
    assert timer.seconds == 0.0


def test_a_process_alone_measures_nothing():
    with SingleProcess().measuring():
        assert SingleProcess().idle == 0.0
