"""The same small training in every style: one model, one loss, one optimizer, one order of batches.

A style is a class with two words: `train` goes to the end, from the beginning or from what an earlier training has
saved, by the style's own means; `checkpoints` are the folders that it saved.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from jax_trainer import ArrayLoader, TrainerModule, TrainState, scale_loss, testing
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.core import PyTree, model_params, stream, streams
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.logger import LoggerConfig
from jax_trainer.styles import (
    CheckpointFileReader,
    CheckpointFileWriter,
    EvalLoop,
    EvalTask,
    TrainLoop,
    TrainTask,
    fit,
    get_default_checkpointer,
    train_fn,
)
from jax_trainer.styles.checkpoints import state_of

SEED, EPOCHS, STEPS, SAVE = 5, 2, 4, 3  # STEPS of an epoch; SAVE: steps between two checkpoints
TOTAL = EPOCHS * STEPS
BAD = STEPS + 2  # the step of `SpoiltData` that is not finite


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    x = rng.standard_normal((count, 6), np.float32)
    return x, x[:, :3].argmax(-1).astype(np.int32)


def train_data() -> ArrayLoader:
    return ArrayLoader(arrays(16 * STEPS), 16, shuffle=True, seed=3)


def val_data() -> ArrayLoader:
    return ArrayLoader(arrays(20), 16)  # the last batch is smaller


def optimizer() -> optax.GradientTransformation:
    return optax.sgd(optax.cosine_decay_schedule(0.1, TOTAL), momentum=0.9)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return testing.cross_entropy(logits, labels).mean()


def failing(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (logits @ jnp.ones((99, 1))).mean()  # the line that every style must name


class LinenNet(nn.Module):
    """A model with everything that a style could treat in its own way: other state, and randomness."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(x))
        return nn.Dense(3, kernel_init=nn.initializers.ones)(x)  # more random numbers take longer to compile


class NnxNet(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.norm = nnx.Linear(6, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(8, 3, kernel_init=nnx.initializers.ones, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


class LinenLine(nn.Module):
    """A linear model from zeros: what compiles fastest."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3, kernel_init=nn.initializers.zeros)(x)


def nnx_line() -> nnx.Linear:
    """The same in nnx."""
    return nnx.Linear(6, 3, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))


def variables_of(model: nn.Module, x: Any) -> Any:
    """Variables of a linen module from numpy: to compile the usual initialisers takes longer than a training step."""
    rng = np.random.default_rng(1)

    def fill(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        drawn = rng.normal(0, 0.3, leaf.shape) if name == "kernel" else np.full(leaf.shape, name in ("scale", "var"))
        return jnp.asarray(drawn.astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0), x))


def as_tx(given: Any) -> optax.GradientTransformation:
    """The optimizer for those that take one object."""
    return Optimizers(given) if isinstance(given, dict) else given


def summed(loss: Any) -> Any:
    """The loss, or the sum of several."""
    return sum(loss.values()) if isinstance(loss, dict) else loss


class Outcome(NamedTuple):
    """What a training came to: the weights and the other state of the model, and the validation loss by step."""

    params: PyTree
    model_state: PyTree
    history: dict[int, float]


Loss = Callable[[jax.Array, jax.Array], jax.Array]


class Style:
    """One training in some style, in a folder of its own. Made anew, it knows only what is on the disk."""

    flavour: str

    def __init__(
        self,
        folder: Path,
        loss: Loss = cross_entropy,
        options: Mapping[str, Any] | None = None,
        linear: bool = False,
        epochs: int = EPOCHS,
        total: int = TOTAL,
        callbacks: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.loss, self.options, self.linear = folder, loss, dict(options or {}), linear
        self.epochs, self.total = epochs, total  # how long it trains: styles count one of them
        self.callbacks = dict(callbacks or {})  # configurations by name

    def model(self) -> Any:
        """The model to train, linear or with everything."""
        if self.flavour == "linen":
            return LinenLine() if self.linear else LinenNet()
        return nnx_line() if self.linear else NnxNet(nnx.Rngs(0))

    def optimizer(self) -> Any:
        """The optimizer, or several by name."""
        return optimizer()

    def train(self, data: Any = None, *, resume: bool = False, allow: Sequence[str] = ()) -> Outcome:
        """Trains to the end, from the beginning or from what an earlier training has saved."""
        raise NotImplementedError

    @property
    def checkpoints(self) -> list[Path]:
        """All that was saved, whatever it is for."""
        return sorted(self.folder.rglob("step_*"))


class Trainer(Style):
    """`TrainerModule`."""

    def train(self, data: Any = None, *, resume: bool = False, allow: Sequence[str] = ()) -> Outcome:
        loss = self.loss

        class Classifier(TrainerModule):
            def batch_to_input(self, batch: Any) -> Any:
                return batch[0]

            def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
                return loss(model(batch[0]), batch[1]), {}

            def loss_function_linen(self, params: Any, state: Any, batch: Any, rng: Any, train: bool = True) -> Any:
                logits, mutable = self.model_linen_apply(params, state, batch[0], rng, train=train)
                return loss(logits, batch[1]), (mutable, {})

        trainer = Classifier(
            model=self.model(),
            optimizer=self.optimizer(),
            exmp_input=next(iter(train_data())),
            seed=SEED,
            train_epochs=self.epochs,
            enable_progress_bar=False,
            logger=LoggerConfig(log_dir=str(self.folder)),
            callbacks={**self.callbacks, "ModelCheckpoint": ModelCheckpointConfig(every_n_steps=SAVE)},
            **self.options,
        )
        found = trainer.train_model(
            data or train_data(), val_data(), resume="auto" if resume else False, allow_changes=allow
        )
        history = {STEPS * epoch: found[epoch]["val/loss"] for epoch in found if isinstance(epoch, int)}
        return Outcome(model_params(trainer.state, averaged=False), trainer.state.model_state, history)


class TrainerLinen(Trainer):
    flavour = "linen"


class TrainerNnx(Trainer):
    flavour = "nnx"


class Fit(Style):
    """`fit`."""

    def subject(self) -> tuple[Any, dict[str, Any]]:
        return self.model(), {"optimizer": self.optimizer()}

    def train(self, data: Any = None, *, resume: bool = False, allow: Sequence[str] = ()) -> Outcome:
        loss = self.loss

        def loss_fn(logits: jax.Array, labels: jax.Array) -> jax.Array:
            return loss(logits, labels)

        subject, options = self.subject()
        result = fit(
            subject,
            data or train_data(),
            val_data(),
            loss_fn=loss_fn,
            num_epochs=self.epochs,
            seed=SEED,
            log_dir=str(self.folder),
            callbacks={**self.callbacks, "ModelCheckpoint": ModelCheckpointConfig(every_n_steps=SAVE)},
            tensorboard=False,
            progress=False,
            resume="auto" if resume else False,
            allow_changes=allow,
            **self.options,
            **options,
        )
        history = {STEPS * epoch: metrics["val/loss"] for epoch, metrics in result.history.items()}
        return Outcome(model_params(result.state, averaged=False), result.state.model_state, history)


class FitState(Fit):
    flavour = "linen"

    def subject(self) -> tuple[Any, dict[str, Any]]:
        model, key = self.model(), jax.random.key(SEED)
        init = jax.jit(lambda key, x: model.init(streams(stream(key, "init"), "params", "dropout"), x))
        # compiled, as others do it: a GPU rounds differently without
        variables = init(key, next(iter(train_data()))[0])
        return TrainState.create(apply_fn=model.apply, **variables, tx=as_tx(self.optimizer()), rng=key), {}


class FitLinen(Fit):
    flavour = "linen"


class FitNnx(Fit):
    flavour = "nnx"


class TrainFn(Style):
    """`train_fn`."""

    flavour = "nnx"

    def train(self, data: Any = None, *, resume: bool = False, allow: Sequence[str] = ()) -> Outcome:
        loss, history = self.loss, {}

        def loss_fn(model: Any, batch: Any) -> jax.Array:
            return scale_loss(loss(model(batch[0]), batch[1]))  # of f16; otherwise it is the loss

        def train_step(model: Any, rng_key: jax.Array, batch: Any, of: Any = loss_fn) -> Any:
            return nnx.value_and_grad(of)(model, batch)

        def val_step(model: Any, rng_key: jax.Array, batch: Any) -> jax.Array:
            return summed(loss_fn(model, batch))

        tx: Any = self.optimizer()
        made: Any = as_tx(tx)
        steps: Any = train_step
        if isinstance(tx, dict) and made.joint is False:  # a step for each, of the loss of its name
            losses = {name: lambda model, batch, name=name: loss_fn(model, batch)[name] for name in tx}
            steps = {name: partial(train_step, of=one) for name, one in losses.items()}

        def remember(step: int, *, model: Any, metrics: Any, **kwargs: Any) -> None:
            history[step] = metrics["val/loss"]

        remember.every_n_steps = STEPS  # type: ignore[attr-defined]
        save, _, restore_last = get_default_checkpointer(str(self.folder), save_every_n_steps=SAVE)
        model = self.model()
        updater = nnx.Optimizer(model, made, wrt=nnx.Param)
        if resume:
            restore_last(model, updater)
        options = {"n_steps": self.total, "eval_every_n_steps": STEPS, "n_eval_batches": 2, "progress": False}
        options |= {**self.options, "callbacks": self.callbacks, "allow_changes": allow}
        train = train_fn(fns=(steps, val_step), hooks=[remember, save], **options)
        train(jax.random.key(SEED), model, updater, data or train_data(), val_data())
        _, params, _, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return Outcome(nnx.to_pure_dict(params), nnx.to_pure_dict(rest), history)


class Loop(Style):
    """`TrainLoop`."""

    flavour = "linen"

    def train(self, data: Any = None, *, resume: bool = False, allow: Sequence[str] = ()) -> Outcome:
        model, key, names = self.model(), jax.random.key(SEED), {"init": ["params", "dropout"], "apply": ["dropout"]}
        init = CheckpointFileReader(dir=str(self.folder), target=model.init) if resume else model.init
        of: Any = self.loss
        loss: Any = lambda *values: of(values[0] if len(values) == 2 else values[:-1], values[-1])
        task = TrainTask(apply=model.apply, optimizer=self.optimizer(), loss=loss, data=data or train_data())
        loop = TrainLoop(
            init=init,
            task=task,
            rnkey=key,
            collections=names,
            n_steps=self.total,
            n_steps_per_checkpoint=1,
            stdout=False,
            callbacks=self.callbacks,
            allow_changes=allow,
            **self.options,
        )
        metrics: Any = {"loss": lambda *values: summed(loss(*values))}
        evaluate = EvalLoop(task=EvalTask(apply=model.apply, metrics=metrics, data=val_data()), n_steps=2)
        write, history, last = CheckpointFileWriter(output_dir=str(self.folder)), {}, None
        for last in loop:
            if last.step % STEPS == 0:
                history[last.step] = evaluate(last).metrics["eval"]["loss"]
            if last.step % SAVE == 0 or last.step == self.total:
                write(last)
        if last is None:  # of a finished run there is no step to take
            state = loop._steps._progress.state
            return Outcome(model_params(state, averaged=False), state.model_state, history)
        return Outcome(model_params(state_of(last), averaged=False), last.model_state, history)


STYLES: dict[str, type[Style]] = {
    "TrainerModule, linen": TrainerLinen,
    "TrainerModule, nnx": TrainerNnx,
    "fit, a state": FitState,
    "fit, linen": FitLinen,
    "fit, nnx": FitNnx,
    "train_fn": TrainFn,
    "TrainLoop": Loop,
}


class InterruptedData:
    """The same data, with a Ctrl-C as soon as the first checkpoint is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._loader, self._folder = train_data(), folder

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(1)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch; that after the first checkpoint may be made ahead, and comes when that is there."""
        for index, batch in enumerate(self._loader.epoch(number, start), start):
            if (number, index) == (1, SAVE):
                wait_for(lambda: any("MANIFEST.json" in files for _, files in saved_in(self._folder)))
                signal.raise_signal(signal.SIGINT)
            yield batch


class SpoiltData:
    """The same data, with a number in step `BAD` that is not finite."""

    def __init__(self) -> None:
        self._loader = train_data()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(1)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch."""
        for index, (x, y) in enumerate(self._loader.epoch(number, start), start):
            is_bad = (number - 1) * STEPS + index + 1 == BAD
            yield (np.full_like(x, np.nan) if is_bad else x, y)


def saved_in(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The checkpoints so far, and their files; by `os.walk`, which does not mind what vanishes meanwhile."""
    return ((path, files) for path, _, files in os.walk(folder) if Path(path).name.startswith("step_"))


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
