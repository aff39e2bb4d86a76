"""`jax_trainer.nnx`: `flax.nnx`, in which `Optimizer(model, tx)` may be written as it was before Flax 0.11.

Everything else is looked up in `flax.nnx`, and is the very same thing.
"""

from typing import Any

import optax
from flax import nnx


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer`; without `wrt`, as before Flax 0.11.

    It then updates all `nnx.Param`s, knows its model, and `update(grads)` is enough, as `update(model, grads)` is.

    >>> import jax.numpy as jnp
    >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    >>> optimizer = Optimizer(model, optax.sgd(0.5))
    >>> before = model.kernel[...]
    >>> _ = optimizer.update(nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model))
    >>> (model.kernel[...] - before).tolist()
    [[-0.5], [-0.5]]
    """

    def __init__(
        self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: Any = None, graph: bool | None = None
    ) -> None:
        super().__init__(model, tx, wrt=nnx.Param if wrt is None else wrt, graph=graph)
        if wrt is None:
            self.model = model

    def update(self, *model_and_grads: Any, **more: Any) -> optax.Updates:
        """Updates the model by gradients of its parameters."""
        if len(model_and_grads) == 1 and hasattr(self, "model"):
            model_and_grads = (self.model, *model_and_grads)
        return super().update(*model_and_grads, **more)


def __getattr__(name: str) -> Any:
    return getattr(nnx, name)


def __dir__() -> list[str]:
    return dir(nnx)
