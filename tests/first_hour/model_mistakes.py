"""Mistakes with models and optimizers."""

from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer import TrainState, get_ema_hook
from jax_trainer.styles import train_fn
from tests.first_hour.mistakes import (
    IN_YOUR_CODE,
    LATE,
    STYLES,
    Net,
    Nnx,
    Table,
    Trainer,
    X,
    Y,
    cross_entropy,
    loader,
    make_trainer,
    nnx_net,
    run_fit,
    run_loop,
    run_train_fn,
    run_trainer,
    train,
    train_step,
    val_step,
)

MODELS = Table()
UPDATING = tuple(style for style in STYLES if style != "train_fn")  # whose nnx.Optimizer is made by the user
LINEN = ("fit, linen", "TrainerModule, linen", "TrainLoop")
NNX = ("fit, nnx", "TrainerModule, nnx", "train_fn")


def _optimizer(style: str, folder: Path, tx: Any) -> None:
    if style == "fit":
        run_fit(folder, optimizer=tx)
    elif style == "TrainerModule":
        run_trainer(folder, optimizer=tx)
    else:
        run_loop(optimizer=tx)


for _style in ("fit", "TrainerModule", "TrainLoop"):
    for _name, _tx, _names in [
        ("optax.adam without a call", optax.adam, ("optimizer", "optax.adam", r"optax\.adam\(")),
        ("a learning rate as the optimizer", 1e-3, ("optimizer", "float", "optax")),
        ("the name of an optimizer", "adam", ("optimizer", "str", "optax")),
        ("a schedule as the optimizer", optax.cosine_decay_schedule(0.1, 10), ("optimizer", "optax")),
        ("None as the optimizer", None, ("optimizer",)),
    ]:
        MODELS.row(f"something else instead of an optimizer: {_style}, {_name}", *_names, error=TypeError)(
            lambda folder, style=_style, tx=_tx: _optimizer(style, folder, tx)
        )


@MODELS.row("an optimizer of torch: fit, an optimizer of torch", "optimizer", "torch|Adam", "optax", error=TypeError)
def _(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    run_fit(folder, optimizer=torch.optim.Adam([torch.zeros(1)]))


@MODELS.row(
    "an optimizer of torch: TrainerModule, an optimizer of torch", "optimizer", "torch|Adam", "optax", error=TypeError
)
def _(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    run_trainer(folder, optimizer=torch.optim.Adam([torch.zeros(1)]))


@MODELS.row(
    "something else instead of an optimizer: fit, a list of optimizers",
    "optimizer",
    "list",
    "optax.chain|optax",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, optimizer=[optax.clip(1.0), optax.adam(1e-3)])


@MODELS.each(
    "labels of an optimizer that do not fit: an optimizer whose mask has other keys",
    "optimizer",
    "nothing",
    styles=UPDATING,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, tx=optax.masked(optax.sgd(0.1), {"nothing": True}))


@MODELS.each(
    "labels of an optimizer that do not fit: labels of multi_transform that have no optimizer",
    "slow",
    "fast",
    "optimizer",
    styles=UPDATING,
)
def _(style: str, folder: Path) -> None:
    labels = lambda params: jax.tree.map(lambda _: "slow", params)
    train(style, folder, tx=optax.multi_transform({"fast": optax.sgd(0.1)}, labels))


@MODELS.row("a state of another model: fit, a state and an optimizer", "optimizer", "tx", error=TypeError)
def _(folder: Path) -> None:
    params = Net().init(jax.random.key(0), X[:1])["params"]
    run_fit(folder, TrainState.create(apply_fn=Net().apply, params=params, tx=optax.sgd(0.1)))


@MODELS.row(
    "a state of another model: fit, a state whose params are all variables",
    "params",
    IN_YOUR_CODE + "|variables|kernel",
)
def _(folder: Path) -> None:
    variables = Net().init(jax.random.key(0), X[:1])
    state = TrainState.create(apply_fn=Net().apply, params=variables, tx=optax.sgd(0.1))
    run_fit(folder, state, optimizer=None)


@MODELS.row("a state of another model: fit, a state of another width", r"float32\[8, ?4\]", "5")
def _(folder: Path) -> None:
    params = Net().init(jax.random.key(0), np.ones((1, 5)))["params"]
    run_fit(folder, TrainState.create(apply_fn=Net().apply, params=params, tx=optax.sgd(0.1)), optimizer=None)


# models


@MODELS.row("the class of a model: fit, the class of a linen model", "Net", r"Net\(", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, Net)


@MODELS.row("the class of a model: fit, the class of an nnx model", "Nnx", r"Nnx\(", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, Nnx)


@MODELS.row("the class of a model: TrainerModule, the class of a linen model", "Net", r"Net\(", error=TypeError)
def _(folder: Path) -> None:
    make_trainer(folder, model=Net)


@MODELS.row(
    "a function that builds no model: TrainerModule, a class that builds without rngs", "rngs", "Plain", error=TypeError
)
def _(folder: Path) -> None:
    class Plain(nnx.Module):
        def __init__(self, width: int, depth: int) -> None:
            self.width = width

    run_trainer(folder, model=Plain)


@MODELS.row(
    "a function that builds no model: TrainerModule, a function that builds no module",
    "build",
    "dict",
    "nnx",
    error=TypeError,
)
def _(folder: Path) -> None:
    def build(rngs: nnx.Rngs) -> Any:
        return {}

    run_trainer(folder, model=build)


@MODELS.row(
    "a function that builds no model: TrainerModule, a function that builds a linen module",
    "build",
    "Net",
    error=TypeError,
)
def _(folder: Path) -> None:
    def build(rngs: nnx.Rngs) -> Any:
        return Net()

    run_trainer(folder, model=build)


def _torch() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Linear(4, 3)


@MODELS.row("a model of torch: fit, a torch model", "torch|Linear", "linen|nnx", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, _torch())


@MODELS.row("a model of torch: TrainerModule, a torch model", "torch|Linear", "linen|nnx", error=TypeError)
def _(folder: Path) -> None:
    run_trainer(folder, model=_torch())


@MODELS.row(
    "something else instead of a model: fit, the parameters of a model", "dict", "linen|nnx|state", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, Net().init(jax.random.key(0), X[:1]))


@MODELS.row("something else instead of a model: fit, apply instead of the module", "linen|nnx", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, Net().apply)


@MODELS.row(
    "something else instead of a model: TrainerModule, apply instead of the module", "linen|nnx", error=TypeError
)
def _(folder: Path) -> None:
    run_trainer(folder, model=Net().apply)


@MODELS.row(
    "something else instead of a model: TrainerModule, the name of a model", "str", "linen|nnx", error=TypeError
)
def _(folder: Path) -> None:
    make_trainer(folder, model="MLP")


@MODELS.row("something else instead of a model: TrainerModule, no model", "model", error=TypeError)
def _(folder: Path) -> None:
    make_trainer(folder, model=...)


class Silent(nn.Module):
    """Forgets to return."""

    @nn.compact
    def __call__(self, x: jax.Array) -> None:
        nn.Dense(3)(x)


class Forgetful(nnx.Module):
    """Forgets to return, too."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> None:
        self.out(x)


@MODELS.each("a model that returns something else: a model that returns nothing", "None|returned nothing", IN_YOUR_CODE)
def _(style: str, folder: Path) -> None:
    train(style, folder, linen=Silent(), nnx_model=Forgetful(nnx.Rngs(0)))


class Several(nn.Module):
    """Returns two things."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return nn.Dense(3)(x), x


@MODELS.row("a model that returns something else: fit, a model that returns two things", "tuple", IN_YOUR_CODE)
def _(folder: Path) -> None:
    run_fit(folder, Several())


class Undecorated(nn.Module):
    """Without `nn.compact`."""

    def __call__(self, x: jax.Array) -> Any:
        return nn.Dense(3)(x)


@MODELS.each(
    "a linen model without nn.compact",
    "compact",
    IN_YOUR_CODE,
    styles=LINEN,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, linen=Undecorated())


class Hungry(nn.Module):
    """Wants two inputs."""

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> Any:
        return nn.Dense(3)(x) * mask


@MODELS.each(
    "a linen model that wants more: a linen model that wants more inputs",
    "mask",
    r"float32\[8, ?4\]",
    styles=LINEN,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, linen=Hungry())


class Noisy(nn.Module):
    """Requires a random stream that is not provided."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return nn.Dense(3)(x) + jax.random.normal(self.make_rng("noise"), (3,))


@MODELS.each(
    "a linen model that wants more: a linen model that asks for a random stream of its own",
    "noise",
    IN_YOUR_CODE,
    styles=("fit, linen", "TrainLoop"),
)
def _(style: str, folder: Path) -> None:
    train(style, folder, linen=Noisy())


class Torchlike(nnx.Module):
    """As in torch: `forward`, and no `__call__`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(4, 3, rngs=rngs)

    def forward(self, x: jax.Array) -> Any:
        return self.out(x)


@MODELS.each(
    "an nnx model with forward instead of __call__",
    "Torchlike",
    "__call__|callable",
    styles=NNX,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, nnx_model=Torchlike(nnx.Rngs(0)))


class Frozen(nnx.Module):
    """Without any parameter."""

    def __call__(self, x: jax.Array) -> Any:
        return x[:, :3]


@MODELS.each("an nnx model without parameters", "parameter", styles=NNX)
def _(style: str, folder: Path) -> None:
    train(style, folder, nnx_model=Frozen())


@MODELS.row(
    "a function that builds no model: TrainerModule, a builder that fails", "boom", IN_YOUR_CODE, error=RuntimeError
)
def _(folder: Path) -> None:
    def build(rngs: nnx.Rngs) -> Any:
        raise RuntimeError("boom")

    run_trainer(folder, model=build)


@MODELS.row(
    "a method of the trainer that fails or returns nothing: TrainerModule, batch_to_input that fails",
    "IndexError|out of range",
    IN_YOUR_CODE,
    error=IndexError,
)
def _(folder: Path) -> None:
    class Own(Trainer):
        def batch_to_input(self, batch: Any) -> Any:
            return batch[5]

    run_trainer(folder, kind=Own)


@MODELS.row("an optimizer of another model: train_fn, wrt of nothing", "parameter", "BatchStat")
def _(folder: Path) -> None:

    model = nnx_net()
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.BatchStat), loader())


@MODELS.row("arguments of train_fn in other places: train_fn, a model class", "nnx.Module|Module", error=TypeError)
def _(folder: Path) -> None:

    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), Nnx, nnx.Optimizer(nnx_net(), optax.adam(0.1), wrt=nnx.Param), loader())


@MODELS.row(
    "functions of a TrainLoop: TrainLoop, the module instead of its init",
    "init",
    "Net",
    r"model\.init",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_loop(init=Net())


@MODELS.row("functions of a TrainLoop: TrainLoop, the module instead of its apply", r"model\.apply", error=TypeError)
def _(folder: Path) -> None:
    run_loop(apply=Net())


@MODELS.row("no function as the loss: TrainLoop, the loss is not a function", "loss", "str", error=TypeError)
def _(folder: Path) -> None:
    run_loop(loss="mse")


@MODELS.row("functions of a TrainLoop: TrainLoop, not a task", "task", "TrainTask", error=TypeError)
def _(folder: Path) -> None:
    run_loop(task={"apply": Net().apply})


class Flagless(nn.Module):
    """Layers with a training mode that is not set."""

    layer: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return nn.Dense(3)(self.layer()(x))


@MODELS.each(
    "a layer without its training mode: BatchNorm without its training mode",
    "use_running_average=not train",
    IN_YOUR_CODE,
    styles=LINEN,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, linen=Flagless(nn.BatchNorm))


@MODELS.each(
    "a layer without its training mode: Dropout without its training mode",
    "deterministic=not train",
    IN_YOUR_CODE,
    styles=LINEN,
)
def _(style: str, folder: Path) -> None:
    train(style, folder, linen=Flagless(lambda: nn.Dropout(0.5)))


class Dropping(nnx.Module):
    """A Dropout without random streams."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out, self.dropout = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5)

    def __call__(self, x: jax.Array) -> Any:
        return self.out(self.dropout(x))


@MODELS.each("an nnx Dropout without rngs", "rngs=rngs", IN_YOUR_CODE, styles=NNX)
def _(style: str, folder: Path) -> None:
    train(style, folder, nnx_model=Dropping(nnx.Rngs(0)))


@MODELS.row(
    "a method of the trainer that fails or returns nothing: TrainerModule, init_optimizer that returns nothing",
    "init_optimizer",
    "None",
    "optax",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=type("Own", (Trainer,), {"init_optimizer": lambda self, num_epochs, steps: None}))


@MODELS.row("functions of a TrainLoop: TrainLoop, a number of devices", "devices", "jax.devices", error=TypeError)
def _(folder: Path) -> None:
    run_loop(devices=2)


@MODELS.row("a state of another model: fit, a state whose apply_fn is the module", r"model\.apply", r"float32\[8, ?4\]")
def _(folder: Path) -> None:
    params = Net().init(jax.random.key(0), X[:1])["params"]
    run_fit(folder, TrainState.create(apply_fn=Net(), params=params, tx=optax.sgd(0.1)), optimizer=None)


@MODELS.row(
    "a state of another model: fit, a state with an optimizer that was not called",
    "optimizer",
    r"optax\.adam\(",
    error=AttributeError,
)
def _(folder: Path) -> None:
    params = Net().init(jax.random.key(0), X[:1])["params"]
    TrainState.create(apply_fn=Net().apply, params=params, tx=cast("Any", optax.adam))


class Normed(nn.Module):
    """Three classes, with statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(x))


@MODELS.row(
    "what linen's apply takes and returns: TrainerModule, the statistics of BatchNorm are left out",
    "batch_stats",
    "never be updated",
    "mutable_variables",
)
def _(folder: Path) -> None:
    class Own(Trainer):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            logits, _ = self.model_linen_apply(params, state, batch[0], rng, train=train)
            return cross_entropy(logits, batch[1]), ({}, {})

    run_trainer(folder, kind=Own, model=Normed())


@MODELS.row(
    "what linen's apply takes and returns: TrainerModule, apply without the statistics of BatchNorm",
    r'"batch_stats": …',
    "mutable=",
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    class Own(Trainer):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            return cross_entropy(Normed().apply({"params": params}, batch[0], train=train), batch[1]), ({}, {})

    run_trainer(folder, kind=Own, model=Normed())


@MODELS.row(
    "what linen's apply takes and returns: TrainerModule, apply without the keys of Dropout",
    r'rngs=\{"dropout": rng\}',
    IN_YOUR_CODE,
)
def _(folder: Path) -> None:
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
            return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))

    class Own(Trainer):
        def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
            return cross_entropy(Dropped().apply({"params": params}, batch[0], train=train), batch[1]), ({}, {})

    run_trainer(folder, kind=Own, model=Dropped())


@MODELS.each(
    "axes of images: a convolution is not flattened", "axes than", "reshape", styles=("fit, linen", "TrainLoop")
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(np.ones((16, 4, 4, 1), np.float32)), linen=nn.Conv(3, (2, 2)))


@MODELS.row(
    "something else instead of a model: fit, a module that is bound to variables",
    "Net is bound",
    "TrainState.create",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, Net().bind(Net().init(jax.random.key(0), X[:1])))


@MODELS.row("a state of another model: fit, a state whose params are all collections", r'variables\["params"\]')
def _(folder: Path) -> None:
    state = TrainState.create(apply_fn=Net().apply, params=Net().init(jax.random.key(0), X[:1]), tx=optax.sgd(0.1))
    run_fit(folder, state, optimizer=None)


@MODELS.row("a linen model that wants more: fit, a model with another parameter", "`train`", "default")
def _(folder: Path) -> None:
    class Wide(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, width: int) -> jax.Array:
            return nn.Dense(width)(x)

    run_fit(folder, Wide())


@MODELS.row(
    "predictions for something else: fit, predictions for more arrays than inputs and targets",
    "tuple of 3",
    "inputs",
    at=LATE,
)
def _(folder: Path) -> None:
    run_fit(folder).predict((X, X, X))


@MODELS.row(
    "predictions for something else: fit, predictions for one example", r"\(4,\)", r"\[n, 4\]", r"`x\[None\]`", at=LATE
)
def _(folder: Path) -> None:
    run_fit(folder).predict(X[0])


@MODELS.row(
    "predictions for something else: fit, predictions for one example of a dict",
    r"\(4,\)",
    r"\[n, 4\]",
    r"`x\[None\]`",
    at=LATE,
)
def _(folder: Path) -> None:
    run_fit(folder).predict({"x": X[0]})


class Convolution(nnx.Module):
    """Three classes, of images with this number of channels."""

    def __init__(self, channels: int) -> None:
        self.conv = nnx.Conv(channels, 3, (3, 3), rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x).mean((1, 2))


class LinenConvolution(nn.Module):
    """Three classes, of images with any number of channels."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return nn.Dense(3)(nn.Conv(4, (3, 3))(x).mean((1, 2)))


@MODELS.each(
    "axes of images: images without an axis of channels", "channels", r"`x\[\.\.\., None\]`", IN_YOUR_CODE, styles=NNX
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(np.zeros((16, 6, 6), np.float32)), nnx_model=Convolution(1))


@MODELS.each(
    "axes of images: channels before height and width", r"`x\.transpose\(0, 2, 3, 1\)`", IN_YOUR_CODE, styles=NNX
)
def _(style: str, folder: Path) -> None:
    train(style, folder, data=loader(np.zeros((16, 3, 6, 6), np.float32)), nnx_model=Convolution(3))


@MODELS.row(
    "axes of images: fit linen, images without an axis of channels",
    r"\(3,\)",
    "8 examples",
    r"`x\[\.\.\., None\]`",
    never="squeeze",
)
def _(folder: Path) -> None:
    run_fit(folder, LinenConvolution(), (np.zeros((16, 6, 6), np.float32), Y))


@MODELS.each("a learning rate of text", "optimizer's update", r"optax\.adam\(1e-3\)", "strings")
def _(style: str, folder: Path) -> None:
    train(style, folder, tx=optax.adam(cast(Any, "1e-3")))


@MODELS.row(
    "an optimizer of another model: train_fn, an optimizer of a model with other shapes",
    "optimizer's update",
    "parameters of this model",
)
def _(folder: Path) -> None:
    other = nnx.Linear(4, 9, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(other, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1, progress=False)
    go(jax.random.key(0), nnx.Linear(4, 3, rngs=nnx.Rngs(0)), optimizer, loader(), None)


@MODELS.row(
    "arguments of train_fn in other places: train_fn, model and optimizer swapped",
    r"train\(key, model, optimizer",
    error=TypeError,
)
def _(folder: Path) -> None:
    model = nnx_net()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1, progress=False)
    go(jax.random.key(0), optimizer, model, loader(), None)


@MODELS.row("an optimizer of another model: train_fn, the average of another model", "b.*9", error=ValueError)
def _(folder: Path) -> None:
    other = Nnx(nnx.Rngs(0))
    other.out = nnx.Linear(4, 9, rngs=nnx.Rngs(0))
    run_train_fn(hooks=[get_ema_hook(other)[0]])


@MODELS.row(
    "an optimizer of another model: get_ema_hook, an optimizer instead of the model",
    "nnx.Module",
    "Optimizer",
    error=TypeError,
)
def _(folder: Path) -> None:
    get_ema_hook(cast(Any, nnx.Optimizer(nnx_net(), optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)))


@MODELS.row("functions of a TrainLoop: TrainLoop, an nnx module", "nnx", "train_fn", error=TypeError)
def _(folder: Path) -> None:
    run_loop(apply=nnx_net(), init=Nnx)


@MODELS.row(
    "functions of a TrainLoop: TrainLoop, variables instead of init",
    r"model\.init",
    "a dict",
    never="Array",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_loop(init=Net().init(jax.random.key(0), X[:1]))
