"""`DatasetModule`: training, validation and test data with their loaders, and the configuration of all of them."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import jax
from compoconf import RegistrableConfigInterface, register_interface

from jax_trainer.core import Batch, PyTree
from jax_trainer.datasets.arrays import ArrayLoader
from jax_trainer.datasets.data_source import Data, DataSource, Resident
from jax_trainer.datasets.foreign import is_arrays
from jax_trainer.datasets.order import nearby_multiples
from jax_trainer.datasets.peek import peeked
from jax_trainer.datasets.transforms import DeviceTransforms, carrying
from jax_trainer.settings import AtLeast, Settings, SettingsError

Count = Annotated[int, AtLeast(0)]
Size = Annotated[int, AtLeast(1)]

_DOCUMENTED = {
    "global_batch_size": 128,
    "local_batch_size": 128,
    "num_workers": 4,
    "pin_memory": True,
    "prefetch_factor": 4,
}


class UnusedKeyWarning(UserWarning):
    """A key of a configuration was set and means nothing here."""


@dataclass
class DatasetConfig(Settings):
    """How data is found, split and cut into batches.

    Args:
        data_dir: the folder with the files.
        global_batch_size: examples per batch over all processes (128). One of the two sizes follows from the other.
        local_batch_size: examples per batch of each process (128).
        num_workers: processes that read and decode records (4).
        normalize: give the model images with mean 0 and deviation 1; done on the device.
        val_size: how many training examples are set aside for validation.
        split_seed: which ones.
        pin_memory: has no meaning in JAX; accepted, so that files which set it can be read (True).
        prefetch_factor: batches that are made and put on the device ahead of the step (4, where that helps).
        seed: which orders of training examples.
        limit_train_size: use only the first so many training examples after the split.
        download: fetch missing files from the dataset's own hosts.
    """

    data_dir: str = "data/"
    global_batch_size: Size | None = None
    local_batch_size: Size | None = None
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
        self.given = frozenset(name for name in _DOCUMENTED if getattr(self, name) is not None)
        super().__post_init__()
        size = self.global_batch_size or self.local_batch_size
        for name, default in _DOCUMENTED.items():
            if getattr(self, name) is None:
                setattr(self, name, size or default if "batch" in name else default)

    def stored(self) -> dict[str, Any]:
        """The keys that make this configuration again; those that follow from others stay out."""
        left_out = set(_DOCUMENTED) - self.given
        return {name: value for name, value in super().stored().items() if name not in left_out}

    def batch_size(self, processes: int | None = None) -> int:
        """Examples per batch over all processes; None asks JAX how many there are."""
        processes = jax.process_count() if processes is None else processes
        both = {"global_batch_size", "local_batch_size"} <= self.given
        assert self.global_batch_size is not None  # `__post_init__` filled them in
        assert self.local_batch_size is not None
        if "local_batch_size" in self.given and not both:
            return self.local_batch_size * processes
        if both and self.global_batch_size != self.local_batch_size * processes:
            text = (
                f"`global_batch_size` is {self.global_batch_size}, but `local_batch_size` {self.local_batch_size} × "
                f"{processes} process{'es' * (processes > 1)} is {self.local_batch_size * processes}."
            )
            raise SettingsError([("global_batch_size", f"{text} Leave one of them out, or make them agree.")])
        if self.global_batch_size % processes:
            text = f"`global_batch_size` {self.global_batch_size} cannot be shared evenly by {processes} processes."
            near = nearby_multiples(self.global_batch_size, processes)
            raise SettingsError([("global_batch_size", f"{text} Use {near}.")])
        return self.global_batch_size

    def say_unused(self, *names: str, why: str) -> None:
        """Warns, once per place, about those of `names` that were set and ask for something."""
        asked = [f"`{name}: {getattr(self, name)}`" for name in names if name in self.given and getattr(self, name)]
        if asked:
            verb = "does" if len(asked) == 1 else "do"
            warnings.warn(f"{' and '.join(asked)} {verb} nothing here: {why}", UnusedKeyWarning, stacklevel=3)


@register_interface
class DatasetModule(RegistrableConfigInterface):
    """Training, validation and test data with their loaders.

    Args:
        config: batch sizes, seeds and the like.
        train, val, test: arrays that share their first axis, in a tuple, dict or dataclass; or whatever else gives
            batches: a torch `DataLoader`, a loader with `epoch`, a list of them, a function that returns an iterator.
        train_loader, val_loader, test_loader: what gives the batches of these sets, where they are something else.
        metadata: what else there is to know.
        class_names: names of the classes, by label.
        transforms: what happens to batches on the device, inside the compiled step.

    >>> import numpy as np
    >>> images, labels = np.zeros((300, 8), np.float32), np.zeros(300, np.int32)
    >>> data = DatasetModule(DatasetConfig(global_batch_size=32), train=(images, labels), val=(images, labels))
    >>> len(data.train_loader), len(data.val_loader)
    (9, 10)

    A subclass may also set `train_loader`, and what else it has, by itself.
    """

    config: Any  # the class of a set's own configuration, which derives from `DatasetConfig`
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
        config: DatasetConfig,
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
    ) -> None:
        self.config, self.metadata, self.class_names = config, dict(metadata or {}), class_names
        self.transforms = transforms
        self.train, self.val, self.test = train, val, test
        if train is None and train_loader is None:
            raise TypeError(f"{type(self).__name__} has nothing to train on: pass `train`, arrays or a loader.")
        self.train_loader = self._loader(train, train_loader, "train", shuffle=True, drop_last=True)
        self.val_loader = self._loader(val, val_loader, "val")
        self.test_loader = self._loader(test, test_loader, "test")
        self._carry_transforms()
        if isinstance(self.train_loader, ArrayLoader):
            why = "the data is in memory, and batches are cut out of it in microseconds."
            config.say_unused("num_workers", "pin_memory", why=why)

    def data(self, *, resident: Resident = False, timeout: float | None = None) -> Data:
        """The training and the validation set as `run` takes them."""
        prefetch = self.config.prefetch_factor if "prefetch_factor" in self.config.given else None
        evals = {} if self.val_loader is None else {"val": self.val_loader}
        return Data(self.train_loader, evals, prefetch=prefetch, resident=resident, timeout=timeout)

    @property
    def eval_loaders(self) -> dict[str, Any]:
        """The loaders of the sets that exist besides the training set, by name."""
        named = {"val": self.val_loader, "test": self.test_loader}
        return {name: loader for name, loader in named.items() if loader is not None}

    def example(self) -> Batch:
        """The first batch of the training data, as arrays; no batch is lost by it."""
        loader = self.train_loader
        batch, again = peeked(loader)
        if again is not loader:  # an iterator; loaders that are properties stay as they are
            self.train_loader = again
        return batch

    def _carry_transforms(self) -> None:
        """Gives the loaders their transforms along: whoever is given one of them applies them."""
        if self.transforms:
            for name in ("train_loader", *(f"{name}_loader" for name in self.eval_loaders)):
                setattr(self, name, carrying(getattr(self, name), self.transforms, name))

    def _loader(self, part: PyTree, loader: Any, name: str, *, shuffle: bool = False, drop_last: bool = False) -> Any:
        part = part if loader is None else loader
        if part is None:
            return None
        if not is_arrays(part):
            DataSource(part, name, may_be_empty=True)  # refuses what cannot be iterated
            return part
        size = self.config.batch_size()
        examples = len(jax.tree.leaves(part)[0])
        if drop_last and 0 < examples < size:
            text = f"{examples} examples make no full batch of {size}, and that is all of the {name!r} part."
            raise SettingsError([("global_batch_size", f"{text} Use a smaller batch, or more examples.")])
        try:
            return ArrayLoader(part, size, shuffle=shuffle, drop_last=drop_last, seed=self.config.seed)
        except ValueError as error:
            error.add_note(f"This is the {name!r} part of {type(self).__name__}.")
            raise
