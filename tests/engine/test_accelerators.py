"""What a step computes, and what its devices can compute."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_trainer.core import compile_program
from jax_trainer.diagnostics.traced import matrix_flops
from jax_trainer.engine.costs import memory_of, peak_flops
from jax_trainer.testing import linear_program, numbered_loader, tiny_program
from jax_trainer.testing.models import CLASSES, FEATURES


def flops(function, *args):
    return matrix_flops(jax.make_jaxpr(function)(*args))


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    once = 2 * 4 * 8 * 8
    assert flops(lambda x: x @ w, x) == once
    assert flops(lambda x: jax.lax.scan(lambda c, _: (c @ w, None), x, None, 5), x) == 5 * once
    assert flops(jax.jit(lambda x: jax.checkpoint(lambda x: x @ w)(x)), x) == once
    assert flops(lambda x: jax.lax.cond(True, lambda x: x @ w, lambda x: x, x), x) == once


def test_flops_of_a_step_are_those_of_xla_without_elementwise_operations():
    kernel, images, w = jnp.ones((3, 3, 8, 16)), jnp.ones((4, 16, 16, 8)), jnp.ones((16, 32))

    def net(kernel, images):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=dims).mean((1, 2)) @ w

    by_xla: Any = jax.jit(net).lower(kernel, images).compile().cost_analysis()
    assert flops(net, kernel, images) == pytest.approx(by_xla["flops"], rel=0.02)


def test_a_step_in_micro_batches_has_the_same(subtests):
    for micro_batches in [1, 4]:
        with subtests.test(micro_batches=micro_batches):
            batch = next(iter(numbered_loader(32)))
            program = compile_program(linear_program(micro_batches=micro_batches))
            trace = program.trace_train_step(program.init(jax.random.key(0), batch), batch)
            assert trace.flops == 2 * 2 * 32 * FEATURES * CLASSES  # the outputs, and the gradient of the kernel


def test_the_peak_of_a_device_is_known_by_its_name(subtests):
    for kind, peak in [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU v4", 275e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ]:
        with subtests.test(kind=kind, peak=peak):
            assert peak_flops(SimpleNamespace(device_kind=kind)) == peak


def test_a_device_that_does_not_tell_its_memory_has_none():
    assert memory_of(jax.devices()) == {}


def test_tiny_models_have_some():
    batch = next(iter(numbered_loader(32)))
    program = compile_program(tiny_program("linen"))
    assert program.trace_train_step(program.init(jax.random.key(0), batch), batch).flops > 0
