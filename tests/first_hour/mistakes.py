"""What the tables of mistakes share: what a row is, tiny models and data, and the same training in every style."""

import contextlib
import io
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jax_trainer import ArrayLoader, TrainerModule
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import TrainLoop, TrainTask, fit, train_fn
from jax_trainer.tools.cli import main

# when a mistake must be found: "folder": before a run's folder is made, and before the first step; "step": before the
# first step; "late": only a step can show it
FOLDER, STEP, LATE = "folder", "step", "late"
IN_YOUR_CODE = r"In your code: File .*mistakes\.py"


@dataclass(frozen=True)
class Mistake:
    """One way to make a mistake.

    Args:
        name: the mistake, a colon, and the style or the variant.
        make: makes the mistake, in an empty folder; may return what a command printed.
        names: regular expressions that the message, with its notes, must match.
        error: the exception, or the exit code of a command.
        at: when it must be found.
        never: what the message must not say.
    """

    name: str
    make: Callable[[Path], Any]
    names: tuple[str, ...]
    error: type[BaseException] | int = Exception
    at: str = FOLDER
    never: str = ""


@dataclass(frozen=True)
class Said:
    """How a command ended, and what it printed."""

    code: int
    text: str


class Table(list[Mistake]):
    """Rows, each written as a function that makes the mistake.

    What stands before the colon of a name is the mistake: one test has all of its rows.
    """

    def row(self, name: str, *names: str, **options: Any) -> Callable[[Callable[[Path], Any]], None]:
        return lambda make: self.append(Mistake(name, make, names, **options))

    def each(self, name: str, *names: str, styles: tuple[str, ...] = (), **options: Any) -> Callable[[Any], None]:
        """One row for every style; `make` takes the style first."""

        def add(make: Any) -> None:
            for style in styles or STYLES:
                bound = lambda folder, style=style: make(style, folder)
                self.append(Mistake(f"{name}: {style}", bound, names, **options))

        return add


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def is_ours(error: BaseException) -> bool:
    """Whether this library raised it, or its notes say what it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    notes = getattr(error, "__notes__", [])
    return "/jax_trainer/" in last.filename or any(re.match("In your code|This happened", note) for note in notes)


RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 4), np.float32)
Y = (np.arange(16) % 3).astype(np.int32)


class Net(nn.Module):
    """Three classes, of any width."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(3, kernel_init=nn.initializers.zeros)(x)  # random numbers take long to compile


class Nnx(nnx.Module):
    """Three classes, of four features."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 3, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


def nnx_net() -> Nnx:
    return Nnx(nnx.Rngs(0))


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loader(x: Any = X, y: Any = Y, size: int = 8) -> ArrayLoader:
    return ArrayLoader((x, y), size)


def run_fit(folder: Path, model: Any = None, train_ds: Any = None, test_ds: Any = None, **changes: Any) -> Any:
    """`fit`, with something changed."""
    options: dict[str, Any] = {
        "loss_fn": lambda logits, labels: cross_entropy(logits, labels),
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "num_epochs": 1,
        "batch_size": 8,
        "log_dir": folder / "runs",
        "tensorboard": False,
        "progress": False,
    }
    return fit(
        Net() if model is None else model, (X, Y) if train_ds is None else train_ds, test_ds, **options | changes
    )


class Trainer(TrainerModule):
    """A classifier in both flavours."""

    loss: Any = staticmethod(cross_entropy)

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return self.loss(model(batch[0]), batch[1]), {}

    def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
        return self.loss(logits, batch[1]), (mutable, {})


def make_trainer(folder: Path, kind: Any = Trainer, **changes: Any) -> Any:
    """A trainer, with something changed."""
    options: dict[str, Any] = {
        "model": Net(),
        "optimizer": optax.sgd(0.1, momentum=0.9),
        "exmp_input": (X[:8], Y[:8]),
        "train_epochs": 1,
        "enable_progress_bar": False,
        "logger": LoggerConfig(log_dir=str(folder / "runs")),
    }
    return kind(**{name: value for name, value in (options | changes).items() if value is not ...})


def run_trainer(folder: Path, train: Any = None, val: Any = None, kind: Any = Trainer, **changes: Any) -> Any:
    """`TrainerModule`, with something changed, trained."""
    trainer = make_trainer(folder, kind, **changes)
    trainer.train_model(loader() if train is None else train, val)
    return trainer


def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
    return nnx.value_and_grad(lambda model, batch: cross_entropy(model(batch[0]), batch[1]))(model, batch)


def val_step(model: Any, rng_key: Any, batch: Any) -> Any:
    return cross_entropy(model(batch[0]), batch[1])


def run_train_fn(
    train: Any = None,
    val: Any = None,
    fns: Any = (train_step, val_step),
    model: Any = None,
    tx: Any = None,
    **changes: Any,
) -> None:
    """`train_fn`, with something changed, called."""
    options = {"n_steps": 2, "eval_every_n_steps": 2, "n_eval_batches": 1, "progress": False} | changes
    model = nnx_net() if model is None else model
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9) if tx is None else tx, wrt=nnx.Param)
    go = train_fn(fns=fns, **options)
    go(jax.random.key(0), model, optimizer, loader() if train is None else train, val)


def run_loop(model: Any = None, steps: int = 2, **changes: Any) -> None:
    """`TrainLoop`, with something changed, iterated over."""
    model = Net() if model is None else model
    task = {"apply": model.apply, "optimizer": optax.sgd(0.1, momentum=0.9), "loss": cross_entropy, "data": loader()}
    of_loop = {name: changes.pop(name) for name in list(changes) if name not in task}
    loop = TrainLoop(
        **{"init": model.init, "task": TrainTask(**task | changes), "n_steps": steps, "stdout": False} | of_loop
    )
    for _ in loop:
        pass


def train(
    style: str,
    folder: Path,
    *,
    data: Any = None,
    val: Any = None,
    loss: Any = cross_entropy,
    linen: Any = None,
    nnx_model: Any = None,
    tx: Any = None,
) -> None:
    """The same training in any style."""
    data, tx = loader() if data is None else data, optax.sgd(0.1, momentum=0.9) if tx is None else tx
    if style == "fit, linen":
        run_fit(folder, linen, data, val, loss_fn=lambda logits, labels: loss(logits, labels), optimizer=tx)
    elif style == "fit, nnx":
        model = nnx_net() if nnx_model is None else nnx_model
        run_fit(folder, model, data, val, loss_fn=lambda logits, labels: loss(logits, labels), optimizer=tx)
    elif style.startswith("TrainerModule"):
        kind = type("Classifier", (Trainer,), {"loss": staticmethod(loss)})
        of_nnx = nnx_net() if nnx_model is None else nnx_model
        model = (Net() if linen is None else linen) if style.endswith("linen") else of_nnx
        run_trainer(folder, data, val, kind, model=model, optimizer=tx, exmp_input=next(iter(data)))
    elif style == "train_fn":
        whole = lambda model, batch: loss(model(batch[0]), batch[1])
        step = lambda model, rng_key, batch: nnx.value_and_grad(whole)(model, batch)
        run_train_fn(data, val, (step, lambda model, rng_key, batch: whole(model, batch)), model=nnx_model, tx=tx)
    else:
        run_loop(linen, data=data, loss=loss, optimizer=tx)


STYLES = ("fit, linen", "fit, nnx", "TrainerModule, linen", "TrainerModule, nnx", "train_fn", "TrainLoop")
VALIDATING = STYLES[:5]  # which take validation data


TINY = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 1
  max_steps_per_epoch: 2
  num_classes: 10
  enable_progress_bar: false
model:
  class_name: MLP
  num_classes: 10
  hidden: [4]
optimizer:
  class_name: AdamW
  learning_rate: 1e-3
dataset:
  class_name: DigitsDataset
  global_batch_size: 32
"""


def command(folder: Path, *arguments: str, old: str = "", new: str = "", text: str = TINY) -> Said:
    """Runs a command in this process on the tiny experiment with one change."""
    assert not old or text.count(old) == 1
    (folder / "tiny.yaml").write_text(text.replace(old, new) if old else text)
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main([str(argument) for argument in arguments])
    return Said(code, out.getvalue())
