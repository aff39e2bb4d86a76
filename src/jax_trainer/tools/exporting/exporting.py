"""`export_run`: writes a trained model in formats that need neither this library nor the code of the run."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jax_trainer.checkpoint.commit import partial_folder
from jax_trainer.checkpoint.store import SavedCheckpoint
from jax_trainer.core import Precision, TrainState, failpoint, merged
from jax_trainer.diagnostics.files import sync_folder, sync_tree
from jax_trainer.diagnostics.optional_import import require_extra
from jax_trainer.diagnostics.suggestions import checks_keywords, suggestion
from jax_trainer.runs.predictions import Predictor
from jax_trainer.sharding.placement import check_alone
from jax_trainer.tools.exporting import formats
from jax_trainer.tools.exporting.checking import ExportCheck, check
from jax_trainer.tools.exporting.formats import FORMATS, PLATFORMS, WeightsPlace
from jax_trainer.tools.exporting.traced import expected_outputs, first_examples, limited, model_call, traced_model
from jax_trainer.tools.pretrained.importing import imported_parts
from jax_trainer.trainer import TrainerModule
from jax_trainer.trainer.experiment import rebuilt
from jax_trainer.trainer.run_folder import Which

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05  # of a computation in float32, and in bfloat16 or float16


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Args:
        path: the folder.
        inputs, outputs: its arrays, as text.
        checks: how each format agrees with the trainer; empty without a check.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    checks: dict[str, ExportCheck]


@checks_keywords
def export_run(
    source: Any,
    path: str | Path,
    to: Sequence[str] = ("stablehlo",),
    *,
    which: Which = "best",
    weights: WeightsPlace = "beside",
    batch: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
    tolerance: float | None = None,
    verify: bool = True,
    saved: SavedCheckpoint | None = None,
) -> Exported:
    """Writes a trained model to a new folder, in one or several formats, with the transforms of its dataset inside.

    Each format then predicts 64 examples, fewer if their outputs are large, in a new process that does not import this
    library; a difference beyond `tolerance` is an `ExportError`, and nothing is written. Adapters of LoRA are merged.
    The folder appears when it is complete. It needs `pip install 'jax-trainer[export]'`.

    Args:
        source: a run folder or one of its checkpoints; or a `TrainerModule`: its best validated
            weights of the last run, or the current ones without any.
        path: the folder to write, which must not exist.
        to: "stablehlo" (a program for JAX, and `load_export`), "safetensors" (the weights), "hf" (a folder that
            transformers loads, without transforms).
        which: of a run folder: the "best" checkpoint, the "latest", or that of a step.
        weights: of the StableHLO program: "beside" it, as safetensors, or "embedded".
        batch: the size of all batches; None: any size.
        platforms: that the StableHLO program runs on: "cpu", "cuda", "rocm" or "tpu".
        tolerance: largest difference of an output, relative to the largest output where that is more than 1; None:
            1e-4, or 0.05 of a training in bfloat16 or float16 (not of "hf", which is compared in float32).
        verify: False: do not run the export.
        saved: the checkpoint that `load_model` of a trainer has returned, for `export.json`.
    """
    path = Path(path)
    wanted = _checked(path, to, weights, batch, tolerance)
    check_alone("write the same export")
    trainer = source
    if isinstance(source, str | Path):
        trainer, step = rebuilt(TrainerModule, Path(source), (), own={}, **imported_parts(source))
        saved = trainer.load_model(which=which if step is None else step)
    found = trainer.predictor()
    predictor = Predictor(found.program, merged(found.state))  # LoRA: one set of weights, and no products of adapters
    examples = first_examples(trainer, batch)
    examples = limited(predictor, examples) if batch is None else examples
    model, facts = traced_model(predictor, examples, batch), formats.describe(trainer, saved)
    job = formats.ExportJob(model, trainer, predictor.state, weights, tuple(platforms), facts)
    parent = path.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with partial_folder(parent) as partial:
        (folder := partial / "export").mkdir()
        entries = {name: formats.WRITERS[name](job, folder) for name in wanted}
        checks: dict[str, ExportCheck] = {}
        if verify:
            whole = model.example, expected_outputs(predictor, examples)
            cases = {one: model_call(trainer, predictor.state, examples) if one == "hf" else whole for one in wanted}
            default = {name: _tolerance(trainer, predictor.state, name) for name in wanted}
            checks = check(job, folder, cases, default if tolerance is None else dict.fromkeys(wanted, tolerance))
        for name, found in checks.items():
            entries[name]["check"] = asdict(found)
        formats.write_manifest(folder, model, {**facts, **formats.write_text_files(trainer, model, folder)}, entries)
        sync_tree(folder)
        failpoint("before_export")
        os.rename(folder, path)
    sync_folder(parent)
    return Exported(path, tuple(map(str, model.inputs)), tuple(map(str, model.outputs)), checks)


def _checked(path: Path, to: Sequence[str], weights: str, batch: int | None, tolerance: float | None) -> list[str]:
    """The formats, in the order in which they are written; raises what is wrong before anything is computed."""
    wanted = [to] if isinstance(to, str) else list(to)
    for name in wanted:
        if name not in FORMATS:
            raise ValueError(f"{name!r} is no format. Formats: {', '.join(FORMATS)}.{suggestion(name, FORMATS)}")
    if not wanted:
        raise ValueError(f"`to` names no format. Formats: {', '.join(FORMATS)}.")
    if weights not in get_args(WeightsPlace):
        raise ValueError(f"`weights` must be one of {', '.join(get_args(WeightsPlace))}, got {weights!r}.")
    if batch is not None and batch < 1:
        raise ValueError(f"`batch` must be at least 1, or None for any size, got {batch}.")
    if tolerance is not None and (not tolerance >= 0 or math.isinf(tolerance)):
        raise ValueError(f"`tolerance` must be a number of at least 0, got {tolerance}.")
    for package in ("flatbuffers", "safetensors"):
        require_extra(package, "export")
    if os.path.lexists(path):
        raise FileExistsError(f"{path} already exists. Choose another folder, or delete it.")
    return [name for name in FORMATS if name in wanted]


def _tolerance(trainer: Any, state: TrainState, name: str) -> float:
    dtypes = {Precision.named(trainer.config.precision).compute or jnp.float32}
    if name == "hf":  # of the weights alone
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(state.params) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    return HALF_TOLERANCE if any(jnp.dtype(one).itemsize < 4 for one in dtypes) else TOLERANCE
