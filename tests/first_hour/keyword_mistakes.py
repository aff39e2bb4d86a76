"""Mistakes with keywords and values of settings, in every style."""

from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

from jax_trainer import fit
from jax_trainer.callbacks import ModelCheckpoint
from jax_trainer.datasets import DataError
from jax_trainer.metrics import F1
from jax_trainer.styles import train_fn
from tests.first_hour.mistakes import (
    LATE,
    Net,
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
    train_step,
    val_step,
)

KEYWORDS = Table()


def _rows(mistake: str, make: Any, cases: list[tuple[str, dict[str, Any], tuple[str, ...]]], **options: Any) -> None:
    for name, changes, names in cases:
        KEYWORDS.row(f"{mistake}: {name}", *names, **options)(lambda folder, changes=changes: make(folder, changes))


# names that other libraries have

_rows(
    "a keyword of another library in fit",
    lambda folder, changes: run_fit(folder, **changes),
    [
        ("epochs", {"epochs": 3}, ("epochs", "num_epochs")),
        ("max_epochs", {"max_epochs": 3}, ("max_epochs", "num_epochs")),
        ("n_epochs", {"n_epochs": 3}, ("n_epochs", "num_epochs")),
        ("validation_data", {"validation_data": (X, Y)}, ("validation_data", "test_ds")),
        ("lr", {"lr": 0.1}, ("lr", "optimizer")),
        ("loss", {"loss": lambda a, b: 0.0}, ("loss", "loss_fn")),
        ("metrics", {"metrics": ["acc"]}, ("metrics", "metric|eval_step")),
        ("callback", {"callback": []}, ("callback", "callbacks")),
        ("verbose", {"verbose": 0}, ("verbose", "progress")),
        ("shuffle", {"shuffle": True}, ("shuffle", "fit")),
    ],
    error=TypeError,
)
_rows(
    "a keyword of another library in TrainerModule",
    lambda folder, changes: run_trainer(folder, **changes),
    [
        ("max_epochs", {"max_epochs": 3}, ("max_epochs", "train_epochs")),
        ("epochs", {"epochs": 3}, ("epochs", "train_epochs")),
        ("accumulate_grad_batches", {"accumulate_grad_batches": 2}, ("accumulate_grad_batches", "accumulate")),
        ("gradient_clip_val", {"gradient_clip_val": 1.0}, ("gradient_clip_val", "clip")),
        ("check_val_every_n_epochs", {"check_val_every_n_epochs": 1}, ("check_val_every_n_epoch`",)),
        ("devices", {"devices": 2}, ("devices", "mesh")),
        ("learning_rate", {"learning_rate": 0.1}, ("learning_rate", "optimizer")),
        ("debugg", {"debugg": True}, ("debugg", "debug")),
        ("train_epocs", {"train_epocs": 1}, ("train_epocs", "train_epochs")),
    ],
    error=TypeError,
)
_rows(
    "a keyword of another library in train_fn",
    lambda folder, changes: run_train_fn(**changes),
    [
        ("num_steps", {"num_steps": 3}, ("num_steps", "n_steps")),
        ("max_steps", {"max_steps": 3}, ("max_steps", "n_steps")),
    ],
    error=TypeError,
)
_rows(
    "a keyword of another library in TrainLoop",
    lambda folder, changes: run_loop(**changes),
    [
        ("max_steps", {"max_steps": 3}, ("max_steps", "n_steps")),
        ("seed", {"seed": 3}, ("seed", "rnkey")),
    ],
    error=TypeError,
)


# values

_rows(
    "a bad value in fit",
    lambda folder, changes: run_fit(folder, **changes),
    [
        ("num_epochs=0", {"num_epochs": 0}, ("num_epochs", "0")),
        ("num_epochs=2.5", {"num_epochs": 2.5}, ("num_epochs", "2.5")),
        ("num_epochs='3'", {"num_epochs": "3"}, ("num_epochs", "'3'")),
        ("eval_freq=0", {"eval_freq": 0}, ("eval_freq", "0")),
        ("batch_size=-8", {"batch_size": -8}, ("batch_size", "-8")),
        ("steps_per_epoch=0", {"steps_per_epoch": 0}, ("steps_per_epoch", "0")),
        ("steps_per_call='all'", {"steps_per_call": "all"}, ("steps_per_call", "all", "epoch")),
        ("mode='maximum'", {"mode": "maximum"}, ("mode", "maximum", "max")),
        (
            "metric='val/accuracy' without one",
            {"metric": "val/accuracy", "test_ds": (X, Y)},
            ("val/accuracy", "val/loss"),
        ),
        ("metric of validation without test_ds", {"metric": "val/loss"}, ("val/loss", "test_ds|train/loss")),
        ("seed='a'", {"seed": "a"}, ("seed", "'a'")),
        ("resume='yes'", {"resume": "yes"}, ("yes",)),
        ("log_name with a folder above", {"log_name": "../x"}, ("name", r"\.\.")),
        ("test_ds=0.2", {"test_ds": 0.2}, ("val", "float")),
        ("mesh with an axis of its own", {"mesh": {"foo": 8}}, ("foo", "data")),
        ("hparams with a function", {"hparams": {"act": jax.nn.relu}}, ("hparams", "act")),
        ("mesh with an unknown axis size", {"mesh": {"data": 3}}, ("data", "3", "8")),
        ("callbacks=[3]", {"callbacks": [3]}, ("callback", "int")),
        ("callbacks=['EarlyStopping']", {"callbacks": ["EarlyStopping"]}, ("callback", "EarlyStopping|str")),
    ],
)
_rows(
    "a bad value in TrainerModule",
    lambda folder, changes: run_trainer(folder, **changes),
    [
        ("train_epochs=0", {"train_epochs": 0}, ("train_epochs", "0")),
        ("train_epochs='2'", {"train_epochs": "2"}, ("train_epochs", "'2'")),
        ("train_epochs=1.5", {"train_epochs": 1.5}, ("train_epochs", "1.5")),
        ("precision='fp16'", {"precision": "fp16"}, ("precision", "fp16", "bf16")),
        ("accumulate=0", {"accumulate": 0}, ("accumulate", "0")),
        ("ema=1.5", {"ema": 1.5}, ("ema", "1.5")),
        ("seed='x'", {"seed": "x"}, ("seed", "'x'")),
        ("on_nonfinite='abort'", {"on_nonfinite": "abort"}, ("on_nonfinite", "abort", "skip")),
        ("model_mode='torch'", {"model_mode": "torch"}, ("model_mode", "torch", "linen")),
        ("model_mode of the other flavour", {"model_mode": "nnx"}, ("model_mode", "nnx", "linen")),
        ("logger=3", {"logger": 3}, ("logger", "3")),
        ("callbacks=[3]", {"callbacks": [3]}, ("callback", "int")),
        ("both a model and its configuration", {"model_config": object()}, ("model_config", "model")),
        ("no optimizer", {"optimizer": ...}, ("optimizer",)),
        ("max_time=-1", {"max_time": -1.0}, ("max_time", "-1")),
        ("val_every_n_steps=-5", {"val_every_n_steps": -5}, ("val_every_n_steps", "-5")),
        ("mesh that does not divide the devices", {"mesh": {"data": 3}}, ("3", "8")),
    ],
)
_rows(
    "a bad value in train_fn",
    lambda folder, changes: run_train_fn(**changes),
    [
        ("n_steps=0", {"n_steps": 0}, ("n_steps", "0")),
        ("n_steps=10.0", {"n_steps": 10.0}, ("n_steps", "10.0")),
        ("eval_every_n_steps=0", {"eval_every_n_steps": 0}, ("eval_every_n_steps", "0")),
        ("n_eval_batches=None", {"n_eval_batches": None}, ("n_eval_batches", "None")),
        ("hooks=3", {"hooks": 3}, ("hooks", "3|int")),
        ("hooks=[3]", {"hooks": [3]}, ("hook", "3|int")),
    ],
)
_rows(
    "a bad value in TrainLoop",
    lambda folder, changes: run_loop(**changes),
    [
        ("n_steps_per_checkpoint=0", {"n_steps_per_checkpoint": 0}, ("n_steps_per_checkpoint", "0")),
        ("n_steps='5'", {"n_steps": "5"}, ("n_steps", "'5'")),
        ("rnkey=0", {"rnkey": 0}, ("rnkey", "int|0", "jax.random.key")),
        ("collections={'train': …}", {"collections": {"train": ["dropout"]}}, ("collections", "train", "apply")),
    ],
)


@KEYWORDS.row("arguments of train_fn in other places: train_fn, the key is a number", "key", "int", error=TypeError)
def _(folder: Path) -> None:
    model = nnx_net()
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(0, model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), loader())


@KEYWORDS.row(
    "arguments of train_fn in other places: train_fn, an optax optimizer", "optimizer", "nnx.Optimizer", error=TypeError
)
def _(folder: Path) -> None:
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), nnx_net(), optax.sgd(0.1), loader())


@KEYWORDS.row(
    "arguments of train_fn in other places: train_fn, model and optimizer exchanged", "optimizer|model", error=TypeError
)
def _(folder: Path) -> None:
    model = nnx_net()
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), model, loader())


@KEYWORDS.row("arguments of train_fn in other places: train_fn, a linen model", "model", "nnx", error=TypeError)
def _(folder: Path) -> None:
    model = nnx_net()
    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), Net(), nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), loader())


@KEYWORDS.row("an optimizer of another model: train_fn, the optimizer of another model", "optimizer's update")
def _(folder: Path) -> None:
    class Other(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(4, 2, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)

    go = train_fn(fns=(train_step, val_step), n_steps=1, eval_every_n_steps=1, n_eval_batches=1)
    go(jax.random.key(0), nnx_net(), nnx.Optimizer(Other(nnx.Rngs(0)), optax.adam(0.1), wrt=nnx.Param), loader())


@KEYWORDS.row(
    "arguments of fit in other places: fit, the optimizer as the third argument",
    "test_ds",
    "optimizer",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, None, None, optax.adam(1e-3))


@KEYWORDS.row(
    "arguments of fit in other places: fit, the loss as the third argument", "val", "logits, labels", error=DataError
)
def _(folder: Path) -> None:
    run_fit(folder, None, None, cross_entropy)


@KEYWORDS.row(
    "arguments of fit in other places: fit, the loss as the fourth argument",
    "positional|keyword|loss_fn",
    error=TypeError,
)
def _(folder: Path) -> None:
    fit(Net(), (X, Y), (X, Y), cross_entropy)  # type: ignore[misc] - the mistake


@KEYWORDS.row(
    "arguments of fit in other places: fit, data before the model", "model is a tuple", "module", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, (X, Y), Net())


@KEYWORDS.row(
    "an optimizer as in a file: fit, an optimizer as in a file",
    "`optimizer`",
    "AdamWConfig",
    r"optax\.",
    never="'AdamW' of class str",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, optimizer={"class_name": "AdamW", "learning_rate": 1e-3})


@KEYWORDS.row(
    "an optimizer as in a file: TrainerModule, an optimizer where the configuration belongs",
    "config",
    "optimizer",
    error=TypeError,
)
def _(folder: Path) -> None:
    Trainer(Net(), optax.adam(1e-3), exmp_input=(X[:8], Y[:8]))


@KEYWORDS.row(
    "arguments of train_model: TrainerModule, num_epochs=0 of train_model",
    "num_epochs",
    "0",
    error=(ValueError, TypeError),
)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(loader(), num_epochs=0)


@KEYWORDS.row(
    "arguments of train_model: TrainerModule, num_epochs='3' of train_model",
    "num_epochs",
    "'3'",
    error=(ValueError, TypeError),
)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(loader(), num_epochs="3")


@KEYWORDS.row("arguments of train_model: TrainerModule, epochs of train_model", "epochs", "num_epochs", error=TypeError)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(loader(), epochs=3)


@KEYWORDS.row(
    "arguments of train_model: TrainerModule, val_loader by Lightning's name",
    "val_dataloaders",
    "val_loader",
    error=TypeError,
)
def _(folder: Path) -> None:
    make_trainer(folder).train_model(loader(), val_dataloaders=loader())


# what Lightning and Keras have, and where it is here


@KEYWORDS.row(
    "what Lightning and Keras have: TrainerModule, log_every_n_steps",
    "log_steps_every",
    never="val_every_n_steps",
    error=TypeError,
)
def _(folder: Path) -> None:
    make_trainer(folder, log_every_n_steps=1)


@KEYWORDS.row("what Lightning and Keras have: TrainerModule, default_root_dir", "`log_dir`", error=TypeError)
def _(folder: Path) -> None:
    make_trainer(folder, default_root_dir="x")


@KEYWORDS.row("what Lightning and Keras have: ModelCheckpoint, dirpath", "dirpath", "checkpoints/", error=TypeError)
def _(folder: Path) -> None:
    ModelCheckpoint(dirpath="x")


@KEYWORDS.row("what Lightning and Keras have: fit, validation_split", "validation_split", "test_ds", error=TypeError)
def _(folder: Path) -> None:
    run_fit(folder, validation_split=0.2)


for lightning, ours in {"fit": "train_model", "test": "test_model", "validate": "eval_model"}.items():
    KEYWORDS.row(
        f"what Lightning and Keras have: TrainerModule, the method {lightning}", lightning, ours, error=AttributeError
    )(lambda folder, name=lightning: getattr(make_trainer(folder), name))


for option, value in {"precision": 1, "ema": 1, "lora": 1, "clip_norm": "1", "accumulate": 0}.items():
    KEYWORDS.row(f"a wrong value of an option: fit, {option}", rf"`{option}` must be", rf"{value!r}", error=ValueError)(
        lambda folder, name=option, value=value: run_fit(folder, **{name: value})
    )


@KEYWORDS.row("an option of the program: TrainerModule, the class of a metric", r"'f1': F1\(\)", error=ValueError)
def _(folder: Path) -> None:
    make_trainer(folder, metrics={"f1": F1})


# what a result has


for _name, _get, _names in [
    ("the result by the name of a metric", lambda result: result["loss"], ("'loss'", "history")),
    (
        "the history by the name of a metric",
        lambda result: result.history["loss"],
        ("'loss'", "by epoch: 1", r"\[epoch\]\['train/loss'\]"),
    ),
    ("the history of an epoch that is not there", lambda result: result.history[0], ("0", "by epoch: 1")),
    ("Keras' name of a metric", lambda result: result.history[1]["val_loss"], ("val_loss", "`val/loss`", "train/loss")),
    ("a metric without its set", lambda result: result.history[1]["loss"], ("'loss'", "`train/loss`")),
    ("Keras' name of a metric of the best", lambda result: result.best.metrics["val_loss"], ("`val/loss`",)),
    ("a metric of an evaluation", lambda result: result.evaluate((X, Y))["loss"], ("`test/loss`",)),
]:
    KEYWORDS.row(f"metrics of a result: fit, {_name}", *_names, at=LATE)(
        lambda folder, get=_get: get(run_fit(folder, test_ds=(X, Y)))
    )


@KEYWORDS.row(
    "metrics of a result: fit, a metric of a validation that was not",
    "val/loss",
    "test_ds",
    "train/loss",
    error=KeyError,
    at=LATE,
)
def _(folder: Path) -> None:
    run_fit(folder).history[1]["val/loss"]
