"""What a call of `fit` writes, and where: its metadata, checkpoints, callbacks and run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jax_trainer.callbacks import Callback, CallbackConfig, ModelCheckpoint, ModelCheckpointConfig, RunContext
from jax_trainer.checkpoint.folder import CONFIG
from jax_trainer.checkpoint.ranking import Mode
from jax_trainer.config.redaction import redact
from jax_trainer.core import ProgramOptions
from jax_trainer.engine import Every
from jax_trainer.logger import Logger, LoggerConfig
from jax_trainer.logger.values import flat
from jax_trainer.metrics import MetricInterface
from jax_trainer.runs import Ranking, Recording
from jax_trainer.runs.spec import mirror_of

SAVER = "ModelCheckpoint"


def with_saver(
    callbacks: Mapping[str, Any], metric: str, mode: Mode, save: bool | Every, *, metric_is_set: bool
) -> tuple[ModelCheckpointConfig, dict[str, Any]]:
    """The configuration of the checkpoint callback, and `callbacks` with it: the user's, or one for `metric`.

    Args:
        metric_is_set: whether the user passed `metric`.
    """
    found = next((config for config in map(_saver_config, callbacks.values()) if config is not None), None)
    if found is None:
        every = save if isinstance(save, Every) else Every(epochs=1)
        often = {"every_n_epochs": every.epochs, "every_n_steps": every.steps, "every_n_minutes": every.minutes}
        created = ModelCheckpointConfig(monitor=metric, mode=mode, **often)
        return created, {**callbacks, SAVER: created}
    if metric_is_set:
        raise ValueError(
            "`metric` and a `ModelCheckpoint` both select the best checkpoint. Leave out `metric`, and set `monitor`."
        )
    if save is not True:
        raise ValueError(f"`save={save!r}` and a `ModelCheckpoint` both set when to save. Leave out one of them.")
    return found, dict(callbacks)


def _saver_config(callback: Any) -> ModelCheckpointConfig | None:
    config = callback.config if isinstance(callback, ModelCheckpoint) else callback
    return config if isinstance(config, ModelCheckpointConfig) else None


def recording(
    metadata: Mapping[str, Any],
    callbacks: Mapping[str, Any],
    saver: ModelCheckpointConfig,
    logger: LoggerConfig,
    log_name: str,
    *,
    saves: bool,
    validates: bool,
) -> Recording:
    """What the run writes to its folder; `validates`: it has evaluation data."""

    def created(run: RunContext) -> dict[str, Callback]:
        used = {name: one for name, one in callbacks.items() if saves or _saver_config(one) is None}
        for name, one in used.items():
            if isinstance(one, CallbackConfig):
                used[name] = one.instantiate(Callback, run)
            else:
                one.attach(run)
        return used

    arguments = {name: value for name, value in metadata.items() if name != "hparams" and value is not None}
    return Recording(
        logger=lambda folder: logger.instantiate(Logger, folder.path),
        callbacks=created,
        files={CONFIG: config_text(metadata)},
        hparams={**flat(arguments), **metadata["hparams"]},
        saver=saver if saves else None,
        mirror=lambda folder: mirror_of(folder, logger, log_name),
        ranking=None if saves else Ranking.by(saver.monitor, saver.best_mode),
        monitors=validates,
        resume_call="fit(…, resume={})",
    )


def metadata_of(
    model: str, saver: ModelCheckpointConfig, options: ProgramOptions, metrics: Any, hparams: Any, **arguments: Any
) -> dict[str, Any]:
    """What `config.yaml` has of a call, in this order."""
    return {
        "style": "fit",
        "model": model,
        **arguments,
        "metric": saver.monitor,
        "mode": saver.best_mode,
        "options": options.described() or None,
        **({"metrics": {name: _described(one) for name, one in metrics.items()}} if metrics else {}),
        "hparams": hparams,
    }


def config_text(metadata: Mapping[str, Any]) -> str:
    """The text of `config.yaml`; equal metadata give equal text."""
    return yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)


def plain_hparams(hparams: Any) -> dict[str, Any]:
    """Returns `hparams` as numbers, strings, lists and dicts, without secrets; refuses other types.

    >>> plain_hparams({"lr": np.float32(0.5), "layers": (8, 8), "api_key": "hunter2"})
    {'lr': 0.5, 'layers': [8, 8], 'api_key': '<hidden>'}
    """
    if hparams is None:
        return {}
    if not isinstance(hparams, Mapping):
        raise TypeError(f"`hparams` must be a dict, got a {type(hparams).__name__}.")
    return redact(_plain(hparams, "hparams"))


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise TypeError(f"`{path}` has the key {name!r}, a {type(name).__name__}. Use strings as keys.")
        return {name: _plain(item, f"{path}[{name!r}]") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "dtype") and np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf":
        return np.asarray(value).item()  # first: numpy's float64 is also a float
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | Path):
        return str(value)
    raise TypeError(
        f"`{path}` is a {type(value).__name__}, which cannot be saved. Pass numbers, strings, and lists and "
        "dicts of them."
    )


def _described(metric: Any) -> str | None:
    return repr(metric) if isinstance(metric, MetricInterface) else name_of(metric)


def name_of(function: Any) -> Any:
    """The qualified name of a function, or those of several by name; None for None."""
    if isinstance(function, Mapping):
        return {name: name_of(one) for name, one in function.items()}
    return None if function is None else getattr(function, "__qualname__", type(function).__name__)
