"""Helpers for tests: tiny models, numbered data, an event recorder, fault injection, assertions."""

from jax_trainer.core.failpoints import FaultInjected, failpoint
from jax_trainer.testing.assertions import (
    assert_close,
    assert_finite,
    assert_no_implicit_transfers,
    assert_same_bits,
    digest,
)
from jax_trainer.testing.models import (
    TinyLinen,
    TinyNNX,
    cross_entropy,
    linear_program,
    linen_loss,
    nnx_loss,
    tiny_program,
)
from jax_trainer.testing.runs import EventRecorder, fault, numbered_data, numbered_loader, short_run

__all__ = [
    "EventRecorder",
    "FaultInjected",
    "TinyLinen",
    "TinyNNX",
    "assert_close",
    "assert_finite",
    "assert_no_implicit_transfers",
    "assert_same_bits",
    "cross_entropy",
    "digest",
    "failpoint",
    "fault",
    "linear_program",
    "linen_loss",
    "nnx_loss",
    "numbered_data",
    "numbered_loader",
    "short_run",
    "tiny_program",
]
