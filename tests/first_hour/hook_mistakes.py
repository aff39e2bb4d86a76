"""Mistakes in hooks and callbacks."""

from pathlib import Path
from typing import Any, cast

from jax_trainer.callbacks import (
    Callback,
    EarlyStopping,
    EarlyStoppingConfig,
    JAXProfiler,
    LambdaCallback,
    ModelCheckpointConfig,
)
from tests.first_hour.mistakes import (
    IN_YOUR_CODE,
    LATE,
    STEP,
    Table,
    Trainer,
    X,
    Y,
    loader,
    run_fit,
    run_train_fn,
    run_trainer,
)

HOOKS = Table()


def own_trainer(**methods: Any) -> Any:
    return type("Own", (Trainer,), methods)


def own_callback(**methods: Any) -> Any:
    return type("CallbackList", (Callback,), methods)()


@HOOKS.row(
    "a hook that does not exist: TrainerModule, a hook of Lightning", "on_train_epoch_end", "on_training_epoch_end"
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=own_trainer(on_train_epoch_end=lambda self: None))


@HOOKS.row(
    "a hook that does not exist: TrainerModule, a misspelt hook", "on_training_epoch_ned", "on_training_epoch_end"
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=own_trainer(on_training_epoch_ned=lambda self, train_metrics, epoch_idx: None))


@HOOKS.row(
    "a hook of other parameters: TrainerModule, a hook with another parameter",
    "train_metrics",
    "batch_idx",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=own_trainer(on_training_epoch_end=lambda self, train_metrics, epoch_idx, batch_idx: None))


@HOOKS.row(
    "a hook that does not exist: a callback with a hook of Lightning", "on_train_epoch_end", "on_training_epoch_end"
)
def _(folder: Path) -> None:
    run_trainer(folder, callbacks=[own_callback(on_train_epoch_end=lambda self, trainer, pl_module: None)])


@HOOKS.row(
    "a hook that does not exist: fit, a callback with a misspelt hook",
    "on_validation_epoch_edn",
    "on_validation_epoch_end",
)
def _(folder: Path) -> None:
    run_fit(folder, callbacks=[own_callback(on_validation_epoch_edn=lambda self, eval_metrics, epoch_idx: None)])


@HOOKS.row("a hook that does not exist: fit, a callback with a hook of Keras", "on_epoch_end", "on_training_epoch_end")
def _(folder: Path) -> None:
    run_fit(folder, callbacks=[own_callback(on_epoch_end=lambda self, epoch, logs=None: None)])


@HOOKS.row("a hook that fails: TrainerModule, a hook that fails", "boom", IN_YOUR_CODE, error=RuntimeError, at=LATE)
def _(folder: Path) -> None:
    def on_training_epoch_end(self: Any, train_metrics: Any, epoch_idx: int) -> None:
        raise RuntimeError("boom")

    run_trainer(folder, kind=own_trainer(on_training_epoch_end=on_training_epoch_end))


@HOOKS.row("a hook that fails: fit, a callback that fails", "boom", IN_YOUR_CODE, error=RuntimeError, at=LATE)
def _(folder: Path) -> None:
    def on_training_epoch_end(self: Any, train_metrics: Any, epoch_idx: int) -> None:
        raise RuntimeError("boom")

    run_fit(folder, callbacks=[own_callback(on_training_epoch_end=on_training_epoch_end)])


@HOOKS.row("a hook that fails: train_fn, a hook that fails", "boom", IN_YOUR_CODE, error=RuntimeError, at=LATE)
def _(folder: Path) -> None:
    def hook(step: int, **kwargs: Any) -> None:
        raise RuntimeError("boom")

    run_train_fn(hooks=[hook])


@HOOKS.row("a hook of other parameters: train_fn, a hook of other parameters", "hook", "step", error=TypeError)
def _(folder: Path) -> None:
    run_train_fn(hooks=[lambda: None])


@HOOKS.row("a hook of other parameters: train_fn, a hook that takes the step alone", "hook", "model", error=TypeError)
def _(folder: Path) -> None:
    run_train_fn(hooks=[lambda step: None])


@HOOKS.row("something else instead of a hook: train_fn, a hook that is called", "hook", "None", error=TypeError)
def _(folder: Path) -> None:
    run_train_fn(hooks=[None])


@HOOKS.row(
    "something else instead of a hook: train_fn, a hook every 0 steps",
    "every_n_steps",
    "0",
    error=(ValueError, TypeError),
)
def _(folder: Path) -> None:
    def hook(step: int, **kwargs: Any) -> None: ...

    hook.every_n_steps = 0  # type: ignore[attr-defined] - the mistake
    run_train_fn(hooks=[hook])


@HOOKS.row(
    "something else instead of a callback: a callback's class instead of one",
    "CallbackList",
    "class|object|instance",
    error=TypeError,
)
def _(folder: Path) -> None:
    class CallbackList(Callback):
        pass

    run_fit(folder, callbacks=[CallbackList])


@HOOKS.row("a monitor that is not reported: EarlyStopping of a metric that is not there", "val/accuracy", "val/loss")
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), callbacks=[EarlyStoppingConfig(monitor="val/accuracy", mode="max")])


@HOOKS.row(
    "a monitor that is not reported: EarlyStopping of a metric of validation without validation", "val/loss", at=STEP
)
def _(folder: Path) -> None:
    run_fit(folder, callbacks=[EarlyStoppingConfig(monitor="val/loss")])


@HOOKS.row(
    "a monitor that is not reported: TrainerModule, EarlyStopping of a metric that is not there",
    "val/accuracy",
    "val/loss",
)
def _(folder: Path) -> None:
    run_trainer(folder, val=loader(), callbacks=[EarlyStoppingConfig(monitor="val/accuracy", mode="max")])


@HOOKS.row(
    "a monitor that is not reported: TrainerModule, ModelCheckpoint of a metric that is not there",
    "val/acc",
    "val/loss",
)
def _(folder: Path) -> None:
    run_trainer(folder, val=loader(), callbacks=[ModelCheckpointConfig(monitor="val/acc", mode="max")])


@HOOKS.row("a monitor that is not reported: EarlyStopping of a name that auto does not know", "val/my_score", "mode")
def _(folder: Path) -> None:
    EarlyStoppingConfig(monitor="val/my_score")
    loss = lambda logits, labels: (logits.mean() ** 2, {"my_score": logits.mean()})
    run_fit(folder, test_ds=(X, Y), loss_fn=loss, callbacks=[EarlyStoppingConfig(monitor="val/my_score")])


@HOOKS.row("a bad value of a callback: EarlyStopping with a negative patience", "patience", "-1")
def _(folder: Path) -> None:
    EarlyStoppingConfig(monitor="val/loss", patience=-1)
    run_fit(folder, test_ds=(X, Y), callbacks=[EarlyStoppingConfig(monitor="val/loss", patience=-1)])


@HOOKS.row("a bad value of a callback: ModelCheckpoint with a mode that is none", "mode", "maximum", "max")
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), callbacks=[ModelCheckpointConfig(monitor="val/loss", mode=cast("Any", "maximum"))])


@HOOKS.row("a bad value of a callback: a callback with an unknown keyword", "moniter", "monitor", error=TypeError)
def _(folder: Path) -> None:
    EarlyStoppingConfig(**cast("Any", {"moniter": "val/loss"}))


# callbacks that are none, or not finished


@HOOKS.row(
    "something else instead of a callback: a callback of no class of ours",
    "CallbackList",
    r"jax_trainer\.Callback",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, callbacks=[cast(Any, type("CallbackList", (), {})())])


@HOOKS.row(
    "something else instead of a callback: the name of a callback in a list",
    "'EarlyStopping'",
    r"callbacks=\{'EarlyStopping': \{\}\}",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, callbacks=cast(Any, ["EarlyStopping"]))


@HOOKS.row(
    "something else instead of a callback: a function as a callback", "function", "LambdaCallback", error=TypeError
)
def _(folder: Path) -> None:
    run_fit(folder, callbacks=cast(Any, [lambda epoch: None]))


@HOOKS.row(
    "a hook that does not exist: LambdaCallback, a hook of Keras",
    "on_epoch_end",
    "on_training_epoch_end",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_fit(folder, callbacks=[LambdaCallback(on_epoch_end=lambda epoch: None)])


@HOOKS.row(
    "an __init__ that does not call super: a callback whose __init__ does not call super",
    r"super\(\).__init__",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, callbacks=[own_callback(__init__=lambda self: None)])


@HOOKS.row(
    "an __init__ that does not call super: a trainer whose __init__ does not call super",
    r"super\(\).__init__",
    error=TypeError,
)
def _(folder: Path) -> None:
    run_trainer(folder, kind=own_trainer(__init__=lambda self, **parts: None))


@HOOKS.row(
    "a monitor that is not reported: TrainerModule, an object that monitors what is not there", "val_loss", "val/loss"
)
def _(folder: Path) -> None:
    run_trainer(folder, val=loader(), callbacks=[EarlyStopping(monitor="val_loss")])


@HOOKS.row("a monitor that is not reported: fit, an object that monitors what is not there", "val_loss", "val/loss")
def _(folder: Path) -> None:
    run_fit(folder, test_ds=(X, Y), callbacks=[EarlyStopping(monitor="val_loss")])


for _kind, _key in {EarlyStopping: r"\(monitor='val/loss'\)", JAXProfiler: r"\(every_n_epochs=…\)"}.items():
    HOOKS.row(
        f"a positional argument of a callback: {_kind.__name__}", "val/loss", _kind.__name__ + _key, error=TypeError
    )(lambda folder, kind=_kind: kind(cast(Any, "val/loss"), 3))
