# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Your first training
#
# Handwritten digits, a small network, one call. The data comes with the package; everything runs in a few seconds on a
# laptop.

# %%
import jax.numpy as jnp
import optax
from flax import nnx

from jax_trainer import fit, load_digits

parts = {name: (part["image"].astype("float32") / 16, part["label"]) for name, part in load_digits().items()}
{name: images.shape for name, (images, labels) in parts.items()}

# %% [markdown]
# ## A model
#
# Any Flax module, linen or nnx, an Equinox module, or plain functions.


# %%
class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 16, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.conv(images[..., None]))
        return self.out(x.reshape(len(x), -1))


model = Network(nnx.Rngs(0))

# %% [markdown]
# ## Train it
#
# The loss takes the outputs and the labels. Interrupt the cell at any time (■): the training ends well, and the cell
# can be run again. With `resume="auto"` it then continues where it was.


# %%
def accuracy(model, batch):
    images, labels = batch
    return (model(images).argmax(-1) == labels).mean()


result = fit(
    model,
    parts["train"],
    parts["val"],
    loss_fn=optax.softmax_cross_entropy_with_integer_labels,
    eval_step=accuracy,
    optimizer=optax.adamw(3e-3),
    num_epochs=10,
    tensorboard=False,
)
result

# %% [markdown]
# ## Use it
#
# `predict` uses the weights that were best in validation.

# %%
images, labels = parts["test"]
predicted = result.predict(images).argmax(-1)
print(f"test accuracy {(predicted == labels).mean():.3f}")

# %% [markdown]
# The model is trained, too: it is an ordinary function of arrays.

# %%
model(jnp.asarray(images[:3])).argmax(-1), labels[:3]
