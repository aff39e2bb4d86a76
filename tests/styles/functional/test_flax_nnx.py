from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_trainer.adapters import flax_nnx

WRT: dict[str, Any] = {"wrt": nnx.Param}
KINDS: list[tuple[Any, dict[str, Any]]] = [(nnx.Optimizer, WRT), (flax_nnx.Optimizer, WRT), (flax_nnx.Optimizer, {})]


def grads(model):
    return nnx.grad(lambda model: (model(jnp.ones((2, 3))) ** 2).mean())(model)


def test_an_optimizer_without_wrt_updates_all_parameters_as_one_with_it_does():
    kernels = []
    for kind, options in KINDS:
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        optimizer: Any = kind(model, optax.sgd(0.1), **options)
        optimizer.update(model, grads(model))
        if options:
            optimizer.update(model, grads(model))
            assert not hasattr(optimizer, "model")
        else:  # as before Flax 0.11
            optimizer.update(grads(model))
            assert optimizer.model is model
        assert issubclass(kind, nnx.Optimizer)
        kernels.append(np.asarray(model.kernel[...]))
    np.testing.assert_array_equal(kernels, [kernels[0]] * 3)


def test_everything_else_is_that_of_flax():
    assert flax_nnx.Module is nnx.Module
    assert flax_nnx.rnglib.Rngs is nnx.Rngs
    assert set(dir(flax_nnx)) == set(dir(nnx))
