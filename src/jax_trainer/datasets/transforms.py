"""Device transforms, applied inside the compiled step: images are transferred as uint8 and converted on the device.

A transform is a function `(key, images) -> images` of a batch, [n, h, w, c] or [n, h, w], that JAX can trace. Custom
functions can be combined with those of this file.

A loader carries its transforms as the attribute `transforms`, a `DeviceTransforms`: loaders of a `DatasetModule` do,
and a custom loader may. Every run and evaluation applies them, unless its program has transforms (`with_transforms`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_trainer.core import Batch, Metrics, Program, StepReport, TrainState, stream
from jax_trainer.datasets.foreign import DataError
from jax_trainer.diagnostics.returned import checked_int

ImageTransform = Callable[[jax.Array, jax.Array], jax.Array]
PadMode = Literal["reflect", "constant", "edge", "symmetric", "wrap"]


def normalize(mean: Any, std: Any, *, dtype: Any = jnp.float32) -> ImageTransform:
    """Subtracts `mean` and divides by `std`: one number, or one per channel.

    Both refer to values from 0 to 1. Integer images are divided by 255 first; float images are used unchanged.

    >>> images = jnp.full((2, 4, 4, 3), 51, jnp.uint8)
    >>> float(normalize(0.5, 0.25)(jax.random.key(0), images)[0, 0, 0, 0])  # (51 / 255 - 0.5) / 0.25
    -1.2000000476837158
    """
    means, stds = _per_channel("mean", mean), _per_channel("std", std)
    if not (stds > 0).all():
        raise ValueError(f"`std` must be above 0, got {std}. For a constant channel use 1.")
    (channels,) = np.broadcast_shapes(means.shape, stds.shape) or (0,)

    def apply(key: jax.Array, images: jax.Array) -> jax.Array:
        if channels and (images.ndim != 4 or images.shape[-1] != channels):
            raise ValueError(
                f"`mean` and `std` are for {channels} channels, but the images are {list(images.shape)}. "
                f"Pass images [n, h, w, {channels}], or one number for all channels."
            )
        one = 255.0 if jnp.issubdtype(images.dtype, jnp.integer) else 1.0
        wide = jnp.promote_types(dtype, jnp.float32)  # bf16 would round the mean away
        # subtract, then multiply: `x * a + b` may be fused into one rounding here and two there
        scaled = (images.astype(wide) - jnp.asarray(one * means, wide)) * jnp.asarray(1 / (one * stds), wide)
        return scaled.astype(dtype)

    values = (tuple(numbers.tolist()) if numbers.ndim else numbers.item() for numbers in (means, stds))
    return _BuiltinTransform(apply, "normalize", (*values, jnp.dtype(dtype).name))


def random_crop(padding: int, *, mode: PadMode = "reflect") -> ImageTransform:
    """Pads images by `padding` pixels on every side and crops each at a random position to its original size.

    `mode` is that of `jnp.pad`; with "constant" the padding is 0, which is the mean after `normalize`.

    >>> random_crop(4)(jax.random.key(0), jnp.zeros((128, 32, 32, 3), jnp.uint8)).shape
    (128, 32, 32, 3)
    """
    padding, is_zero = checked_int("padding", padding, 0), mode == "constant"

    def apply(key: jax.Array, images: jax.Array) -> jax.Array:
        count, height, width = _image_shape("random_crop", images)
        starts = jax.random.randint(key, (2, count, 1), -padding, padding + 1)
        rows, columns = starts[0] + jnp.arange(height), starts[1] + jnp.arange(width)
        # the source pixel of each position of a padded line
        padded = [np.pad(np.arange(size), padding, mode="edge" if is_zero else mode) for size in (height, width)]
        down, across = (jnp.asarray(table, jnp.int32) for table in padded)
        # uint8 [128, 32, 32, 3], crop + flip + normalize, one CPU core: 190 µs; take_along_axis 310, dynamic_slice 615
        cropped = _picked(images, down[rows + padding], across[columns + padding])
        if not is_zero:
            return cropped
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        return jnp.where(inside.reshape(inside.shape + (1,) * (images.ndim - 3)), cropped, jnp.zeros((), images.dtype))

    return _BuiltinTransform(apply, "random_crop", (padding, mode))


def random_flip(probability: float = 0.5) -> ImageTransform:
    """Flips each image horizontally with this probability."""
    if not 0 <= probability <= 1:
        raise ValueError(f"`probability` must be from 0 to 1, got {probability}.")

    def apply(key: jax.Array, images: jax.Array) -> jax.Array:
        count, height, width = _image_shape("random_flip", images)
        flipped = jax.random.bernoulli(key, probability, (count, 1))
        columns = jnp.where(flipped, jnp.arange(width)[::-1], jnp.arange(width))
        return _picked(images, jnp.broadcast_to(jnp.arange(height), (count, height)), columns)

    return _BuiltinTransform(apply, "random_flip", (probability,))


@dataclasses.dataclass(frozen=True)
class _BuiltinTransform:
    """A transform of this file; equal to another one with the same arguments."""

    function: ImageTransform = dataclasses.field(compare=False)
    kind: str
    arguments: tuple[Any, ...]

    def __call__(self, key: jax.Array, images: jax.Array) -> jax.Array:
        return self.function(key, images)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(repr, self.arguments))})"


@dataclasses.dataclass(frozen=True)
class DeviceTransforms:
    """Functions that transform the images of a batch on the device, in this order, each with its own random key.

    Args:
        train: applied before training steps.
        eval: applied before evaluation, and to the example batch that initializes the model.
        field: the images in the batch: an attribute or key, or an index if the batch is a tuple.

    >>> cifar = normalize((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    >>> transforms = DeviceTransforms(train=(random_crop(4), random_flip(), cifar), eval=(cifar,), field="image")
    >>> batch = {"image": np.zeros((8, 32, 32, 3), np.uint8), "label": np.zeros(8, np.int32)}
    >>> transforms.apply(jax.random.key(0), batch, train=True)["image"].dtype
    dtype('float32')
    """

    train: Sequence[ImageTransform] = ()
    eval: Sequence[ImageTransform] = ()
    field: str | int = "input"

    def __post_init__(self) -> None:
        for name in ("train", "eval"):
            functions = getattr(self, name)
            if not isinstance(functions, Sequence) or not all(map(callable, functions)):
                raise TypeError(
                    f"`{name}` must be a sequence of functions, got {functions!r}. Write `{name}=(function,)`."
                )
            object.__setattr__(self, name, tuple(functions))

    def __bool__(self) -> bool:
        return bool(self.train or self.eval)

    def apply(self, key: jax.Array, batch: Batch, *, train: bool) -> Batch:
        """`batch` with its images transformed, for training or for evaluation."""
        if not (self.train if train else self.eval):
            return batch
        entries = entries_of(batch)
        if self.field not in entries:
            raise KeyError(
                f"The batch, a {type(batch).__name__}, has no field {self.field!r} to transform. "
                f"It has {', '.join(map(repr, entries)) or 'no fields'}: set `field` of the transforms to one of them."
            )
        return _replaced(batch, {self.field: self.apply_to_images(key, entries[self.field], train=train)})

    def apply_to_images(self, key: jax.Array, images: Any, *, train: bool) -> jax.Array:
        """`images` transformed, for training or for evaluation."""
        images = jnp.asarray(images)
        for position, function in enumerate(self.train if train else self.eval):
            images = function(jax.random.fold_in(key, position), images)
        return images


def transforms_of(data: Any) -> DeviceTransforms | None:
    """The device transforms of `data`, its attribute `transforms`; None if it has none."""
    found = getattr(data, "transforms", None)
    return found if isinstance(found, DeviceTransforms) else None  # other libraries use this name for something else


class _TransformedList(list):
    """A list of batches that carries transforms."""

    transforms: DeviceTransforms


class TransformedIterator(Iterator[Any]):
    """The batches of one epoch, with the device transforms of their loader."""

    def __init__(self, batches: Iterator[Any], transforms: DeviceTransforms) -> None:
        self._batches, self.transforms = batches, transforms

    def __next__(self) -> Any:
        return next(self._batches)


def attach_transforms(data: Any, transforms: DeviceTransforms, name: str) -> Any:
    """`data` with `transforms` as its attribute."""
    data = _TransformedList(data) if type(data) in (list, tuple) else data
    try:
        data.transforms = transforms
    except AttributeError as error:
        raise TypeError(
            f"`{name}` is a {type(data).__name__}, which cannot have the attribute `transforms` of its dataset. Pass a "
            "loader, a list of batches, or a function that returns an iterator."
        ) from error
    return data


def common_transforms(train: DeviceTransforms | None, evals: Mapping[str, Any]) -> DeviceTransforms:
    """The device transforms of all batches of a run: those of the training data.

    They apply to evaluation sets without transforms, too. Raises a `DataError` for a set with different ones.
    """
    train = DeviceTransforms() if train is None else train
    for name, data in evals.items():
        own = transforms_of(data)
        if own is not None and own != train:
            raise DataError(
                f"The {name!r} data has the device transforms {describe_transforms(own)}, and the training data "
                f"{describe_transforms(train)}. Give all loaders the same `transforms`, or set those of the run with "
                "`dataset=` of a trainer or `with_transforms(program, …)`."
            )
    return train


def with_transforms(program: Program, transforms: Any) -> Program:
    """`program` on transformed batches: `transforms` are `DeviceTransforms`, or another object with their `apply`.

    Random keys are derived from the root key and the step, in evaluation from the batch index: a run that is resumed,
    or uses other chunks, sees the same images. Predictions use the evaluation transforms.
    """
    if not transforms:
        return program

    def init(key: jax.Array, batch: Batch) -> TrainState:
        return program.init(key, transforms.apply(stream(key, "transforms of the example"), batch, train=False))

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        key = stream(jax.random.fold_in(state.key, state.step), "transforms")
        return program.train_step(state, transforms.apply(key, batch, train=True))

    def transformed(state: TrainState, batch: Batch) -> Batch:
        # the loop has folded the number of the batch into this key
        return transforms.apply(stream(state.key, "eval transforms"), batch, train=False)

    def eval_step(state: TrainState, batch: Batch) -> Metrics:
        return program.eval_step(state, transformed(state, batch))

    predict = program.predict_step
    predict_step = None if predict is None else lambda state, batch: predict(state, transformed(state, batch))
    steps = {"train_step": train_step, "eval_step": eval_step, "predict_step": predict_step}
    return program._replace(init=init, **steps).with_info(transforms=transforms)


def describe_transforms(transforms: DeviceTransforms | None) -> str:
    """The transforms as text."""
    return f"train={transforms.train}, eval={transforms.eval}" if transforms else "none"


def _per_channel(name: str, value: Any) -> np.ndarray:
    values = np.asarray(value, np.float64)
    if values.ndim > 1 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"`{name}` must be a finite number, or one per channel, got {value}.")
    return values.reshape(()) if values.size == 1 else values


def _image_shape(name: str, images: jax.Array) -> tuple[int, int, int]:
    if images.ndim not in (3, 4):
        raise ValueError(f"`{name}` works on images [n, h, w, c] or [n, h, w], got {list(images.shape)}. Reshape them.")
    count, height, width, *_ = images.shape
    return count, height, width


def _picked(images: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    pick = lambda image, row, column: image.at[row[:, None], column].get(mode="promise_in_bounds")
    return jax.vmap(pick)(images, rows, columns)  # so that a sharded batch stays sharded


def entries_of(batch: Any) -> dict[Any, Any]:
    """The entries of a batch by name; those of a tuple or list by index."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):
        return dict(enumerate(batch))
    names = getattr(batch, "_fields", None) or getattr(batch, "__dataclass_fields__", ())
    return {name: getattr(batch, name) for name in names}


def _replaced(batch: Any, changed: dict[Any, Any]) -> Batch:
    kind: Any = type(batch)
    if hasattr(batch, "_fields"):
        return batch._replace(**changed)
    if isinstance(batch, Mapping):
        return kind({**batch, **changed})
    if isinstance(batch, tuple | list):
        return kind(changed.get(index, entry) for index, entry in enumerate(batch))
    return dataclasses.replace(batch, **changed)
