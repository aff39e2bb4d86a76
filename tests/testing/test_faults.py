import pytest

from jax_trainer.core.failpoints import FaultInjected, failpoint
from jax_trainer.testing import fault


def test_a_fault_occurs_at_its_failpoint_and_call_only_inside_the_block():
    with fault("here:raise:2"):
        failpoint("elsewhere")
        failpoint("here")
        with pytest.raises(FaultInjected, match="'here'"):
            failpoint("here")
        failpoint("here")
    failpoint("here")
