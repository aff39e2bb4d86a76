"""The run folder of a trainer: which one it is, which run it resumes, and how its checkpoints are saved and loaded."""

import hashlib
import logging
import math
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.arrays import Spec, named_leaves
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.checkpoint.mirror import address_of
from jax_trainer.checkpoint.record import MANIFEST, name_of, read_saved
from jax_trainer.checkpoint.restore import RestoreOptions, stored_in, with_keys
from jax_trainer.checkpoint.store import CheckpointError, CheckpointStore, SavedCheckpoint
from jax_trainer.config.settings import errors_of
from jax_trainer.core import TrainState, copy_state, unadapted, with_base
from jax_trainer.core.extra_args import freezes_of
from jax_trainer.core.program import ProgramInfo
from jax_trainer.diagnostics.leaves import listed, parameter_paths
from jax_trainer.engine import LoopState
from jax_trainer.logger.jsonl import save_metrics
from jax_trainer.runs import WEIGHTS, RunTarget, run_and_step
from jax_trainer.runs.sections import InitFromConfig
from jax_trainer.runs.spec import store_in
from jax_trainer.sharding.placement import is_primary
from jax_trainer.trainer.experiment import StoredRun, stored_run

LOG = logging.getLogger("jax_trainer")
FINE_TUNED = ("params", "model_state")
Which = int | Literal["best", "latest", "last"]  # "last" is "latest"


def write_into(logger: Any, folder: Path) -> None:
    """Makes the configured logger and its tools write into `folder`, which gets the folder of the run."""
    logger.log_dir = str(folder)
    if logger.mirror:
        logger.mirror = address_of(logger.mirror, folder.parent.name, folder.name)
    tools = logger.tool_config
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        if getattr(tool, "save_dir", ""):
            tool.save_dir = ""


def open_store(
    folder: RunFolder | None, purpose: str, saver: ModelCheckpointConfig | None, better: Callable[..., bool] | None
) -> CheckpointStore:
    """The checkpoints of a trainer's folder, ranked by the metric that `saver` monitors, or by `better`."""
    return store_in(_existing(folder, purpose), saver, better, is_ranked=True)


def _existing(folder: RunFolder | None, purpose: str) -> RunFolder:
    if folder is None:
        raise ValueError(f"This trainer has no run folder to {purpose}. Train first, or pass `folder`.")
    return folder


def save(
    store: CheckpointStore,
    state: TrainState,
    at: LoopState,
    *,
    metrics: Mapping[str, Any],
    saver: ModelCheckpointConfig | None,
    transforms: str,
) -> Path:
    """Saves a state with the metrics of its evaluation, and a description of its device transforms."""
    unknown = {saver.monitor: math.nan} if metrics and saver is not None else {}  # never the best
    scalars = {name: float(value) for name, value in metrics.items() if np.ndim(value) == 0}
    data = {"loop": at.to_data(), **({"transforms": transforms} if transforms else {})}
    return store.save(state, at.position, {**unknown, **scalars}, run=data)


def find_checkpoint(store: CheckpointStore, epoch: int, which: Which | None, *, must_exist: bool) -> Any:
    """The checkpoint of an epoch (-1: any), the best or latest one, or that of a step; without a best one, the latest.

    None: there is none, and it need not exist.
    """
    if which is None and epoch != -1:
        saved = store.all()
        if not any(one.epoch == epoch for one in saved):
            if not must_exist:
                return None
            epochs = ", ".join(str(one.epoch) for one in saved) or "none"
            raise CheckpointError(
                f"No checkpoint of epoch {epoch} in {store.folder}. Epochs with a checkpoint: {epochs}."
            )
        return [one for one in saved if one.epoch == epoch][-1]
    if not must_exist and not (which in store.steps() if isinstance(which, int) else store.steps()):
        return None
    if which in (None, "best"):
        return "latest" if store.best() is None else "best"
    return "latest" if which == "last" else which


def restored(
    store: CheckpointStore, which: Any, like: TrainState, *, has_transforms: bool
) -> tuple[TrainState, SavedCheckpoint]:
    """`like` with the weights of a checkpoint; warns if they were trained with transforms, and the trainer has none."""
    state, saved = store.restore(which, like=like, only=WEIGHTS)
    if (trained := saved.run.get("transforms")) and not has_transforms:
        LOG.warning(
            f"The weights of {saved.path} were trained on batches with the device transforms {trained}, but this "
            "trainer has none: `predict`, `bind_model` and evaluations see raw inputs. Pass `dataset=…`, or data "
            "with `loader.transforms`."
        )
    return state, saved


def loads_weights(config: Any, target: RunTarget) -> bool:
    """Whether a run with this target starts from the weights of `init_from`: it is new, or has no checkpoint yet."""
    if config.init_from is None or target.resumes is None or config.lora is not None:
        return config.init_from is not None  # the base of LoRA is not in the checkpoints
    return target.step is None and not CheckpointStore(target.resumes.checkpoints).infos()


def check_initial(source: InitFromConfig | None, like: TrainState, info: ProgramInfo) -> None:
    """Raises now, as an error of the configuration, what loading these weights into `like`, of shapes, would raise."""
    if source is None:
        return
    with errors_of("trainer.init_from", OSError, ValueError, CheckpointError):
        check_weights(source.path, like, info, **source.options)


def check_weights(checkpoint: str | Path, like: TrainState, info: ProgramInfo, *, which: Which, **options: Any) -> None:
    """Raises if weights cannot be loaded into `like`, or some stay random that the program or LoRA freezes.

    Args:
        options: see `CheckpointStore.restore`.
    """
    _, place = stored_checkpoint(checkpoint, which)
    record, target = read_saved(place)[1], unadapted(like)
    wanted = {name: Spec.of(leaf) for name, leaf in named_leaves(target).items()}
    restore = RestoreOptions(**{**options, "rename": options.get("rename") or {}})
    loaded = restore.sources(with_keys(stored_in(place, record), record), wanted, FINE_TUNED, place)
    if problem := frozen_at_random(loaded, like, info):
        raise CheckpointError(f"{place} {problem}")


def frozen_at_random(loaded: Container[str], like: TrainState, info: ProgramInfo) -> str:
    """What is wrong with a load that leaves parameters random which never train; "" if there are none.

    Args:
        loaded: names of the arrays of the state that are loaded.
        like: the state into which they are loaded.
        info: of its program.
    """
    params = unadapted(like).params
    fresh = [path for path in parameter_paths(params) if f"params.{path}" not in loaded]
    freezes = freezes_of(info.tx) if info.tx is not None else None
    ways = {
        "`freeze` of the optimizer": (lambda path: freezes is not None and freezes.parameters(path), "Freeze fewer"),
        "`Unfreeze`": (info.never_trains, "Add them to its `schedule`"),
    }
    if unadapted(like) is not like:
        trains = like.frozen.lora.trains(like)
        ways = {"`lora`": (lambda path: not trains[path], "Train them with `lora.train`")}
    for by, (is_frozen, change) in ways.items():
        if lost := [path for path in fresh if is_frozen(path)]:
            text = f"has no weights for {listed(lost)}: they would stay random, because {by} freezes them."
            return f"{text} {change}, or load them."
    return ""


def initial_digest(source: InitFromConfig | None, *, must_exist: bool) -> str | None:
    """A digest of the weights of `init_from`, and of how they are loaded; "" without any.

    None if they are not there any more: a run that resumes does not need them.
    """
    if source is None:
        return ""
    try:
        manifest = stored_checkpoint(source.path, source.which)[1] / MANIFEST
    except (OSError, CheckpointError):
        if must_exist:
            raise
        return None
    options = {name: value for name, value in source.options.items() if name != "which"}
    return hashlib.sha256(manifest.read_bytes() + repr(options).encode()).hexdigest()[:32]


def stored_checkpoint(path: str | Path, which: Which) -> tuple[StoredRun, Path]:
    """The stored configuration of a run, and the path of one of its checkpoints.

    Args:
        path: the run folder, or the folder of one of its checkpoints.
        which: of a run folder: "best" (without any, the latest), "latest", or a step.
    """
    run, store, chosen = _chosen(path, which)
    if not isinstance(chosen, str):
        return run, store.folder / name_of(chosen)
    found = store.best() if chosen == "best" else store.latest()
    if found is None:
        raise CheckpointError(f"{store.folder.parent} has no checkpoint.")
    return run, found.path


def _chosen(path: str | Path, which: Which) -> tuple[StoredRun, CheckpointStore, Any]:
    """A run, its checkpoints, and which of them is meant."""
    folder, step = run_and_step(Path(path))
    run = stored_run(folder).value
    saver = run.trainer.saver
    best = {} if saver is None else {"monitor": saver.monitor, "mode": saver.best_mode}
    store = CheckpointStore(folder.checkpoints, **best)
    return run, store, find_checkpoint(store, -1, which if step is None else step, must_exist=True)


def initial_weights(
    checkpoint: str | Path, which: Which, like: TrainState, info: ProgramInfo, **options: Any
) -> TrainState:
    """`like` with the weights of a checkpoint of another run, see `check_weights`."""
    _, store, chosen = _chosen(checkpoint, which)
    if read_saved(stored_checkpoint(checkpoint, which)[1])[1].frozen:  # adapters: over the base that is here
        state = store.restore(chosen, like=like, only=FINE_TUNED, **options)[0]
    else:
        check_weights(checkpoint, like, info, which=which, **options)
        state = with_base(like, store.restore(chosen, like=unadapted(like), only=FINE_TUNED, **options)[0])
    # averaged weights start from the loaded ones
    averaged = {"ema": copy_state(state.params)} if "ema" in state.extra else {}
    return state.replace(extra={**state.extra, **averaged})


def write_metrics(folder: RunFolder | None, filename: str, metrics: Mapping[str, Any]) -> None:
    """Writes metrics to a file of the run folder, in the primary process."""
    if is_primary():
        save_metrics(_existing(folder, "write to").path, filename, metrics)
