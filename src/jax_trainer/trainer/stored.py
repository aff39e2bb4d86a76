"""The configuration files of a run folder, and the class of its trainer."""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import fields
from typing import Any

from jax_trainer.checkpoint.folder import CONFIG, RunFolder
from jax_trainer.config import dump_config, redact
from jax_trainer.config.dumping import as_data
from jax_trainer.datasets import DatasetModule
from jax_trainer.logger.values import flat
from jax_trainer.registration import registered_name
from jax_trainer.trainer.config import BaseTrainer
from jax_trainer.trainer.experiment import StoredRun

HPARAMS = "hparams.json"


def configs_of(trainer: Any) -> dict[str, Any]:
    """All configurations of a trainer, as stored with its runs; objects passed in Python have none."""
    kind = stored_as(type(trainer))
    own = {"trainer": _of_class(trainer.config, registered_name(kind, BaseTrainer) or "")}
    if trainer.model_config is not None:
        own["model"] = trainer.model_config
    if trainer.optimizer_config is not None:
        own["optimizer"] = trainer.optimizer_config
    dataset = trainer.dataset
    if dataset is not None and (name := registered_name(type(dataset), DatasetModule)):
        own["dataset"] = _of_class(dataset.config, name)
    return {**own, **trainer.other_configs}


def config_files(configs: Mapping[str, Any]) -> dict[str, str]:
    """`config.yaml`, from which the run can be rebuilt, and `hparams.json`, all values by dotted key."""
    return {CONFIG: dump_config(configs), HPARAMS: json.dumps(hparams_of(configs), indent=1) + "\n"}


def hparams_of(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Every value by its dotted key, without secrets."""
    return flat(redact(as_data(configs)))


def stored_as(kind: type[Any]) -> type[Any]:
    """The registered class under which runs of a trainer are stored: itself, or its closest registered base."""
    return next(base for base in kind.__mro__ if registered_name(base, BaseTrainer))


def class_to_load(caller: type[Any], stored: type[Any], folder: RunFolder) -> type[Any]:
    """The class to build for a run of class `stored`, when `caller.load_from_checkpoint` loads it."""
    if stored is stored_as(caller):
        return caller
    if not issubclass(stored, caller):
        raise TypeError(f"{folder.path} is a run of {stored.__name__}, not of {caller.__name__}.")
    return stored


def storable(other_configs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `other_configs`; refuses keys that a stored run cannot have."""
    known = {field.name for field in fields(StoredRun) if field.init} - {"trainer", "model", "optimizer"}
    if unknown := sorted(other_configs.keys() - known):
        raise ValueError(
            f"`other_configs` has unknown keys: {', '.join(unknown)}. Its keys: {', '.join(sorted(known))}."
        )
    return dict(other_configs)


def _of_class(config: Any, name: str) -> Any:
    """`config` with the name of its class: several classes may share a configuration class."""
    named = copy(config)
    named.class_name = name
    return named
