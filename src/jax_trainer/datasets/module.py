"""`DatasetModule`: training, validation and test data with their loaders, and `DatasetConfig`."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import jax
import numpy as np
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.config.settings import AtLeast, Settings, SettingsError
from jax_trainer.core import Batch, PyTree
from jax_trainer.datasets.arrays import ArrayLoader, Ordered, nearby_multiples, this_process
from jax_trainer.datasets.data_source import Data, DataSource, Resident, peeked
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.datasets.transforms import DeviceTransforms, attach_transforms

Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]

_SIZES = {"global_batch_size": 128, "local_batch_size": 128}
_DOCUMENTED = {**_SIZES, "num_workers": 4, "pin_memory": True, "prefetch_factor": 4}


class UnusedKeyWarning(UserWarning):
    """A key of a configuration was set but has no effect."""


@dataclass
class DatasetConfig(Settings):
    """Where the data is, how it is split, and how it is batched.

    Args:
        data_dir: the folder with the files.
        global_batch_size: examples per batch over all processes (128). Set this or `local_batch_size`.
        local_batch_size: examples per batch and process (128).
        batch_size_schedule: examples per batch of training, over all processes, by the number of complete epochs after
            which each is used: {5: 256} trains with batches of 256 from the sixth epoch on. Before the first key, it is
            `global_batch_size`.
        num_workers: number of worker processes that read and decode records, in datasets that have such (4).
        normalize: normalize images to mean 0 and standard deviation 1, on the device.
        val_size: number of training examples held out for validation.
        split_seed: seed of the validation split.
        pin_memory: has no effect in JAX; accepted for compatibility with PyTorch configurations (True).
        prefetch_factor: number of batches prefetched to the device (4, where that helps).
        seed: seed of the shuffling of training examples.
        limit_train_size: use only the first so many training examples after the split.
        download: download missing files from the dataset's hosts.
    """

    data_dir: str = "data/"
    global_batch_size: Size | None = None
    local_batch_size: Size | None = None
    batch_size_schedule: dict[Count, Size] = field(default_factory=dict)
    num_workers: Count | None = None
    normalize: bool = True
    val_size: Count = 5000
    split_seed: Count = 42
    pin_memory: bool | None = None
    prefetch_factor: Count | None = None
    seed: Count = 42
    limit_train_size: Size | None = None
    download: bool = False

    def __post_init__(self) -> None:
        self.explicit = frozenset(name for name in _DOCUMENTED if getattr(self, name) is not None)
        super().__post_init__()
        size = self.global_batch_size or self.local_batch_size
        for name, default in _DOCUMENTED.items():
            if getattr(self, name) is None:
                setattr(self, name, size or default if name in _SIZES else default)

    def stored(self) -> dict[str, Any]:
        """The keys to write to a configuration file, without those derived from others."""
        derived = set(_DOCUMENTED) - self.explicit
        return {name: value for name, value in super().stored().items() if name not in derived}

    def batch_size(self, processes: int | None = None) -> int:
        """Examples per batch over all processes; `processes` defaults to those of JAX."""
        processes = this_process()[1] if processes is None else processes
        size, local, problem = self.global_batch_size or 1, self.local_batch_size or 1, ""
        both = self.explicit >= _SIZES.keys()
        if "local_batch_size" in self.explicit and not both:
            return local * processes
        if both and size != local * processes:
            product = f"{local} × {processes} process{'es' * (processes > 1)} is {local * processes}"
            problem = f"is {size}, but `local_batch_size` {product}. Remove one of them, or make them agree."
        elif size % processes:
            near = nearby_multiples(size, processes)
            problem = f"{size} cannot be shared evenly by {processes} processes. Use {near}."
        if problem:
            raise SettingsError([("global_batch_size", f"`global_batch_size` {problem}")])
        return size


@register_interface
class DatasetModule(RegistrableConfigInterface):
    """Training, validation and test data with their loaders.

    Args:
        config: batch sizes, seeds and the like: a `DatasetConfig`, or a configuration of another base class, of which
            the keys that have the same names are used.
        train, val, test: arrays that share their first axis, in a tuple, dict or dataclass; or a loader of batches:
            a torch `DataLoader`, a loader with `epoch`, a list of batches, a function that returns an iterator.
        train_loader, val_loader, test_loader: loaders of these sets, if `train`, `val`, `test` are not loaded from.
        metadata: any further information about the dataset.
        class_names: names of the classes, indexed by label.
        transforms: device transforms, applied inside the compiled step.
        ids: by split ("train", "val", "test"), a number or text for each example, which files of predictions contain.

    >>> import numpy as np
    >>> images, labels = np.zeros((300, 8), np.float32), np.zeros(300, np.int32)
    >>> data = DatasetModule(DatasetConfig(global_batch_size=32), train=(images, labels), val=(images, labels))
    >>> len(data.train_loader), len(data.val_loader)
    (9, 10)

    A subclass may also set `train_loader` and the other attributes itself.
    """

    config: Any  # a `DatasetConfig`, or a configuration of another base class with some of its keys
    train: Any = None
    val: Any = None
    test: Any = None
    train_loader: Any = None
    val_loader: Any = None
    test_loader: Any = None
    metadata: Mapping[str, Any] = MappingProxyType({})
    class_names: tuple[str, ...] = ()
    transforms: DeviceTransforms = DeviceTransforms()

    def __init__(
        self,
        config: Any,
        train: PyTree = None,
        val: PyTree = None,
        test: PyTree = None,
        *,
        train_loader: Any = None,
        val_loader: Any = None,
        test_loader: Any = None,
        metadata: Mapping[str, Any] | None = None,
        class_names: tuple[str, ...] = (),
        transforms: DeviceTransforms = DeviceTransforms(),
        ids: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
    ) -> None:
        self.config, self.metadata, self.class_names = config, dict(metadata or {}), class_names
        self.transforms = transforms
        self.train, self.val, self.test = train, val, test
        if train is None and train_loader is None:
            raise TypeError(f"{type(self).__name__} has no training data: pass `train`, arrays or a loader.")
        self.train_loader = self._loader("train", train if train_loader is None else train_loader)
        self.val_loader = self._loader("val", val if val_loader is None else val_loader)
        self.test_loader = self._loader("test", test if test_loader is None else test_loader)
        if self.transforms:  # every run and evaluation on the loaders applies them
            for one in ("train_loader", *(f"{one}_loader" for one in self.eval_loaders)):
                setattr(self, one, attach_transforms(getattr(self, one), self.transforms, one))
        for name, own in (ids or {}).items():
            self._attach_ids(name, np.asarray(own))
        if isinstance(self.train_loader, ArrayLoader):
            names = [name for name in ("num_workers", "pin_memory") if name in self._settings.explicit]
            if unused := [f"`{name}: {value}`" for name in names if (value := getattr(self._settings, name))]:
                verb = "has" if len(unused) == 1 else "have"
                why = "the data is in memory, and batches are sliced in microseconds"
                text = f"{' and '.join(unused)} {verb} no effect: {why}."
                warnings.warn(text, UnusedKeyWarning, stacklevel=2)

    def data(self, *, resident: Resident = False, timeout: float | None = None) -> Data:
        """The training and the validation set as a `Data`."""
        settings = self._settings
        prefetch = settings.prefetch_factor if "prefetch_factor" in settings.explicit else None
        evals = {} if self.val_loader is None else {"val": self.val_loader}
        return Data(self.train_loader, evals, prefetch=prefetch, resident=resident, timeout=timeout)

    @property
    def _settings(self) -> DatasetConfig:
        """`config`; of a configuration of another base class, the keys about loaders that it has."""
        if isinstance(self.config, DatasetConfig):
            return self.config
        found = {name: getattr(self.config, name, None) for name in (*_DOCUMENTED, "batch_size_schedule", "seed")}
        return DatasetConfig(**{name: value for name, value in found.items() if value is not None})

    @property
    def eval_loaders(self) -> dict[str, Any]:
        """The validation and test loaders that exist, by name."""
        named = {"val": self.val_loader, "test": self.test_loader}
        return {name: loader for name, loader in named.items() if loader is not None}

    def example(self) -> Batch:
        """The first batch of the training data, as arrays, without consuming it."""
        loader = self.train_loader
        batch, again = peeked(loader)
        if again is not loader:  # an iterator; loaders that are properties are not replaced
            self.train_loader = again
        return batch

    def _attach_ids(self, name: str, ids: np.ndarray) -> None:
        loader = getattr(self, f"{name}_loader", None)
        if not isinstance(loader, Ordered):
            raise TypeError(
                f"`ids` has {name!r}, which is not a set of arrays or records. Use 'train', 'val' or 'test', or give "
                "the batches of your loader an entry `id`."
            )
        if ids.shape != (loader.examples,) or ids.dtype.kind not in "iuU":
            raise ValueError(
                f"`ids` of {name!r} must be {loader.examples} integers or texts, one per example; it is {ids.dtype} of "
                f"shape {list(ids.shape)}."
            )
        loader.ids = ids

    def _loader(self, name: str, part: Any) -> Any:
        if part is None or not is_arrays(part):
            if part is not None:
                DataSource(part, name, may_be_empty=True)  # raises if it cannot be iterated
            return part
        settings = self._settings
        if settings is not self.config and not settings.explicit & _SIZES.keys():
            raise TypeError(
                f"The configuration `{type(self.config).__name__}` has no `global_batch_size`, which the arrays of the "
                f"{name!r} part need. Add it, derive the configuration from `DatasetConfig`, or pass a loader."
            )
        is_train = name == "train"
        size: Any = settings.batch_size()
        if is_train and (schedule := settings.batch_size_schedule):
            if schedule.get(0, size) != size and settings.explicit & _SIZES.keys():
                text = (
                    f"`batch_size_schedule` starts with {schedule[0]}, but the batch size is {size}. Remove one of them"
                )
                raise SettingsError([("batch_size_schedule", f"{text}.")])
            size = {0: size, **schedule}
        examples, largest = len(jax.tree.leaves(part)[0]), max(size.values()) if isinstance(size, dict) else size
        if is_train and 0 < examples < largest:
            text = f"The {name!r} part has {examples} examples, fewer than one batch of {largest}."
            raise SettingsError([("global_batch_size", f"{text} Use a smaller batch size, or more examples.")])
        try:
            return ArrayLoader(part, size, shuffle=is_train, drop_last=is_train, seed=settings.seed)
        except ValueError as error:
            error.add_note(f"This is the {name!r} part of {type(self).__name__}.")
            raise
