import time

import jax.numpy as jnp

from jax_trainer.engine.idle_timer import IdleTimer


def test_the_time_between_the_end_of_a_step_and_the_next_one_is_idle():
    with IdleTimer(measures=True) as idling:
        idling.sending()  # the first one: nothing was waited for
        idling.sent(jnp.zeros(3).block_until_ready())
        time.sleep(0.1)
        idling.sending()
        first = idling.seconds
        idling.sent(jnp.ones(3).block_until_ready())
        time.sleep(0.05)
        idling.sending()
    assert 0.08 < first < 0.5
    assert 0.04 < idling.seconds - first < 0.5


def test_devices_that_still_compute_are_not_idle():
    class Busy:
        """Is there after a while."""

        def block_until_ready(self) -> None:
            time.sleep(0.2)

    with IdleTimer(measures=True) as idling:
        idling.sent(Busy())  # type: ignore[arg-type]
        time.sleep(0.05)
        idling.sending()
    assert idling.seconds == 0.0


def test_a_process_alone_measures_nothing():
    with IdleTimer(measures=False) as idling:
        idling.sent(jnp.zeros(3))
        time.sleep(0.02)
        idling.sending()
    assert idling.seconds == 0.0
