"""An Equinox model: a module is a pytree, and `fit` trains its float arrays.

    python examples/equinox_model.py

The module is called for one example, so its call on a batch is a `vmap`. Afterwards `result.model` is the module with
the trained weights.
"""
# Expected: a test accuracy above 0.93 after about 10 s on two CPU cores.

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_trainer import fit, load_digits


class Network(eqx.Module):
    """Images [batch, 8, 8] to logits [batch, 10]."""

    conv: eqx.nn.Conv2d
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 16, 3, stride=2, padding=1, key=first)
        self.out = eqx.nn.Linear(4 * 4 * 16, 10, key=second)

    def __call__(self, images: jax.Array) -> jax.Array:
        return jax.vmap(self.one)(images)

    def one(self, image: jax.Array) -> jax.Array:
        """The logits of one image."""
        return self.out(jax.nn.relu(self.conv(image[None])).reshape(-1))


def main(epochs: int = 10, out: str = "runs") -> dict[str, float]:
    """Trains, and returns the test accuracy."""
    parts = {name: (part["image"].astype(np.float32) / 16, part["label"]) for name, part in load_digits().items()}
    loss = optax.softmax_cross_entropy_with_integer_labels
    options: dict[str, Any] = {"num_epochs": epochs, "log_dir": out, "save": False, "tensorboard": False}
    model = Network(jax.random.key(0))
    result = fit(model, parts["train"], parts["val"], loss_fn=loss, optimizer=optax.adam(3e-3), **options)
    assert isinstance(result.model, Network)
    images, labels = parts["test"]
    return {"acc": float((result.model(jnp.asarray(images)).argmax(-1) == labels).mean())}


if __name__ == "__main__":
    print(main())
