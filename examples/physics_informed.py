"""A physics-informed network: the damped oscillator, learned from its differential equation.

    python examples/physics_informed.py

The network is a function u(t). Its loss has no data but two initial values: it is the residual of
u'' + 2 d u' + w² u = 0 at random times, with derivatives by the input from `jax.jvp`. Losses have names and weights.
"""
# Expected: a largest error below 0.1 from the exact solution, after about 20 s on two CPU cores.

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_trainer import fit

DAMPING, FREQUENCY = 0.5, 2.0


class Solution(nnx.Module):
    """u(t): times [batch] to values [batch]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        sizes = ((1, 32), (32, 32), (32, 1))
        self.layers = nnx.List(nnx.Linear(*size, rngs=rngs) for size in sizes)

    def __call__(self, times: jax.Array) -> jax.Array:
        x = times[:, None]
        for layer in self.layers[:-1]:
            x = nnx.tanh(layer(x))
        return self.layers[-1](x)[:, 0]


def derivative(function: Any) -> Any:
    """The derivative of a function of each time."""
    return lambda times: jax.jvp(function, (times,), (jnp.ones_like(times),))[1]


def loss(model: Any, batch: Any) -> jax.Array:
    """The residual of the equation, and the initial values u(0) = 1, u'(0) = 0."""
    times, start = batch, jnp.zeros(1)
    speed, acceleration = derivative(model), derivative(derivative(model))
    residual = acceleration(times) + 2 * DAMPING * speed(times) + FREQUENCY**2 * model(times)
    return (residual**2).mean() + 10 * ((model(start) - 1) ** 2 + speed(start) ** 2).mean()


def exact(times: np.ndarray) -> np.ndarray:
    """The solution of the equation with these initial values."""
    w = np.sqrt(FREQUENCY**2 - DAMPING**2)
    return np.exp(-DAMPING * times) * (np.cos(w * times) + DAMPING / w * np.sin(w * times))


def main(epochs: int = 60, out: str = "runs") -> dict[str, float]:
    """Trains, and returns the largest distance from the exact solution."""
    times = np.random.default_rng(0).uniform(0, 4, 2048).astype(np.float32)
    model = Solution(nnx.Rngs(0))
    schedule = optax.cosine_decay_schedule(5e-3, epochs * 32)
    options: dict[str, Any] = {"num_epochs": epochs, "log_dir": out, "save": False, "tensorboard": False}
    fit(model, times, loss_fn=loss, optimizer=optax.adam(schedule), batch_size=64, **options)
    asked = np.linspace(0, 4, 101, dtype=np.float32)
    return {"error": float(abs(np.asarray(model(jnp.asarray(asked))) - exact(asked)).max())}


if __name__ == "__main__":
    print(main())
