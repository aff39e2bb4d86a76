"""Tabular regression with uncertainty: an ensemble of networks, trained together by one `vmap`.

    python examples/ensemble_uncertainty.py

Each member predicts a mean and the variance of the noise, and starts from other weights. Where members disagree, the
ensemble does not know: on rows that are unlike those of the training, the spread of their means is larger.
"""
# Expected: a spread at least twice as large outside of the data, after about 10 s on two CPU cores.

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from optax import adam
from sklearn.datasets import load_diabetes

from jax_trainer import fit

MEMBERS = 8


class Member(nnx.Module):
    """Rows [batch, 10] to means and log variances [batch, 2]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(10, 32, rngs=rngs), nnx.Linear(32, 2, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(rows)))


class Ensemble(nnx.Module):
    """Several members, whose weights have a first axis of their number: rows to [members, batch, 2]."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: Member(rngs), in_axes=0, out_axes=0)
        self.members = make(rngs.split(MEMBERS))

    def __call__(self, rows: jax.Array) -> jax.Array:
        return nnx.vmap(lambda member, rows: member(rows), in_axes=(0, None))(self.members, rows)


def negative_log_likelihood(model: Any, batch: Any) -> jax.Array:
    """The mean of all members: each learns alone."""
    rows, targets = batch
    means, log_variances = jnp.moveaxis(model(rows), -1, 0)
    return 0.5 * (log_variances + (targets - means) ** 2 / jnp.exp(log_variances)).mean()


def predict(model: Any, rows: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mean of the members, the standard deviation of the noise, and that of their means."""
    means, log_variances = jnp.moveaxis(model(rows), -1, 0)
    return means.mean(0), jnp.sqrt(jnp.exp(log_variances).mean(0)), means.std(0)


def main(epochs: int = 30, out: str = "runs") -> dict[str, float]:
    """Trains, and returns the error on held-out rows, the noise, and the spread inside and outside of the data."""
    table: Any = load_diabetes()
    x, y = table.data.astype(np.float32), table.target.astype(np.float32)
    rows = np.random.default_rng(0).permutation(len(x))
    train, test = rows[:360], rows[360:]
    x, y = ((each - each[train].mean(0)) / each[train].std(0) for each in (x, y))
    model = Ensemble(nnx.Rngs(0))
    options: dict[str, Any] = {"num_epochs": epochs, "log_dir": out, "save": False, "tensorboard": False}
    fit(model, (x[train], y[train]), loss_fn=negative_log_likelihood, optimizer=adam(3e-3), batch_size=60, **options)
    means, noise, inside = predict(model, x[test])
    _, _, outside = predict(model, 4 * x[test])  # four times as far from the mean as any patient
    error = float(np.sqrt(((means - y[test]) ** 2).mean()))
    spread = {"inside": float(inside.mean()), "outside": float(outside.mean())}
    return {"rmse": error, "noise": float(noise.mean()), **spread}


if __name__ == "__main__":
    print(main())
