"""The code of the document about `train_fn` runs unchanged: only its imports are changed, and its `...` filled."""

import inspect
import logging
from typing import Any

import jax
import numpy as np
import pytest

from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.datasets import ArrayLoader, load_digits

# what the document imports, from where it is here, and what it leaves to the reader
IMPORTS = """\
import optax
from jax_trainer import nnx
from jax import random as jr

from jax_trainer import train_fn
from jax_trainer import get_default_checkpointer

import jax
import logging
from collections.abc import Callable, Iterable
from typing import Optional
from jax.experimental import mesh_utils
"""

STEPS = """\
class CNN(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
    self.out = nnx.Linear(4 * 4 * 8, 10, rngs=rngs)

  def __call__(self, images):
    return self.out(nnx.relu(self.conv(images)).reshape(len(images), -1))

def loss_fn(model, images, labels):
  logits = model(images)
  return optax.losses.softmax_cross_entropy_with_integer_labels(
    logits=logits, labels=labels
  ).mean()

def train_step(model, rng_key, batch):
    return nnx.value_and_grad(loss_fn)(model, batch["image"], batch["label"])

def val_step(model, rng_key, batch):
    return loss_fn(model, batch["image"], batch["label"])
"""

TRAINING = """\
model = CNN(rngs=nnx.rnglib.Rngs(jr.key(1)))
optimizer = nnx.Optimizer(model, optax.adam(1e-4))

train = train_fn(
  fns=(train_step, val_step),
  n_steps=100,
  eval_every_n_steps=10,
  n_eval_batches=10
)
train(jr.key(2), model, optimizer, train_itr, val_itr)
"""

SIGNATURE = """\
def train_fn(
  *,
  fns: tuple[Callable, Callable],
  shardings: Optional[tuple[jax.NamedSharding, jax.NamedSharding]] = None,
  n_steps: int,
  eval_every_n_steps: int,
  n_eval_batches: int,
  log_to_wandb: bool = False,
  hooks: Iterable[Callable] = (),
) -> Callable:
  ...
"""

SHARDING = """\
def get_sharding():
  num_devices = jax.local_device_count()
  mesh = jax.sharding.Mesh(
    mesh_utils.create_device_mesh((num_devices,)), ("data",)
  )
  model_sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
  data_sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
  return model_sharding, data_sharding
"""

HOOK_SIGNATURE = """\
def hook_fn(step, *, model, **kwargs) -> None:
  ...
"""

HOOK = """\
def hook_fn(metrics, val_iter, hook_every_n_steps):
  def fn(step, *, model, **kwargs):
    if step % hook_every_n_steps != 0:
      return
    for batch in val_iter:
      logits = model(batch["image"])
      loss = optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
      ).mean()
      metrics.update(loss=loss, logits=logits, labels=batch["label"])
    if jax.process_index() == 0:
      curr_metrics = ", ".join(
        [f"{k}: {v}" for k, v in metrics.compute().items()]
      )
      logging.info(f"metrics at step {step}: {curr_metrics}")
    metrics.reset()
  return fn

metrics = nnx.MultiMetric(
  accuracy=nnx.metrics.Accuracy(),
  loss=nnx.metrics.Average("loss"),
)
hook = hook_fn(metrics, val_iter, hook_every_n_steps)
"""

CHECKPOINTER_SIGNATURE = """\
def get_default_checkpointer(
  outfolder: str,
  *,
  save_every_n_steps: int,
  max_to_keep: int = 5,
) -> tuple[Callable, Callable, Callable]: ...
"""

SAVING = """\
hook_save, *_ = get_default_checkpointer(
  "checkpoints", save_every_n_steps=100
)
"""

CHECKPOINTER = """\
save, restore_best, restore_last = get_default_checkpointer(
  "checkpoints", save_every_n_steps=100
)
"""

RESTORING = """\
model = CNN(rngs=nnx.rnglib.Rngs(jr.key(1)))
optimizer = nnx.Optimizer(model, optax.adam(1e-4))

model, optimizer = restore_best(model, optimizer)
model, optimizer = restore_last(model, optimizer)
"""

DOING = """\
train = train_fn(
  fns=(train_step, val_step),
  n_steps=n_steps,
  eval_every_n_steps=eval_every_n_steps,
  n_eval_batches=n_eval_batches,
  shardings=(model_sharding, data_sharding),
  hooks=hooks,
  log_to_wandb=False,
)
train(jr.key(1), model, optimizer, train_itr, val_itr)
"""


class Page(dict[str, Any]):
    """The names that the code of the page has made so far."""

    def __init__(self) -> None:
        super().__init__()
        digits = load_digits()
        parts = {
            name: {"image": part["image"][..., None].astype(np.float32) / 16, "label": part["label"]}
            for name, part in digits.items()
        }
        self["train_itr"] = ArrayLoader(parts["train"], 32, shuffle=True, drop_last=True)
        self["val_itr"] = self["val_iter"] = ArrayLoader(parts["val"], 32, drop_last=True)
        self.run(IMPORTS, STEPS)

    def run(self, *blocks: str) -> None:
        for block in blocks:
            exec(compile(block, "document 003", "exec"), self)

    @property
    def step(self) -> int:
        return int(self["optimizer"].step.get_value())


@pytest.mark.slow
def test_the_example_trains(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "jax_trainer")
    monkeypatch.chdir(tmp_path)
    page = Page()
    page.run(TRAINING)
    assert page.step == 100
    lines = [message for message in caplog.messages if message.startswith("step ")]
    assert len(lines) == 10
    losses = [float(line.rpartition("val/loss ")[2]) for line in lines]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_hooks_shardings_and_checkpoints_work_together_and_a_run_is_restored(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.chdir(tmp_path)
    page = Page()
    page.run(SHARDING, "model_sharding, data_sharding = get_sharding()")
    page.update(hook_every_n_steps=10, eval_every_n_steps=10, n_eval_batches=2, n_steps=20)
    page.run(HOOK, SAVING, CHECKPOINTER, "hooks = [hook, hook_save]")
    page.run(RESTORING)  # nothing is there yet
    assert caplog.text.count("model and optimizer are unchanged") == 2
    page.run(DOING)
    assert CheckpointStore(tmp_path / "checkpoints").steps() == [20]
    assert len(page["model"].out.kernel[...].sharding.device_set) == len(jax.devices()) == 8
    weights = np.asarray(page["model"].out.kernel[...])
    page.run(RESTORING)
    assert page.step == 20
    np.testing.assert_array_equal(page["model"].out.kernel[...], weights)
    page.update(n_steps=24)
    page.run(SAVING, "hooks = [hook, hook_save]", DOING)
    assert page.step == 24
    logged = [message for message in caplog.messages if message.startswith("metrics at step")]
    assert [message.split(":")[0] for message in logged] == ["metrics at step 10", "metrics at step 20"]
    assert "accuracy" in logged[0]


@pytest.mark.parametrize(
    ("name", "signature"), [("train_fn", SIGNATURE), ("get_default_checkpointer", CHECKPOINTER_SIGNATURE)]
)
def test_everything_that_a_signature_promises_is_there(name, signature):
    page = Page()
    ours = inspect.signature(page[name]).parameters
    page.run(signature)
    for promised in inspect.signature(page[name]).parameters.values():
        mine = ours[promised.name]
        assert (mine.kind, mine.default) == (promised.kind, promised.default)
    more = [parameter for parameter in ours.values() if parameter.name not in inspect.signature(page[name]).parameters]
    assert all(one.default is not one.empty or one.kind is one.VAR_KEYWORD for one in more)


def test_a_hook_has_the_signature_that_is_promised():
    page = Page()
    page.run(HOOK_SIGNATURE)
    train = page["train_fn"](
        fns=(page["train_step"], page["val_step"]),
        n_steps=1,
        eval_every_n_steps=1,
        n_eval_batches=1,
        hooks=[page["hook_fn"]],
    )
    assert callable(train)  # a hook with another signature is refused here
