# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From Lightning
#
# A `LightningModule` has the network, the loss and the optimizer, and a `Trainer` runs it. Here a `TrainerModule` has
# the loss, and the network and the optimizer are arguments, because in JAX they are values.
#
# ```python
# class Classifier(L.LightningModule):                       # Lightning
#     def __init__(self):
#         super().__init__()
#         self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
#
#     def training_step(self, batch, batch_idx):
#         x, y = batch
#         loss = F.cross_entropy(self.net(x), y)
#         self.log("train/loss", loss)
#         return loss
#
#     def configure_optimizers(self):
#         return torch.optim.Adam(self.parameters(), 3e-3)
# ```

# %%
import optax
from flax import nnx

from jax_trainer import ArrayLoader, TrainerModule, load_digits
from jax_trainer.callbacks import EarlyStopping, ModelCheckpoint


class Classifier(TrainerModule):
    def batch_to_input(self, batch):
        return batch["image"]

    def loss_function(self, model, batch, train=True):  # training_step and validation_step in one
        logits = model(batch["image"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, {"acc": (logits.argmax(-1) == batch["label"]).mean()}  # logged as train/acc, val/acc


def network(rngs):
    layers = nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs)
    return nnx.Sequential(lambda x: x.reshape(len(x), -1) / 16, *layers)


# %% [markdown]
# Loaders are those of arrays, Grain or torch. Metrics are means over all examples, also of a smaller last batch.

# %%
loaders = {name: ArrayLoader(part, 64, shuffle=name == "train") for name, part in load_digits().items()}
trainer = Classifier(
    model=network,
    optimizer=optax.adam(3e-3),
    exmp_input=next(iter(loaders["train"])),
    train_epochs=8,  # max_epochs
    callbacks=[ModelCheckpoint(monitor="val/acc"), EarlyStopping(monitor="val/loss", patience=3)],
)
results = trainer.train_model(loaders["train"], loaders["val"], loaders["test"])  # trainer.fit and trainer.test
results["test"]["test/acc"]

# %% [markdown]
# | Lightning | here |
# |---|---|
# | `trainer.fit(model, train, val)` | `trainer.train_model(train, val)` |
# | `trainer.fit(…, ckpt_path="last")` | `trainer.train_model(…, resume="auto")` |
# | `trainer.test(model, test)` | `trainer.test_model(test)` |
# | `Model.load_from_checkpoint(path)` | `Model.load_from_checkpoint(folder)` |
# | `precision="bf16-mixed"` | `precision="bf16"` |
# | `accumulate_grad_batches=4` | `accumulate=4` |
# | `strategy="fsdp"` | `mesh={"fsdp": -1}` |
#
# A keyword of Lightning that has another name here is suggested:

# %%
try:
    Classifier(model=network, optimizer=optax.adam(3e-3), max_epochs=3)
except TypeError as error:
    print(error)
