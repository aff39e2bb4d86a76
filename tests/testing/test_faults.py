import pytest

from jax_trainer.testing import FaultInjected, failpoint, fault


def test_a_fault_happens_at_its_point_at_its_time_and_only_inside_the_block():
    with fault("here:raise:2"):
        failpoint("elsewhere")
        failpoint("here")
        with pytest.raises(FaultInjected, match="'here'"):
            failpoint("here")
        failpoint("here")
    failpoint("here")
