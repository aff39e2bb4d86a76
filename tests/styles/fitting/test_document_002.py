"""The code of the document about `fit` runs unchanged: only its imports are changed, and its `...` filled."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData  # type: ignore[attr-defined] - made when it is imported

from jax_trainer.core import FlaxState
from jax_trainer.datasets import load_digits

# `from fit import *` also gave what that file imported itself
IMPORTS = """
import jax, flax, optax, orbax
import jax.numpy as jnp
from flax import linen as nn
from jax_trainer import TrainState, fit, lr_schedule
"""

MODEL = """
class Model(nn.Module):
    def setup(self):
        self.conv1 = nn.Conv(features=16, kernel_size=(3, 3))
        self.dense1 = nn.Dense(features=10)

    # train=False for evaluation mode
    # if you use dropout or batch normalization
    # I bet you will use it
    @nn.compact
    def __call__(self, x, train=False):
        # simple conv + bn + relu + fully connected layer
        x = self.conv1(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x)
        # dropout layer
        x = nn.Dropout(rate=0.5)(x, deterministic=not train)
        # flatten
        x = x.reshape((x.shape[0], -1))
        x = self.dense1(x)
        return x
"""

PSEUDO = """
def loss_fn():
    loss = criterion(logits, labels)
    return loss

def eval_step():
    true_x, true_y = data
    model.eval()
    pred_y = model(true_x)
    # your metric function such as accuracy in pytorch
    acc = metric(pred_y, true_y)
    return acc
"""

LOSS = """
@jax.jit
def loss_fn(logits, labels):
    loss = optax.softmax_cross_entropy(
        logits,
        jax.nn.one_hot(labels, 10)
    ).mean()
    # put the losses you want to log to tensorboard
    loss_dict = {'loss': loss}
    return loss, loss_dict
"""

EVALUATION = """
@jax.jit
def eval_step(state: TrainState, batch):
    x, y = batch
    logits = state.apply_fn({
        'params': state.params,
        'batch_stats': state.batch_stats,
        }, x, train=False)
    acc = jnp.equal(jnp.argmax(logits, -1), y).mean()
    return acc
"""

# its `loss_fn()` and `eval_step()` are templates, whose parameters and bodies the sections after it give
QUICK_START = f"""
# prepare your dataset
train_ds, test_ds = your_dataset()
# lr schedule
lr_fn = lr_schedule(
    base_lr=1e-3,
    steps_per_epoch=len(train_ds),
    epochs=100,
    warmup_epochs=5,
)

# key 1: your model
model = YourModel()

# init key and model
key = jax.random.PRNGKey(0)
x = jnp.ones((1, 28, 28, 1)) # MNIST example input
var = model.init(key, x, train=True)

state = TrainState.create(
    apply_fn=model.apply,
    params=var['params'],
    batch_stats=var['batch_stats'],
    tx=optax.inject_hyperparams(optax.adam)(lr_fn),
)

# your training step, the template in the next section
{LOSS}
# your evaluation step
{EVALUATION}
result = fit(state, train_ds, test_ds,
    loss_fn=loss_fn,
    eval_step=eval_step,
    eval_freq=1,
    num_epochs=10,
    log_name='mnist',
)
"""

TENSORFLOW = """
ds = tfds.load("mnist", split="train", as_supervised=True)
train_ds = ds.take(50000).map(lambda x, y: (x / 255, y))
"""

TORCHVISION = """
ds = torchvision.datasets.MNIST(
    root="data", train=True, download=True,
    transform=torchvision.transforms.ToTensor()
)
train_ds = torch.utils.data.DataLoader(ds, batch_size=32, shuffle=True)
"""

SCHEDULE = """
lr_fn = lr_schedule(base_lr=1e-3,
    steps_per_epoch=len(train_ds),
    epochs=100,
    warmup_epochs=5,
)
"""

CHAINED = """
state = TrainState.create(
    apply_fn=model.apply,
    params=var['params'],
    batch_stats=var['batch_stats'],
    # chainable update transformations
    tx=optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(lr_fn)),
)
"""

FIT = """
result = fit(state, train_ds, test_ds,
    loss_fn=loss_fn,
    eval_step=eval_step,
    # evaluate the model every N epochs (default 1)
    eval_freq=1,
    num_epochs=10,
    # log name for tensorboard
    log_name='mnist',
    # hyperparameters for the training process
    # such as batch size, learning rate, etc.
    # it's optional for you
    hparams={
        'batch_size': 32,
        'lr': 1e-3,
    },
)
"""

COUNT = 64  # two batches


def digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """A few of the digits that come with the package, as large as those of MNIST: 28×28, bytes."""
    found = load_digits()[part]
    large = np.kron(found["image"][:COUNT], np.ones((1, 3, 3), np.uint8)) * 15
    return np.pad(large, ((0, 0), (2, 2), (2, 2))), found["label"][:COUNT]


class Tensor:
    """What a tensor of TensorFlow is to us: something that numpy can read."""

    def __init__(self, values: Any) -> None:
        self._values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._values

    def __truediv__(self, other: float) -> "Tensor":
        return Tensor(self._values / np.float32(other))


class Pipeline:
    """A dataset of TensorFlow with the methods that are used here; it gives single examples until it is batched."""

    def __init__(self, examples: list[tuple[Tensor, Tensor]]) -> None:
        self._examples = examples

    def take(self, count: int) -> "Pipeline":
        return Pipeline(self._examples[:count])

    def map(self, function: Any) -> "Pipeline":
        return Pipeline([function(x, y) for x, y in self._examples])

    def batch(self, size: int) -> "Pipeline":
        cuts = [self._examples[at : at + size] for at in range(0, len(self), size)]
        return Pipeline([tuple(Tensor(np.stack(part)) for part in zip(*cut, strict=True)) for cut in cuts])  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._examples)

    def __iter__(self) -> Any:
        return iter(self._examples)


def load(name: str, split: str, as_supervised: bool) -> Pipeline:
    """What `tfds.load` gives."""
    images, labels = digits(split)
    return Pipeline([(Tensor(image[..., None]), Tensor(label)) for image, label in zip(images, labels, strict=True)])


class MNIST:
    """What torchvision's class gives, without the download."""

    def __init__(self, root: str, train: bool, download: bool, transform: Any) -> None:
        self._images, self._labels = digits("train" if train else "test")
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._transform(self._images[index]), int(self._labels[index])


def to_tensor() -> Any:
    """What `torchvision.transforms.ToTensor()` is: bytes become numbers up to 1, channels come first."""
    return lambda image: sys.modules["torch"].from_numpy(image[None] / np.float32(255))


def your_dataset() -> tuple[Any, Any]:
    """Batches of images and labels."""
    parts = [load("mnist", split=part, as_supervised=True) for part in ("train", "test")]
    train, test = (part.map(lambda x, y: (x / 255, y)).batch(32) for part in parts)
    return train, test


def names_of_the_page() -> dict[str, Any]:
    """What the code of the document expects to be there."""
    return {
        "your_dataset": your_dataset,
        "tfds": SimpleNamespace(load=load),
        "torchvision": SimpleNamespace(
            datasets=SimpleNamespace(MNIST=MNIST), transforms=SimpleNamespace(ToTensor=to_tensor)
        ),
    }


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names of the document after its first part, and what its quick start gave."""
    names = names_of_the_page()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("document"))
        for block in (IMPORTS, MODEL, "YourModel = Model", PSEUDO, QUICK_START):
            exec(block, names)
        yield names


@pytest.mark.slow  # a convolution of 28×28 pixels; test_fit.py trains a state in the same way
def test_the_quick_start_learns_and_keeps_a_record(page):
    result = page["result"]
    assert list(result.history) == list(range(1, 11))
    assert result.history[10]["train/loss"] < result.history[1]["train/loss"]
    assert {"val/accuracy", "val/loss", "optimizer/lr"} <= set(result.history[10])
    assert isinstance(result.state, FlaxState)
    assert result.best.metrics["val/accuracy"] == max(one["val/accuracy"] for one in result.history.values())
    assert result.folder.parent == Path("runs/mnist").absolute()
    assert result.predict(page["x"]).shape == (1, 10)


@pytest.mark.slow
def test_the_rest_of_the_page_runs_too(page):
    names, first = dict(page), page["result"]
    for block in (TENSORFLOW, LOSS, EVALUATION, SCHEDULE, CHAINED, FIT):
        exec(block, names)
    result = names["result"]
    assert int(result.state.step) == 10 * COUNT // 32  # single examples were batched
    assert result.folder != first.folder
    assert yaml.safe_load((result.folder / "config.yaml").read_text())["hparams"] == {"batch_size": 32, "lr": 1e-3}
    reader = EventAccumulator(str(result.folder))
    reader.Reload()
    content = reader.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    shown = HParamsPluginData.FromString(content).session_start_info.hparams
    assert (shown["lr"].number_value, shown["batch_size"].number_value) == (1e-3, 32)
    assert len(reader.Scalars("val/accuracy")) == 10


def test_the_data_of_torchvision_comes_in_batches():
    names = names_of_the_page() | {"torch": pytest.importorskip("torch")}
    exec(TORCHVISION, names)
    images, labels = next(iter(names["train_ds"]))
    assert (images.shape, labels.shape) == ((32, 1, 28, 28), (32,))


@pytest.mark.slow
def test_the_data_of_torchvision_is_trained_on_by_a_real_torch_loader(page):
    names = page | {"torch": pytest.importorskip("torch")}
    exec(TORCHVISION, names)
    channels_first = "var = model.init(key, jnp.ones((1, 1, 28, 28)), train=True)"  # as `ToTensor` gives them
    for block in (SCHEDULE, channels_first, CHAINED, FIT.replace("test_ds", "train_ds").replace("=10", "=2")):
        exec(block, names)
    assert int(names["result"].state.step) == 2 * COUNT // 32
