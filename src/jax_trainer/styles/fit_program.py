"""Converts the `model` of `fit` (a state, a module, functions, a program) and its loss to a `Program`."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from compoconf import ConfigInterface

from jax_trainer.adapters import ModelHandle, handle_of
from jax_trainer.adapters.handle import ModelHooks
from jax_trainer.adapters.nnx import optax_of
from jax_trainer.core import Batch, Program, TrainState, masked_mean, with_mask
from jax_trainer.core.metrics import BatchSize
from jax_trainer.core.optimizers import Optimizers
from jax_trainer.datasets import DataError, DeviceTransforms, SupervisedBatch, common_transforms, transforms_of
from jax_trainer.diagnostics.returned import check_loss, check_pairing, is_row_wise, kinds_of, loss_and_metrics
from jax_trainer.diagnostics.user_frame import attribute_to
from jax_trainer.optimizer import OptimizerInterface, build_optimizers, checked_optimizer, loss_weights
from jax_trainer.runs.options import OF_THE_STEP, Options
from jax_trainer.styles.fit_data import Inputs, Masked, SplitBatch, Weighted, as_yielded, inputs_of, split_of

LOG = logging.getLogger("jax_trainer")
ClassWeight = Mapping[int, float] | Sequence[float]
OPTIONAL = ("rng", "step", "train")  # parameters that a loss may have besides the first two
_FORMS = "`loss_fn(logits, labels)`, `loss_fn(model, batch)`, or for linen models `loss_fn(params, batch)`"
_OUTPUTS = ("y_pred", "logits", "predictions", "outputs", "preds", "pred", "output", "prediction", "y_hat")
_TARGETS = ("y_true", "labels", "targets", "label", "target", "true")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class FitTarget(NamedTuple):
    """The program to train, its root key and name, and the model."""

    program: Program
    key: jax.Array
    name: str
    model: ModelHandle | None  # None: a user's program, which defines what a batch is

    def as_passed(self, state: TrainState) -> Any:
        """The state in the form that the user passed."""
        return state if self.model is None else self.model.as_passed(state)

    def write_back(self, state: TrainState) -> Any:
        """The trained model; an nnx module that was passed is updated. None if only the state has the weights."""
        return None if self.model is None else self.model.write_back(state)

    def as_inputs(self, arrays: Any) -> Any:
        """`arrays` as inputs, where they have the form of those in training; others are read as a batch."""
        if self.model is None or self.model.hooks.example is None:
            return arrays
        like = self.model.hooks.to_input(self.model.hooks.example())
        return Inputs(arrays) if jax.tree.structure(arrays) == jax.tree.structure(like) else arrays


def fit_target(
    model: Any,
    *,
    loss_fn: Any,
    eval_step: Any,
    optimizer: Any,
    split_batch: SplitBatch | None,
    total_steps: int | None,
    seed: int = 0,
    example: Batch = None,
    options: Options | None = None,
    metrics: Mapping[str, Any] | None = None,
    class_weight: ClassWeight | None = None,
    batch_size_of: BatchSize | None = None,
    predict_fn: Callable[[Any, Any], Any] | None = None,
) -> FitTarget:
    """The program that trains `model`, from the arguments of `fit`; its evaluations include `eval_step`."""
    key, options = jax.random.key(seed), options or Options()
    if eval_step is not None:
        checked_eval_step(eval_step)
    if isinstance(model, Program):
        others = {"loss_fn": loss_fn, "optimizer": optimizer, "split_batch": split_batch, "metrics": metrics}
        others |= {"class_weight": class_weight, "sample_weight": example if isinstance(example, Weighted) else None}
        _check_program({**others, "batch_size_of": batch_size_of, "predict_fn": predict_fn}, options)
        return FitTarget(_with_eval_step(model, lambda state: state, eval_step), key, "Program", None)
    if loss_fn is None:
        raise TypeError("Pass `loss_fn`: `loss_fn(logits, labels)`, which returns the loss, or the loss and a dict.")
    hooks = ModelHooks(inputs_of(split_batch), key=lambda: key, example=lambda: example)
    handle = checked_model(model, hooks)
    tx = _tx_of(optimizer, handle, total_steps)
    masks = EvalMasks()
    if isinstance(loss_fn, Mapping):
        _check_names(loss_fn, tx)
        loss = _loss_per_optimizer(loss_fn, handle, split_batch, class_weight)
        if metrics:
            raise TypeError("`metrics` need one `loss_fn`. Return them from one of the functions by name instead.")
    else:
        loss = loss_of(loss_fn, handle, split_batch, checked_metrics(metrics, masks), masks, class_weight)
    of_step = {**options.step_options(), "losses": loss_weights(options.losses or None, total_steps)}
    if batch_size_of is not None:
        of_step["batch_size_of"] = lambda batch: batch_size_of(as_yielded(batch))
    program = handle.program(handle.calling(loss), tx, **of_step)
    # not padded: an `eval_step` takes the mean over all examples of a batch, and `batch_size_of` may count all of them
    if eval_step is None and batch_size_of is None:
        program = program.with_info(add_mask=masks.add)
    if predict_fn is not None:
        outputs = lambda state, batch: predict_fn(handle.evaluated(state), hooks.to_input(batch))
        program = program._replace(predict_step=outputs)
    return FitTarget(_with_eval_step(program, handle.evaluated, eval_step), handle.key, handle.name, handle)


def checked_model(model: Any, hooks: ModelHooks | None = None) -> Any:
    """The handle of a model that `fit` can train; a `Program` is returned as it is."""
    if isinstance(model, Program):
        return model
    handle = handle_of(model, hooks)
    if handle.is_builder:
        hint = f": `{handle.name}(…)`" if isinstance(model, type) else ", such as a linen or nnx module"
        named = f"{type(model).__name__} {handle.name or '<lambda>'}"
        raise TypeError(f"The model of `fit` is the {named}. Pass an object{hint}.")
    return handle


def _check_program(others: Mapping[str, Any], options: Options) -> None:
    for name, value in others.items():
        if value is not None:
            raise TypeError(f"`{name}`: a `Program` has its own loss and optimizer. Leave it out.")
    for name, value in options.changed(OF_THE_STEP).items():
        raise TypeError(
            f"`{name}={value!r}`: a `Program` computes its own gradients. Pass it to the function "
            "that makes the program (`linen_program`, `nnx_program`, …)."
        )


def _check_names(losses: Mapping[str, Any], tx: optax.GradientTransformation) -> None:
    if not isinstance(tx, Optimizers) or losses.keys() != tx.by_name.keys():
        found = f"the optimizers are {tx.names}" if isinstance(tx, Optimizers) else "there is one optimizer"
        raise ValueError(
            f"`loss_fn` has functions for {', '.join(losses)}, but {found}. Pass one function for each optimizer, by "
            "its name, or one function that returns all losses by name."
        )


def _tx_of(optimizer: Any, handle: ModelHandle, total_steps: int | None) -> optax.GradientTransformation:
    if handle.tx is not None:
        if optimizer is not None:
            raise TypeError("`optimizer`: the state already has an optimizer (`tx`). Leave it out.")
        return handle.tx
    if isinstance(optimizer, Mapping) and "class_name" in optimizer:
        raise TypeError(
            "`optimizer` has the keys of a file. `fit` takes objects: `optax.adamw(1e-3)`, or a configuration such as "
            "`AdamWConfig(learning_rate=1e-3)` of `jax_trainer.optimizer`."
        )
    if isinstance(optimizer, Mapping):
        return build_optimizers(optimizer, total_steps)
    if isinstance(optimizer, ConfigInterface):
        return optimizer.instantiate(OptimizerInterface).build(total_steps)
    return checked_optimizer(optax_of(optimizer), ", or an optimizer's configuration")


# the loss


class LossForm(NamedTuple):
    """How a loss is called: `(logits, labels)`, or with `takes_batch` `(model or params, batch)`.

    `first` is its first parameter; `optional` are those of `rng`, `step` and `train` that it has.
    """

    takes_batch: bool
    first: str
    optional: tuple[str, ...]

    @classmethod
    def of(cls, function: Any) -> "LossForm":
        """A first parameter `model` or `params`, or a second one `batch`, means that `function` calls the model."""
        first, second, others = _parameters(function, "loss_fn", f"Write {_FORMS}.")
        _check_others(others)
        takes_batch = first in ("model", "params") or second == "batch"
        return cls(takes_batch, first, tuple(name for name in OPTIONAL if name in others))


class EvalMasks:
    """Whether evaluations respect a mask: as traces have shown, the loss returns nothing but values per example.

    Each must depend on its own example only: a contrastive loss compares it with all others, also with padding.
    """

    def __init__(self) -> None:
        self._are_respected: bool | None = None

    def traced(self, are_respected: bool) -> None:
        """Called with every trace of an evaluation."""
        self._are_respected = are_respected and self._are_respected is not False

    def add(self, batch: Batch, mask: Any) -> Batch | None:
        """`batch` with a mask of its examples; None if it would not be respected."""
        if not self._are_respected:
            return None
        return with_mask(batch, mask) if isinstance(batch, SupervisedBatch) else Masked(batch, mask)


def checked_metrics(metrics: Any, masks: EvalMasks) -> Mapping[str, Any]:
    """The `metrics` of `fit` by name, as functions of outputs, targets and mask."""
    found = {} if metrics is None else metrics
    if not isinstance(found, Mapping) or not all(map(callable, found.values())):
        raise TypeError(f"`metrics` must be a dict of metrics by name, `{{'f1': F1()}}`, got {metrics!r}.")
    if "loss" in found:
        raise ValueError("`metrics` has the name 'loss', which is that of the loss itself. Choose another name.")
    if classes := [(name, one.__name__) for name, one in found.items() if isinstance(one, type)]:
        name, kind = classes[0]
        raise TypeError(f"`metrics` has the class {kind}. Pass an object: `{{{name!r}: {kind}()}}`.")
    return {name: one if _takes_mask(name, one) else _unmasked(name, one, masks) for name, one in found.items()}


def _takes_mask(name: str, metric: Any) -> bool:
    """Whether the third parameter is the mask: not if it is an option of another name, which has a default."""
    hint = "Write `metric(outputs, targets)`, or `metric(outputs, targets, mask)`."
    _, second, others = _parameters(metric, f"metrics[{name!r}]", hint)
    third = [*others.items()][:1]
    return not second or any(is_needed or other in ("mask", "weights") for other, is_needed in third)


def _unmasked(name: str, function: Any, masks: EvalMasks) -> Callable[..., Any]:
    """A function of outputs and targets as a metric: only its values per example can be averaged over a mask."""

    def metric(outputs: Any, targets: Any, mask: Any) -> Any:
        check_pairing(function, outputs, targets, what=f"The metric {name!r}")
        value, rows = function(outputs, targets), jnp.shape(jax.tree.leaves(outputs)[0])[:1]
        is_per_example = not isinstance(value, Mapping) and jnp.shape(value)[:1] == rows
        if not is_per_example and mask is not None:
            raise ValueError(
                f"The batch has a `mask` of shape {jnp.shape(mask)}, but the metric {name!r}, a function of outputs "
                "and targets, includes the masked-out examples. Return one value per example, or write "
                "`metric(outputs, targets, mask)`."
            )
        if not is_per_example or not is_row_wise(function, outputs, targets):
            masks.traced(False)
        return masked_mean(jnp.asarray(value), mask) if is_per_example else value

    return metric


def loss_of(
    function: Any,
    handle: ModelHandle,
    split_batch: SplitBatch | None,
    metrics: Mapping[str, Any] = MappingProxyType({}),
    masks: EvalMasks | None = None,
    class_weight: ClassWeight | None = None,
) -> Callable[..., Any]:
    """The user's loss in one form: `(model, batch, train, rng, step)` returns the loss and a dict of metrics.

    Args:
        function: the loss.
        handle: the model.
        split_batch: as the user passed it.
        metrics: called with outputs, targets and mask.
        masks: learns whether evaluations respect masks.
        class_weight: weights of the examples in training, by their class.
    """
    if isinstance(function, jax.stages.Wrapped):  # by `jax.jit`: it is a part of a compiled step anyway
        function = inspect.unwrap(function)
    form, expected, split = LossForm.of(function), handle.loss_argument, split_of(split_batch)
    if form.takes_batch and form.first in ("model", "params") and form.first != expected:
        raise TypeError(
            f"`loss_fn({form.first}, batch)` is not for {handle.mode} models. Write `loss_fn({expected}, batch)`, "
            "which calls the model, or `loss_fn(logits, labels)`."
        )
    if form.takes_batch and metrics:
        raise TypeError(
            f"`metrics` need the outputs of the model, but `loss_fn({form.first}, batch)` calls it itself. Return the "
            "metrics from there: `return loss, {'f1': F1()(logits, labels)}`."
        )

    def on_model(model: Any, batch: Batch, train: bool, rng: jax.Array, step: jax.Array) -> Any:
        mask = getattr(batch, "mask", None) if isinstance(batch, SupervisedBatch | Masked) else None
        weight = batch.weight if isinstance(batch, Weighted) else None
        batch = as_yielded(batch)
        offered = {"rng": rng, "step": step, "train": train}
        more = {name: offered[name] for name in form.optional}
        if form.takes_batch:
            if weight is not None or class_weight is not None:
                raise TypeError(
                    f"`{'class_weight' if weight is None else 'sample_weight'}` needs a loss per example, but "
                    f"`loss_fn({form.first}, batch)` computes its own. Multiply there by weights that are in the "
                    "batch, or write `loss_fn(logits, labels)`."
                )
            return loss_and_metrics(function(handle.loss_subject(model), batch, **more), "loss_fn")
        inputs, targets = split(batch)
        outputs = handle.apply(model, inputs, train)
        with _noting_rows(outputs, targets):
            returned = function(outputs, targets, **more)
        loss, reported = loss_and_metrics(returned, "loss_fn")
        seen = {"predictions": outputs, "targets": targets}
        check_loss(loss, seen, {jnp.shape(leaf)[0] for leaf in jax.tree.leaves(seen) if jnp.ndim(leaf)})
        check_pairing(lambda a, b: loss_and_metrics(function(a, b, **more), "loss_fn")[0], outputs, targets)
        if masks is not None and not train:
            losses = list(loss.values()) if isinstance(loss, Mapping) else [loss]
            shape = jnp.shape(losses[0])
            are_per_example = all(_is_per_example(one, shape) for one in (*losses, *reported.values()))
            called = lambda outputs, targets: function(outputs, targets, **more)
            masks.traced(bool(shape) and are_per_example and is_row_wise(called, outputs, targets))
        if train and class_weight is not None:
            of_class = _weights_of_classes(class_weight, outputs, targets)
            weight = of_class if weight is None else weight * of_class.astype(weight.dtype)
        loss, reported = _averaged(loss if weight is None else _weighted(loss, weight), reported, mask)
        if twice := sorted(metrics.keys() & reported.keys()):
            raise ValueError(f"`loss_fn` and `metrics` both have {twice[0]!r}. Rename one of them.")
        return loss, {**reported, **{name: metric(outputs, targets, mask) for name, metric in metrics.items()}}

    return attribute_to(on_model, function)


@contextmanager
def _noting_rows(outputs: Any, targets: Any) -> Iterator[None]:
    """Adds to an error in the block that the model returned no row per example, if so: the loss cannot match them."""
    shapes, rows = [jnp.shape(one) for one in jax.tree.leaves(outputs)], jnp.shape(jax.tree.leaves(targets)[0])[:1]
    try:
        yield
    except Exception as error:
        if any(shapes) and rows not in [shape[:1] for shape in shapes]:
            error.add_note(
                f"Likely fix: The model returned {', '.join(map(str, shapes))} for {rows[0]} examples, without their "
                "axis. Does it reduce that axis? A convolution takes images without an axis of channels for one image: "
                "add it, `x[..., None]`."
            )
        raise


def _loss_per_optimizer(
    functions: Mapping[str, Any], handle: ModelHandle, split_batch: SplitBatch | None, class_weight: ClassWeight | None
) -> Callable[..., Any]:
    by_name = {name: loss_of(one, handle, split_batch, class_weight=class_weight) for name, one in functions.items()}

    def on_model(model: Any, batch: Batch, train: bool, rng: jax.Array, step: jax.Array, optimizer: str) -> Any:
        return by_name[optimizer](model, batch, train, rng, step)

    return on_model


def _weights_of_classes(class_weight: ClassWeight, outputs: Any, targets: Any) -> jax.Array:
    """The weight of each example: of the class that its target is the index of, or in which a one-hot target is 1."""
    shapes = [jnp.shape(leaf) for leaf in (*jax.tree.leaves(outputs), *jax.tree.leaves(targets))]
    if len(shapes) != 2 or len(shapes[1]) not in (1, 2):
        raise ValueError(
            f"`class_weight` needs one class per example, but outputs and targets have the shapes {shapes}. Pass "
            "`sample_weight`, or weight the losses in `loss_fn`."
        )
    count = shapes[0][-1] if len(shapes[0]) > 1 and shapes[0][-1] > 1 else 2  # one output: of the positive class
    by_class = class_weight if isinstance(class_weight, Mapping) else dict(enumerate(class_weight))
    labels = {*range(count)}
    if not by_class.keys() <= labels or (by_class is not class_weight and by_class.keys() != labels):
        raise ValueError(
            f"`class_weight` is {class_weight!r}, but the outputs of shape {shapes[0]} have {count} classes. Pass one "
            f"weight per class, or a dict whose keys are of 0 to {count - 1}; other classes have the weight 1."
        )
    table = jnp.asarray([by_class.get(label, 1.0) for label in range(count)], jnp.float32)
    (target,) = jax.tree.leaves(targets)
    if target.ndim == 2:
        target = target.argmax(-1) if target.shape[-1] > 1 else target[:, 0]
    # compared instead of indexed: a label that the loss ignores, such as -1, is the index of another class
    is_class = jnp.round(target.astype(jnp.float32)).astype(jnp.int32)[:, None] == jnp.arange(count)
    return jnp.where(is_class.any(-1), jnp.where(is_class, table, 0).sum(-1), 1)


def _weighted(loss: Any, weight: jax.Array) -> Any:
    """The losses per example, each multiplied by its weight."""
    if isinstance(loss, Mapping):
        return {name: _weighted(one, weight) for name, one in loss.items()}
    if not jnp.shape(loss):
        raise ValueError(
            "`class_weight` and `sample_weight` need one loss per example, but `loss_fn(logits, labels)` returned a "
            "scalar. Leave out its `.mean()`: `fit` takes the mean of the weighted losses."
        )
    return loss * weight.astype(loss.dtype)


def _averaged(loss: Any, reported: dict[str, Any], mask: Any) -> tuple[Any, dict[str, Any]]:
    """The loss (or several, by name) and the metrics, with values per example averaged over the mask of the batch."""
    if isinstance(loss, Mapping):
        means = {name: _averaged(one, {}, mask)[0] for name, one in loss.items()}
        return means, _averaged(next(iter(loss.values())), reported, mask)[1]
    shape = jnp.shape(loss)
    if not shape and mask is not None:
        raise ValueError(
            f"The batch has a `mask` of shape {jnp.shape(mask)}, but `loss_fn(logits, labels)` returned a scalar, "
            "which includes the masked-out examples. Return one loss per example, which is averaged over the mask, "
            "or write `loss_fn(model, batch)` (linen: `loss_fn(params, batch)`) with "
            "`jax_trainer.core.masked_mean(losses, batch.mask)`."
        )
    if not shape:
        return loss, reported
    per_example = [name for name, one in reported.items() if _is_per_example(one, shape)]
    whole = [name for name in reported if name not in per_example]  # `loss_fn(logits, labels)` does not get the mask
    if whole and mask is not None:
        one = reported[whole[0]]
        kind = "is a dict" if isinstance(one, Mapping) else f"has shape {jnp.shape(one)}"
        raise ValueError(
            f"The batch has a `mask` of shape {jnp.shape(mask)}, but the metric {whole[0]!r} of `loss_fn` {kind}, "
            "which includes the masked-out examples. Return one value per example, or pass a metric in `metrics`, "
            "which gets the mask."
        )
    return masked_mean(loss, mask), {**reported, **{name: masked_mean(reported[name], mask) for name in per_example}}


def _is_per_example(one: Any, shape: tuple[int, ...]) -> bool:
    return not isinstance(one, Mapping) and jnp.shape(one) == shape


def _check_others(others: Mapping[str, bool]) -> None:
    unknown = [name for name, is_needed in others.items() if is_needed and name not in OPTIONAL]
    if "epoch" in unknown:
        raise TypeError(
            "`loss_fn` requires `epoch`, which is not available: the step is compiled once for all epochs. Give the "
            "parameter a default, or remove it; `step` is available."
        )
    if unknown:
        raise TypeError(
            f"`loss_fn` requires {_listed(unknown)}; besides the first two arguments, only {_listed(OPTIONAL)} are "
            f"available. Write {_FORMS}."
        )
    if "epoch" in others:
        LOG.warning(
            "`loss_fn` has a parameter `epoch`, which keeps its default: the step is compiled once for all epochs. Use "
            "`step`, or an optimizer schedule, for what depends on time."
        )


def _parameters(function: Any, name: str, hint: str) -> tuple[str, str, dict[str, bool]]:
    """The names of the first two parameters, and of the others, with whether they are required."""
    if not callable(function):
        raise TypeError(f"`{name}` must be a function, got a {type(function).__name__}. {hint}")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return "", "", {}
    positional = [p.name for p in parameters if p.kind in _POSITIONAL]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        positional = [*positional, "", ""]
    if len(positional) < 2:
        takes = f"takes only `{positional[0]}`" if positional else "has no parameters"
        raise TypeError(f"`{name}` {takes}, but is called with two arguments. {hint}")
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first, second = positional[:2]
    if first in _TARGETS and second in _OUTPUTS:
        raise TypeError(
            f"`{name}({first}, {second})` has its parameters in the order of Keras. It is called with the model's "
            f"outputs first and the targets second: write `{name}({second}, {first})`."
        )
    return first, second, {p.name: p.default is p.empty for p in named if p.name not in (first, second)}


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


# the evaluation


def checked_eval_step(function: Any) -> Callable[[Any, Any], Any]:
    """Returns `function` if it can be called as `eval_step(state, batch)`."""
    others = _parameters(function, "eval_step", "Write `eval_step(state, batch)`, or `eval_step(model, batch)`.")[2]
    if needed := [name for name, is_needed in others.items() if is_needed]:
        raise TypeError(
            f"`eval_step` is called with a state or model and a batch, but also requires {_listed(needed)}."
        )
    return function


def evaluated_by(returned: Any) -> dict[str, Any]:
    """The metrics that an `eval_step` returned, by name: a number is the accuracy, per-example values are averaged."""
    if isinstance(returned, Mapping):
        return dict(returned)
    if isinstance(returned, tuple | list | str) or returned is None:
        raise TypeError(f"`eval_step` must return a number, or a dict of numbers, got {kinds_of(returned)}.")
    return {"accuracy": jnp.mean(jnp.asarray(returned))}


def _with_eval_step(program: Program, view: Callable[[TrainState], Any], eval_step: Any) -> Program:
    """`program` whose evaluation includes `eval_step`, called with the state or module that `view` returns."""
    if eval_step is None:
        return program

    def evaluate(state: TrainState, batch: Batch) -> Any:
        return program.eval_step(state, batch).adding(**evaluated_by(eval_step(view(state), batch)))

    return program._replace(eval_step=evaluate)


# device transforms


def data_transforms(program: Program, train: Any, evals: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The device transforms of the data of a run; None without any, or if the program already has some."""
    if program.info.transforms is not None:
        return None
    common = common_transforms(transforms_of(train), evals)
    return _InputTransforms(common) if common else None


class _InputTransforms(NamedTuple):
    """Device transforms of batches, extended to inputs without targets."""

    transforms: DeviceTransforms

    def apply(self, key: jax.Array, batch: Batch, *, train: bool) -> Batch:
        if isinstance(batch, Masked | Weighted):
            return batch.replace(batch=self.transforms.apply(key, batch.batch, train=train))  # pyright: ignore[reportAttributeAccessIssue] - of flax
        if not isinstance(batch, Inputs):
            return self.transforms.apply(key, batch, train=train)
        if isinstance(batch.value, tuple):
            raise DataError(
                f"The training data has device transforms of its field {self.transforms.field!r}, and it is unknown "
                "which of several inputs that is. Pass batches like those of the training: `predict([batch])`."
            )
        return Inputs(self.transforms.apply_to_images(key, batch.value, train=train))
