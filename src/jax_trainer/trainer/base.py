"""`BaseTrainer`: what the class of a trainer writes, the loss and hooks, and how mistaken names are found."""

import inspect
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from compoconf import RegistrableConfigInterface, register_interface
from rich.progress import track

from jax_trainer.adapters import ModelMode, calls
from jax_trainer.callbacks.hook_calls import check_hooks
from jax_trainer.callbacks.screen import progress_console
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.ranking import Direction
from jax_trainer.core import PyTree, stream, streams
from jax_trainer.engine import Edit
from jax_trainer.logger import Logger
from jax_trainer.sharding.placement import is_primary
from jax_trainer.trainer import weights

Metrics = dict[str, Any]
LOADERS = {"on_validation_epoch_end": ("val_loader",), "on_test_epoch_end": ("test_loader",)}  # parameters of hooks
FOREIGN = {  # methods of a LightningModule that a subclass may write, and the equivalent here
    "configure_optimizers": "init_optimizer",
    "configure_callbacks": "init_callbacks",
    **dict.fromkeys(("train_dataloader", "val_dataloader", "test_dataloader"), "train_model"),
    "predict_step": "predict",
    "finalize": "on_training_end",
}
FOREIGN_STEPS = dict.fromkeys(  # unless it has custom steps, which may have these names
    ("training_step", "train_step", "validation_step", "test_step"), "loss_function` or `loss_function_linen"
)
ELSEWHERE = {  # methods of Lightning and Keras that a user may call, and the equivalent here
    "fit": "Train with `train_model(train_loader, val_loader)`.",
    "test": "Test with `test_model(test_loader)`.",
    **dict.fromkeys(("validate", "evaluate"), "Evaluate with `eval_model(val_loader)`."),
    **dict.fromkeys(("log", "log_dict"), "Return metrics from the loss to log them: `return loss, {'acc': acc}`."),
    "load_state_dict": "Load with `load_model()` or `load_from_checkpoint(folder, …)`.",
    "save_checkpoint": "Save with `save_model()`.",
    "log_dir": "The run folder is `trainer.folder.path`.",
}


@register_interface
class BaseTrainer(RegistrableConfigInterface):
    """The loss and the hooks that a subclass of `TrainerModule` writes; the interface of a file's `trainer:` section.

    Callbacks are notified separately, whether a hook calls `super()` or not. A hook is called by the names of its
    parameters, in any order: `epoch` is an alias of `epoch_idx`, and `val_loader` or `test_loader` is available.
    """

    config: Any
    model_mode: ModelMode

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keeps the arguments of `__init__`, of which a run stores those of its class."""
        trainer = super().__new__(cls)
        vars(trainer)["_called_with"] = args, kwargs
        return trainer

    def batch_to_input(self, batch: Any) -> Any:
        """Returns the model inputs of a batch; a tuple is passed as several arguments."""
        raise NotImplementedError(f"{type(self).__name__} must implement `batch_to_input`, the inputs of the model.")

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> tuple[jax.Array, Metrics]:
        """Returns the loss of a model (nnx, or functions) on a batch, and a dict of metrics.

        The loss may be several, by name. With several optimizers, it is the loss of each by name; or the method has a
        parameter `optimizer`, the name of one, and returns the loss of that one.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must implement `loss_function`: the model is {self.model_mode}."
        )

    def loss_function_linen(
        self, params: PyTree, state: Any, batch: Any, rng: jax.Array, train: bool = True
    ) -> tuple[jax.Array, tuple[PyTree, Metrics]]:
        """Returns the loss of a linen model on a batch, its updated collections, and a dict of metrics."""
        raise NotImplementedError(f"{type(self).__name__} must implement `loss_function_linen` to train a linen model.")

    def model_linen_apply(
        self, params: PyTree, state: Any, input: Any, *others: Any, train: bool, rng: Any = None, **kwargs: Any
    ) -> tuple[Any, PyTree]:
        """Calls a linen model with random streams from `rng`; returns the output and the updated collections.

        Args:
            params, state: those of the loss.
            input: the input of the model; a tuple is several.
            others: further inputs; without `rng=`, the last one is the random key of the loss.
            train: whether the model is called in training mode.
            rng: the random key of the loss.
            kwargs: further arguments of the model.
        """
        inputs = (*calls.arguments(input), *others)
        if rng is None:
            *inputs, rng = inputs
        is_key = isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        if not is_key and getattr(rng, "dtype", None) != jnp.uint32:
            raise TypeError(
                "The last argument of `model_linen_apply` is not a random key. Pass that of the loss after the inputs: "
                "`model_linen_apply(params, state, x, rng, train=train)`."
            )
        return state.apply(params, *inputs, train=train, rngs=self.get_model_rng(stream(rng, "model")), **kwargs)

    def get_model_rng(self, rng: jax.Array) -> dict[str, jax.Array]:
        """The named random keys of a linen model, for initialisation and for the loss."""
        return streams(rng, "params", "dropout")

    def pre_model_init_callback(self) -> None:
        """Called before `init_model`."""

    def post_model_init_callback(self) -> None:
        """Called after `init_model`, when the state is available."""

    def on_training_start(self) -> None:
        """Called before the first step."""

    def on_training_end(self) -> None:
        """Called when training has completed, stopped or been interrupted."""

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Called at the start of an epoch; epochs count from 1."""

    def on_training_epoch_end(self, train_metrics: Metrics, epoch_idx: int) -> Edit | None:
        """Called at the end of an epoch, before its evaluation. May return an `Edit` of the state."""

    def on_validation_epoch_start(self, epoch_idx: int) -> None:
        """Called before the evaluation of the validation sets."""

    def on_validation_epoch_end(self, eval_metrics: Metrics, epoch_idx: int) -> Edit | None:
        """Called after the evaluation of all validation sets. May return an `Edit` of the state.

        Metrics added to `eval_metrics` are logged, returned, and can be monitored.
        """

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Called before the evaluation of the test sets."""

    def on_test_epoch_end(self, test_metrics: Metrics, epoch_idx: int) -> None:
        """Called after the evaluation of all test sets. Metrics added to `test_metrics` are logged and returned."""

    def is_new_model_better(self, new_metrics: Mapping[str, Any], old_metrics: Mapping[str, Any] | None) -> bool:
        """Whether the weights of one validation are better than the best so far, by the metric of `compared_by`."""
        return weights.is_better(new_metrics, old_metrics, self.compared_by(new_metrics), self.config.saver)

    def compared_by(self, metrics: Mapping[str, Any]) -> tuple[str, Direction] | None:
        """The metric that compares weights, and "min" or "max"; None if not reported.

        It is the metric that `ModelCheckpoint` monitors; without one, the first reported of `val/val_metric` (min),
        `val/acc` (max) and `val/loss` (min). Of several validation sets, the first one counts.
        """
        return weights.compared_by(metrics, self.config.saver)

    def init_logger(self, folder: RunFolder) -> Logger:
        """Creates the logger of a run in `folder`."""
        return self.config.logger.instantiate(Logger, folder.path)

    def tracker(self, iterator: Iterable[Any], **options: Any) -> Iterable[Any]:
        """`iterator` with a progress bar, if it is enabled; options: its label `desc`, and `total`.

        The primary process shows it. Further options of tqdm have no effect.
        """
        if not (self.config.enable_progress_bar and is_primary()):
            return iterator
        return track(iterator, options.get("desc", ""), options.get("total"), console=progress_console())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if isinstance(inspect.getattr_static(type(self), name, None), property | cached_property):
                return object.__getattribute__(self, name)  # raises again what the property has raised
            hint = f" {ELSEWHERE[name]}" if name in ELSEWHERE else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}.{hint}"
            raise AttributeError(text, name=name, obj=self)


def check_methods(trainer: BaseTrainer, *, has_own_step: bool) -> None:
    """Refuses unknown hooks, hooks with unknown parameters, and methods of other libraries, which are never called."""
    check_hooks(trainer, BaseTrainer, LOADERS, FOREIGN if has_own_step else {**FOREIGN, **FOREIGN_STEPS})
