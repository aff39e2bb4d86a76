"""Mistakes in what a loss or a step returns, and in how it is written."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_trainer import TrainerModule
from jax_trainer.metrics import Accuracy
from jax_trainer.styles import EvalLoop, EvalTask, TrainLoop, TrainTask
from tests.first_hour.mistakes import (
    IN_YOUR_CODE,
    LATE,
    Net,
    Table,
    Trainer,
    X,
    Y,
    cross_entropy,
    loader,
    nnx_net,
    run_fit,
    run_loop,
    run_train_fn,
    run_trainer,
    train,
    val_step,
)

LOSSES = Table()
FITS = ("fit, linen", "fit, nnx")


def linen_trainer(loss: Any) -> Any:
    """A trainer whose linen loss makes this of `(loss, mutable)`."""

    class Own(Trainer):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
            return loss(cross_entropy(logits, batch[1]), mutable)

    return Own


def nnx_trainer(loss: Any) -> Any:
    """A trainer whose nnx loss makes this of the loss."""

    class Own(Trainer):
        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            return loss(cross_entropy(model(batch[0]), batch[1]))

    return Own


def step(returned: Any) -> Any:
    """The two functions of `train_fn`, where the first makes this of the loss and the gradients."""

    def train_step(model: Any, rng_key: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)
        return returned(loss, grads)

    return train_step, val_step


# what is returned


@LOSSES.each("a loss without a value: the loss returns nothing", "loss", "None|nothing")
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: None)


@LOSSES.each("a loss that is not a number: the loss is one value per example and class", r"\(8, 3\)|\[8, ?3\]", "mean")
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: optax.sigmoid_binary_cross_entropy(logits, jnp.zeros((8, 3))))


@LOSSES.each("a loss that is not a number: predictions [N, 1] minus targets [N]", r"\(8, 8\)|\[8, ?8\]", styles=FITS)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: (logits[:, :1] - labels) ** 2)


@LOSSES.each("a loss that leaves JAX: the loss computes with numpy", "numpy", "jnp|jax.numpy", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: np.mean(np.asarray(logits)))


@LOSSES.each("a loss that leaves JAX: the loss calls float", "float", "jnp|tracer|traced|compiled", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: float(cross_entropy(logits, labels)))


@LOSSES.each("a loss that leaves JAX: the loss calls item", "item", "jnp|tracer|traced|compiled|float", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: cross_entropy(logits, labels).item())


def _branching(logits: Any, labels: Any) -> Any:
    if logits.sum() > 0:
        return cross_entropy(logits, labels)
    return 0.0 * cross_entropy(logits, labels)


@LOSSES.each("the loss branches on a value", "jnp.where", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=_branching)


@LOSSES.each("a loss that is not a number: the loss is an integer", "int32", "float|whole")
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: (logits.argmax(-1) != labels).sum())


@LOSSES.each(
    "a bug in the loss: the loss has a bug of its own",
    "softmaxx",
    IN_YOUR_CODE,
    r"float32\[8, ?4\]",
    error=AttributeError,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: logits.softmaxx(labels))


@LOSSES.each(
    "a bug in the loss: shapes in the loss do not go together", r"float32\[8, ?4\]", r"int32\[8\]", IN_YOUR_CODE
)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: (logits * labels).mean())


@LOSSES.row(
    "a loss that returns something else: fit, the loss returns (metrics, loss)",
    "loss",
    "dict",
    "order|swap|first",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: ({"acc": 1.0}, cross_entropy(logits, labels)))


@LOSSES.row("a loss that returns something else: fit, the loss returns a dict alone", "loss", "dict", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: {"loss": cross_entropy(logits, labels)})


@LOSSES.row(
    "a loss that returns something else: fit, the loss returns the loss and the logits", "loss", "dict", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: (cross_entropy(logits, labels), logits))


@LOSSES.row("a loss that returns something else: fit, the loss returns three things", "loss", "tuple", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: (cross_entropy(logits, labels), {}, {}))


@LOSSES.row(
    "a loss that returns something else: fit nnx, the loss with the model returns (metrics, loss)",
    "dict",
    "order|swap|first",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, nnx_net(), loss_fn=lambda model, batch: ({"a": 1.0}, cross_entropy(model(batch[0]), batch[1])))


@LOSSES.row(
    "a loss of a trainer that returns something else: TrainerModule nnx, the loss returns (metrics, loss)",
    "loss_function",
    "dict",
    "order|swap|first",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=nnx_trainer(lambda loss: ({"acc": loss}, loss)), model=nnx_net())


@LOSSES.row(
    "a loss of a trainer that returns something else: TrainerModule nnx, the loss returns a dict alone",
    "loss_function",
    "dict",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=nnx_trainer(lambda loss: {"loss": loss}), model=nnx_net())


@LOSSES.row(
    "a loss of a trainer that returns something else: TrainerModule nnx, the loss returns three things",
    "loss_function",
    "tuple|3",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=nnx_trainer(lambda loss: (loss, {}, {})), model=nnx_net())


@LOSSES.row(
    "a loss of a trainer that returns something else: TrainerModule nnx, the loss returns the loss and the logits",
    "loss_function",
    "dict",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=nnx_trainer(lambda loss: (loss, jnp.zeros(3))), model=nnx_net())


@LOSSES.row(
    "a linen loss that returns something else: TrainerModule linen, the loss alone",
    "loss_function_linen|linen loss",
    "mutable",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=linen_trainer(lambda loss, mutable: loss))


@LOSSES.row(
    "a linen loss that returns something else: TrainerModule linen, the loss and metrics, without collections",
    "mutable",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=linen_trainer(lambda loss, mutable: (loss, {"acc": loss})))


@LOSSES.row(
    "a linen loss that returns something else: TrainerModule linen, metrics before collections",
    "mutable",
    "metrics",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=linen_trainer(lambda loss, mutable: (loss, ({"acc": loss}, mutable))))


@LOSSES.row(
    "a linen loss that returns something else: TrainerModule linen, (metrics, loss)",
    "mutable|dict",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=linen_trainer(lambda loss, mutable: ((mutable, {"acc": loss}), loss)))


@LOSSES.row(
    "a linen loss that returns something else: TrainerModule linen, collections that are not what the model has",
    "mutable|collections",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=linen_trainer(lambda loss, mutable: (loss, (loss, {}))))


@LOSSES.row(
    "a train_step that returns something else: train_fn, the gradients alone", "train_step", "loss", error=TypeError
)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: grads))


@LOSSES.row(
    "a train_step that returns something else: train_fn, (grads, loss)",
    "train_step",
    "gradients",
    error=(TypeError, ValueError),
)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: (grads, loss)))


@LOSSES.row("a train_step that returns something else: train_fn, nothing", "train_step", "return", error=TypeError)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: None))


@LOSSES.row(
    "a train_step that returns something else: train_fn, the loss alone", "train_step", "gradients", error=TypeError
)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: loss))


@LOSSES.row(
    "a train_step that returns something else: train_fn, (loss, metrics, grads)",
    "train_step",
    "3|metrics",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: (loss, {}, grads)))


@LOSSES.row(
    "a train_step that returns something else: train_fn, gradients of jax.grad over something else",
    "Gradients|gradients",
    "nnx.grad",
    error=(TypeError, ValueError),
)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: (loss, {"out": jnp.zeros(3)})))


@LOSSES.row(
    "a val_step that returns something else: train_fn, val_step returns (metrics, loss)",
    "val_step",
    "dict",
    error=(TypeError, ValueError),
)
def _(folder: Path) -> None:
    bad = lambda model, rng_key, batch: ({"acc": 1.0}, val_step(model, rng_key, batch))
    run_train_fn(val=loader(), fns=(step(lambda loss, grads: (loss, grads))[0], bad))


@LOSSES.row(
    "a val_step that returns something else: train_fn, val_step returns nothing",
    "val_step",
    "None|nothing",
    error=(TypeError, ValueError),
)
def _(folder: Path) -> None:
    run_train_fn(val=loader(), fns=(step(lambda loss, grads: (loss, grads))[0], lambda model, rng_key, batch: None))


@LOSSES.row(
    "a step of other parameters: train_fn, a step with its arguments in another number",
    "rng_key|train_step",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_train_fn(fns=(lambda model, batch: None, val_step))


@LOSSES.row(
    "a step of other parameters: train_fn, one function instead of two",
    "fns",
    "train_step",
    "val_step",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_train_fn(fns=val_step)


@LOSSES.row(
    "a loss that returns something else: TrainLoop, the loss returns a dict of metrics with it",
    "TrainTask.loss|`loss`",
    "tuple",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_loop(loss=lambda logits, labels: (cross_entropy(logits, labels), {"acc": 1.0}))


@LOSSES.row(
    "a loss of other parameters: TrainLoop, the loss takes other arguments",
    "loss",
    IN_YOUR_CODE + "|arguments",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_loop(loss=lambda logits: logits.mean())


@LOSSES.row(
    "a loss of other parameters: TrainLoop, the loss takes the batch", "loss", "logits|outputs|targets", error=TypeError
)
def _(folder: Path) -> None:
    run_loop(loss=lambda params, batch, rng: 0.0)


# metrics


VECTOR = ("acc", r"\(8,\)|\[8\]", "mean")


@LOSSES.row("a metric per example: fit, a metric per example", *VECTOR)
def _(folder: Path) -> None:
    run_fit(
        folder, loss_fn=lambda logits, labels: (cross_entropy(logits, labels), {"acc": logits.argmax(-1) == labels})
    )


@LOSSES.row("a metric per example: TrainerModule, a metric per example", *VECTOR)
def _(folder: Path) -> None:
    vector = lambda loss, mutable: (loss, (mutable, {"acc": jnp.ones(8)}))
    run_trainer(folder, kind=linen_trainer(vector))


@LOSSES.row("a metric per example: train_fn, a metric per example", *VECTOR)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: ((loss, {"acc": jnp.ones(8)}), grads)))


@LOSSES.row("a metric of another type: fit, a metric that is text", "note", "str", "number", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: (cross_entropy(logits, labels), {"note": "good"}))


@LOSSES.row("a metric of another type: TrainerModule, a metric that is text", "note", "str", "number", error=TypeError)
def _(folder: Path) -> None:
    run_trainer(folder, kind=linen_trainer(lambda loss, mutable: (loss, (mutable, {"note": "good"}))))


@LOSSES.row("a metric of another type: train_fn, a metric that is text", "note", "str", "number", error=TypeError)
def _(folder: Path) -> None:
    run_train_fn(fns=step(lambda loss, grads: ((loss, {"note": "good"}), grads)))


@LOSSES.row("a metric of another type: fit, a metric that is None", "acc", "None", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: (cross_entropy(logits, labels), {"acc": None}))


@LOSSES.row("a metric of another type: fit, a metric with an unknown mode", "acc", "average", "mean", error=ValueError)
def _(folder: Path) -> None:
    loss = lambda logits, labels: (cross_entropy(logits, labels), {"acc": {"value": 1.0, "mode": "average"}})
    run_fit(folder, loss_fn=loss)


@LOSSES.row("a metric of another type: fit, metrics in a nested dict", "scores", "acc", "value", error=ValueError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels: (cross_entropy(logits, labels), {"scores": {"acc": 1.0}}))


@LOSSES.row(
    "an eval_step that returns something else: fit, eval_step returns a tuple", "eval_step", "tuple", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), eval_step=lambda state, batch: (1.0, 2.0))


@LOSSES.row(
    "an eval_step that returns something else: fit, eval_step returns nothing", "eval_step", "nothing", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), eval_step=lambda state, batch: None)


@LOSSES.row(
    "an eval_step that fails: fit, eval_step that fails",
    "no_such",
    IN_YOUR_CODE,
    r"float32\[8, ?4\]",
    error=AttributeError,
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), eval_step=lambda state, batch: state.no_such)


# how it is written


@LOSSES.row("no function as the loss: fit, no loss", "loss_fn", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=None)


@LOSSES.row("no function as the loss: fit, the loss is called", "loss_fn", "function", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=cross_entropy(jnp.zeros((1, 3)), jnp.zeros(1, int)))


@LOSSES.row("no function as the loss: fit, the loss is a name", "loss_fn", "str", "function", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn="cross_entropy")


@LOSSES.row("a loss of other parameters: fit, a loss of one argument", "loss_fn", "logits", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda batch: 0.0)


@LOSSES.row("a loss of other parameters: fit, a loss that wants more", "loss_fn", "weights", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels, weights: 0.0)


@LOSSES.row("a loss of other parameters: fit, a loss that wants the epoch", "loss_fn", "epoch", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda logits, labels, epoch: 0.0)


@LOSSES.row(
    "the loss of the other model library: fit, an nnx loss for a linen model", "params", "model", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda model, batch: cross_entropy(model(batch[0]), batch[1]))


@LOSSES.row(
    "the loss of the other model library: fit, a linen loss for an nnx model", "params", "model", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, nnx_net(), loss_fn=lambda params, batch: 0.0)


@LOSSES.row("a loss of other parameters: fit, labels and logits exchanged in the loss", r"loss_fn\(logits, labels\)")
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda labels, logits: cross_entropy(logits, labels))


@LOSSES.row(
    "a trainer without a method: TrainerModule, no loss at all",
    "loss_function_linen",
    "Bare",
    error=NotImplementedError,
)
def _(folder: Path) -> None:
    class Bare(TrainerModule):
        def batch_to_input(self, batch: Any) -> Any:
            return batch[0]

    run_trainer(folder, kind=Bare)


@LOSSES.row(
    "a trainer without a method: TrainerModule, no batch_to_input", "batch_to_input", "Bare", error=NotImplementedError
)
def _(folder: Path) -> None:
    class Bare(TrainerModule):
        pass

    run_trainer(folder, kind=Bare)


@LOSSES.row(
    "the loss of the other model library: TrainerModule, the loss of the other flavour only",
    "loss_function",
    "nnx",
    error=NotImplementedError,
)
def _(folder: Path) -> None:
    class LinenOnly(TrainerModule):
        batch_to_input = Trainer.batch_to_input
        loss_function_linen = Trainer.loss_function_linen

    run_trainer(folder, kind=LinenOnly, model=nnx_net())


@LOSSES.row(
    "a loss of other parameters: TrainerModule, a loss of other parameters", "loss_function", "batch", error=TypeError
)
def _(folder: Path) -> None:
    class Own(Trainer):
        def loss_function_linen(self, params: Any, batch: Any) -> Any:  # pyright: ignore  # the mistake
            return 0.0

    run_trainer(folder, kind=Own)


@LOSSES.row("a trainer without a method: TrainerModule, Lightning's training_step", "training_step", "loss_function")
def _(folder: Path) -> None:
    class Own(Trainer):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 0.0

    run_trainer(folder, kind=Own)


@LOSSES.each(
    "a loss that is not finite: a loss that is not finite from the start", "[Nn]ot finite|nan", "step|Step", at=LATE
)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: jnp.log(-1 - jnp.abs(logits)).mean())


@LOSSES.each(
    "a loss that is not finite: a learning rate by which the loss explodes", "learning rate", "step|Step", at=LATE
)
def _(style: str, folder: Path) -> None:
    squared = lambda logits, labels: ((logits - labels[:, None]) ** 2).mean()
    train(style, folder, data=loader(X * 1e18), loss=squared, tx=optax.sgd(1e30))


@LOSSES.row(
    "a loss of other parameters: TrainerModule, a loss without self", "loss_function_linen", "params", error=TypeError
)
def _(folder: Path) -> None:
    def loss_function_linen(params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
        return 0.0

    run_trainer(folder, kind=type("Own", (Trainer,), {"loss_function_linen": loss_function_linen}))


@LOSSES.row(
    "steps of one's own: TrainerModule, create_functions returns one step",
    "create_functions",
    "evaluation",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(
        folder, kind=type("Own", (Trainer,), {"create_functions": lambda self: lambda state, batch: (state, {})})
    )


@LOSSES.row(
    "steps of one's own: TrainerModule, a step of one's own returns nothing",
    "state, metrics",
    "NoneType|nothing",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(
        folder, kind=type("Own", (Trainer,), {"create_training_function": lambda self: lambda state, batch: None})
    )


@LOSSES.row(
    "steps of one's own: TrainerModule, a step of one's own returns (metrics, state)", "state, metrics", error=TypeError
)
def _(folder: Path) -> None:
    swapped = lambda self: lambda state, batch: ({"loss": jnp.float32(0)}, state)
    run_trainer(folder, kind=type("Own", (Trainer,), {"create_training_function": swapped}))


@LOSSES.each("a loss that leaves JAX: the loss formats a value", "jax.debug.print", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: f"{logits.mean():.3f}")


@LOSSES.row(
    "an eval_step that returns something else: fit, eval_step returns text", "eval_step", "str", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), eval_step=lambda state, batch: "good")


@LOSSES.row(
    "a metric per example: fit, eval_step returns a value per example by name",
    "acc",
    r"\(8,\)",
    "mean",
    error=ValueError,
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), eval_step=lambda state, batch: {"acc": batch[1] == 1})


def evaluated(metrics: Any, checkpoint: Any = None) -> None:
    """An `EvalLoop` with these metrics, called."""
    model = Net()
    task = EvalTask(apply=model.apply, metrics=metrics, data=loader())
    if checkpoint is None:
        train = TrainTask(apply=model.apply, optimizer=optax.sgd(0.1), loss=cross_entropy, data=loader())
        checkpoint = next(TrainLoop(init=model.init, task=train, n_steps=1, stdout=False))
    EvalLoop(task=task, n_steps=1)(checkpoint)


@LOSSES.row(
    "metrics of an EvalTask: EvalTask, a metric of other parameters",
    "acc",
    "outputs, targets",
    error=TypeError,
    at=LATE,
)
def _(folder: Path) -> None:
    evaluated({"acc": lambda logits: 0.0})


@LOSSES.row(
    "metrics of an EvalTask: EvalTask, a metric that fails",
    IN_YOUR_CODE,
    r"float32\[8, ?4\]",
    "eval",
    error=TypeError,
    at=LATE,
)
def _(folder: Path) -> None:
    evaluated({"acc": lambda logits, labels: logits @ labels})


@LOSSES.row(
    "metrics of an EvalTask: EvalTask, a function instead of functions by name",
    "metrics",
    "by label",
    error=TypeError,
    at=LATE,
)
def _(folder: Path) -> None:
    evaluated(cross_entropy)


@LOSSES.row("metrics of an EvalTask: EvalLoop, called with parameters", "checkpoint", "dict", error=TypeError)
def _(folder: Path) -> None:
    evaluated({"loss": cross_entropy}, {"params": 1})


# what only Flax or optax would say


@LOSSES.each(
    "labels of another dtype or shape: softmax_cross_entropy with integer labels",
    r"\[8\]",
    "with_integer_labels",
    "one_hot",
)
def _(style: str, folder: Path) -> None:
    train(style, folder, loss=lambda logits, labels: optax.softmax_cross_entropy(logits, labels).mean())


@LOSSES.row(
    "what linen's apply takes and returns: fit, parameters without their collection",
    r'\{"params": params\}',
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(Net().apply(params, batch[0]), batch[1])

    run_fit(folder, loss_fn=loss)


@LOSSES.row(
    "what linen's apply takes and returns: TrainerModule, the output and the collections are not taken apart",
    "logits, mutable",
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    class Own(Trainer):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            logits = self.model_linen_apply(params, state, batch[0], rng, train=train)
            return cross_entropy(logits, batch[1]), (None, {})

    run_trainer(folder, kind=Own)


@LOSSES.row("a trainer without a method: TrainerModule, self.log", "no attribute 'log'", "Return metrics", IN_YOUR_CODE)
def _(folder: Path) -> None:
    class Own(Trainer):
        def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
            loss = cross_entropy(model(batch[0]), batch[1])
            cast(Any, self).log("train_loss", loss)
            return loss, {}

    run_trainer(folder, kind=Own, model=nnx_net())


@LOSSES.row(
    "steps of one's own: TrainerModule, a step of one's own forgets what apply_gradients returns",
    "apply_gradients",
    "trained",
)
def _(folder: Path) -> None:
    class Own(Trainer):
        def create_training_function(self) -> Any:
            def step(state: Any, batch: Any) -> Any:
                of_params = lambda params: cross_entropy(state.apply_fn({"params": params}, batch[0]), batch[1])
                loss, grads = jax.value_and_grad(of_params)(state.params)
                state.apply_gradients(grads=grads)
                return state, {"loss": loss}

            return step

    run_trainer(folder, kind=Own)


@LOSSES.row(
    "a step of other parameters: train_fn, the step's arguments in another order",
    r"\(model, rng_key, batch\)",
    "another order",
    error=TypeError,
)
def _(folder: Path) -> None:
    def step(model: Any, batch: Any, rng_key: Any) -> Any:
        return nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)

    run_train_fn(fns=(step, val_step))


@LOSSES.row(
    "a step that does too much: train_fn, the optimizer is updated inside the step",
    "optimizer.update",
    "gradients",
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    model = nnx_net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(model: Any, rng_key: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: cross_entropy(model(batch[0]), batch[1]))(model)
        optimizer.update(model, grads)
        return loss, grads

    run_train_fn(fns=(step, val_step), model=model)


@LOSSES.row("a step that does too much: train_fn, a tuple is used as a dict", "tuple", "x, y = batch", IN_YOUR_CODE)
def _(folder: Path) -> None:
    def step(model: Any, rng_key: Any, batch: Any) -> Any:
        return nnx.value_and_grad(lambda model: cross_entropy(model(batch["image"]), batch["label"]))(model)

    run_train_fn(fns=(step, val_step))


@LOSSES.row(
    "an eval_step that fails: fit, eval_step with its arguments in another order", r"\(state, batch\)", IN_YOUR_CODE
)
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), eval_step=lambda batch, state: state.apply_fn({"params": state.params}, batch[0]))


@LOSSES.row(
    "an eval_step that fails: fit, eval_step without data to evaluate", "eval_step", "test_ds", error=ValueError
)
def _(folder: Path) -> None:
    run_fit(folder, eval_step=lambda state, batch: 1.0)


@LOSSES.row(
    "a loss of other parameters: fit, the loss calls its first parameter",
    "not callable",
    r"Likely fix.*`loss_fn\(model, batch\)`",
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    run_fit(folder, loss_fn=lambda m, b: cross_entropy(m(b[0]), b[1]))


# habits of torch


for _name, _loss, _fix in [
    (
        "detach",
        lambda logits, labels: cross_entropy(logits.detach(), labels),
        r"Likely fix.*jax\.lax\.stop_gradient\(x\)",
    ),
    (
        "float",
        lambda logits, labels: cross_entropy(logits, labels) + labels.float().mean(),
        r"Likely fix.*x\.astype\(jnp\.float32\)",
    ),
    ("dim", lambda logits, labels: cross_entropy(logits, labels) + logits.argmax(dim=-1).mean(), "Likely fix.*`axis=`"),
    (
        "dim of a function",
        lambda logits, labels: cross_entropy(logits, labels) + cast(Any, jnp).mean(logits, dim=0)[0],
        "Likely fix.*`axis=`",
    ),
    (
        "keepdim",
        lambda logits, labels: cross_entropy(logits - logits.sum(-1, keepdim=True), labels),
        "Likely fix.*`keepdims=`",
    ),
]:
    LOSSES.each(
        f"a habit of torch: {_name}", _name.split()[0], _fix, IN_YOUR_CODE, styles=("fit, nnx", "TrainerModule, linen")
    )(lambda style, folder, loss=_loss: train(style, folder, loss=loss))


@LOSSES.row("targets that are a tuple, for a metric of ours: fit", "tuple", "targets", never="The model returns")
def _(folder: Path) -> None:
    data, split = {"x": X, "y": Y, "w": np.ones(16, np.float32)}, lambda batch: (batch["x"], (batch["y"], batch["w"]))
    loss = lambda logits, targets: targets[1] * optax.softmax_cross_entropy_with_integer_labels(logits, targets[0])
    run_fit(folder, None, data, loss_fn=loss, split_batch=split, metrics={"acc": Accuracy()})
