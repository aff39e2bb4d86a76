"""Runs whose checkpoints an earlier version wrote."""

import json
from pathlib import Path
from typing import Any

import optax
import pytest
from flax import linen as nn

from jax_trainer import fit
from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.json_codec import encoded
from jax_trainer.checkpoint.manifest import MANIFEST, write_manifest
from jax_trainer.core.failpoints import FaultInjected
from jax_trainer.runs.history import HISTORY, History
from jax_trainer.testing import assert_same_bits, fault, numbered_data

OLD_NAMES = {"data_state": "feed_state", "evaluated_step": "judged_step", "metrics_state": "meter"}


def trained(folder: Path, **options: Any) -> Any:
    data = numbered_data(64)
    arrays = data["x"], data["y"]
    saving = ModelCheckpointConfig(every_n_steps=3)
    return fit(
        nn.Dense(4, kernel_init=nn.initializers.zeros),
        arrays,
        arrays,
        loss_fn=optax.softmax_cross_entropy_with_integer_labels,
        optimizer=optax.sgd(0.1, momentum=0.9),
        num_epochs=3,
        batch_size=16,
        log_dir=folder,
        callbacks={"ModelCheckpoint": saving},
        tensorboard=False,
        progress=False,
        **options,
    )


def as_format_2(checkpoint: Path, *, at_first: bool) -> None:
    """Rewrites a checkpoint as an earlier version wrote it: metrics in the record; at first, keys had other names."""
    file = checkpoint / "checkpoint.json"
    content = json.loads(file.read_text()) | {"format": 2}
    history = History(checkpoint.parents[1] / HISTORY)
    history.load_state_dict(content["callbacks"]["run/history"])
    inline = {"training": history.training, "validations": [list(one) for one in history.validations]}
    content["callbacks"]["run/history"] = encoded({**inline, "tests": history.tests})
    if at_first:
        loop = content["run"]["loop"]
        del loop["edits"]
        content["run"]["loop"] = {OLD_NAMES.get(name, name): value for name, value in loop.items()}
        content = {OLD_NAMES.get(name, name): value for name, value in content.items()}
    file.write_text(json.dumps(content))
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint)


@pytest.mark.parametrize("at_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_with_checkpoints_of_format_2_resumes_exactly(tmp_path, at_first):
    straight = trained(tmp_path / "straight")
    with fault("step:raise:8"), pytest.raises(FaultInjected):
        trained(tmp_path / "ended")
    [checkpoints] = (tmp_path / "ended").rglob("checkpoints")
    for checkpoint in checkpoints.iterdir():
        as_format_2(checkpoint, at_first=at_first)
    (checkpoints.parent / HISTORY).unlink()
    resumed = trained(tmp_path / "ended", resume=checkpoints.parent)
    assert_same_bits(resumed.state.params, straight.state.params)
    assert list(resumed.history) == [1, 2, 3]
    for epoch in resumed.history:
        assert resumed.history[epoch]["val/loss"] == straight.history[epoch]["val/loss"]
