"""`import_pretrained`: writes the weights of a pretrained model as a run folder, from which trainings start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compoconf import Registry

from jax_trainer.adapters import handle_of
from jax_trainer.checkpoint.folder import CONFIG, RECORD, RunFolder
from jax_trainer.checkpoint.index import read_saved
from jax_trainer.checkpoint.restore import stored_in
from jax_trainer.checkpoint.store import CheckpointStore
from jax_trainer.config.settings import config_of
from jax_trainer.core import Batch, TrainState
from jax_trainer.core.random import key_data
from jax_trainer.datasets import Position, SupervisedBatch
from jax_trainer.diagnostics.suggestions import checks_keywords
from jax_trainer.models.pretrained.files import PretrainedError, TensorFiles, copy_text_files
from jax_trainer.models.pretrained.mapping import MappingLike, known_mappings
from jax_trainer.tools.pretrained.configs import example_of, hf_config, model_config, select_mapping
from jax_trainer.tools.pretrained.loading import Source, fields_of
from jax_trainer.trainer.base import BaseTrainer
from jax_trainer.trainer.experiment import configs_of, stored_files, trainer_class
from jax_trainer.trainer.run_folder import stored_checkpoint

_EXAMPLES, _TOKENS = 8, 1024  # random ones; a longer context would take long to check


class Imported(NamedTuple):
    """An imported model.

    Args:
        folder: the run folder.
        mapping: name of the mapping.
        config: our configuration of the model.
        parameters: number of parameters.
    """

    folder: RunFolder
    mapping: str
    config: Any
    parameters: int


@checks_keywords
def import_pretrained(
    path: str | Path,
    output: str | Path,
    mapping: MappingLike | None = None,
    *,
    overrides: Sequence[str] = (),
    dtype: str = "float32",
    example: Batch = None,
) -> Imported:
    """Writes a pretrained model as a run folder, with its configuration and one checkpoint, at step 0.

    `TrainerModule.load_weights`, `load_from_checkpoint` and `trainer.init_from` in a file read it.

    Args:
        path: a folder with safetensors files and `config.json`, or a safetensors file.
        output: the folder to write, which must be new or empty.
        mapping: see `load_pretrained`.
        overrides: of our configuration, such as `model.dropout=0.1`.
        dtype: of the floats in the checkpoint.
        example: an input of the model, if the mapping has none and the model needs one.
    """
    files = TensorFiles.open(path)
    name, rows = select_mapping(mapping, files.config, files.path)
    config = model_config(files.config or {}, name, rows, overrides)
    if (layers := getattr(config, "layers", 0)) > len(files.files):  # before a model of so many is built
        raise PretrainedError(
            f"{files.path} has {len(files.files)} tensors, and `layers` is {layers:,}: it lacks some."
        )
    handle = handle_of(config)
    batch = example_of(rows, files.config) if example is None else example
    weights = fields_of(*handle.initial_weights(batch))
    loaded = Source(files, name, rows, config).load(weights, dtype=jnp.dtype(dtype))
    state = TrainState(step=jnp.zeros((), jnp.int32), opt_state={}, rng=key_data(jax.random.key(0)), extra={}, **loaded)
    output = Path(output).absolute()
    folder = RunFolder.create(output.parent, output.name, "")
    kind = Registry.get_class(BaseTrainer, rows.trainer)  # type: ignore[arg-type]  # compoconf annotates an instance
    configs = configs_of(kind, config_of(kind)(), config, None, None, {})
    CheckpointStore(folder.checkpoints).save(state, Position(), {})
    copy_text_files(files.path, folder.path)
    for file, text in stored_files(configs)["files"].items():
        folder.write_text(file, text)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(loaded["params"]))
    return Imported(folder, name, config, parameters)


def imported_parts(path: str | Path) -> dict[str, Any]:
    """What the trainer of a folder of `import_pretrained` lacks: random inputs, and an optimizer; {} for other runs.

    Args:
        path: a run folder, or one of its checkpoints.
    """
    path = Path(path)
    folder = path if (path / CONFIG).is_file() else path.parent.parent
    if (folder / RECORD).exists() or not (folder / CONFIG).is_file():
        return {}
    run, place = stored_checkpoint(path, "latest")
    model: Any = run.model
    name = getattr(model, "class_name", None)
    rows = next((one for one in known_mappings().values() if one.model == name), None)
    is_base = trainer_class(run).batch_to_input is BaseTrainer.batch_to_input  # which has no inputs
    if run.dataset is not None or rows is None or is_base:
        return {}
    rng = np.random.default_rng(0)
    if hasattr(model, "vocab_size"):
        inputs = rng.integers(0, model.vocab_size, (_EXAMPLES, min(model.context, _TOKENS)), np.int32)
    else:
        content = hf_config(model, rows, stored_in(place, read_saved(place)[1]))
        inputs = rng.normal(size=(_EXAMPLES, *example_of(rows, content).shape[1:])).astype(np.float32)
    targets = np.zeros(inputs.shape[: inputs.ndim if inputs.dtype == np.int32 else 1], np.int32)
    return {"exmp_input": SupervisedBatch.of(inputs, targets), "optimizer": optax.set_to_zero()}
