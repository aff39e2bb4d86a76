"""`jax_trainer.nnx`: `flax.nnx` with `Optimizer(model, tx)` as it was before Flax 0.11.

All other names are those of `flax.nnx`.
"""

from typing import Any

import optax
from flax import nnx


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer`; without `wrt`, as before Flax 0.11.

    It then updates all `nnx.Param`s, has its model, and accepts both `update(grads)` and `update(model, grads)`.

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
        """Updates the model with the gradients of its parameters."""
        if len(model_and_grads) == 1 and hasattr(self, "model"):
            model_and_grads = (self.model, *model_and_grads)
        return super().update(*model_and_grads, **more)


def __getattr__(name: str) -> Any:
    return getattr(nnx, name)


def __dir__() -> list[str]:
    return dir(nnx)
