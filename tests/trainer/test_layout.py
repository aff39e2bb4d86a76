"""Which devices hold what: as a configuration says it, shown before a run, and changed between parts of one."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.config import ConfigError, config_from, dump_config
from jax_trainer.config.settings import SettingsError
from jax_trainer.logger import LoggerConfig
from jax_trainer.runs.sections import MeshConfig, ShardingConfig, ShardingRuleConfig, layout_for
from jax_trainer.sharding import Layout, LayoutError, make_mesh
from jax_trainer.trainer import TrainerConfig, build, load_experiment
from tests.trainer.trainer_runs import plain_for, train_plain, values

P = PartitionSpec
ALL = ShardingConfig(smallest=1)
EXPERIMENT = """\
trainer:
  train_epochs: 1
  class_name: ImgClassifierTrainer
  num_classes: 10
  mesh: {data: -1, fsdp: 4}
  sharding:
    rules:
      - {match: '.*out\\.kernel', axes: [null, [data]]}
      - {match: '.*kernel', axes: [fsdp, tensor]}
model: {class_name: MLP, num_classes: 10, hidden: [16]}
optimizer: {class_name: AdamW, learning_rate: 0.01}
dataset: {class_name: DigitsDataset, global_batch_size: 32}
"""


def experiment(folder: Path, *changes: str) -> Any:
    file = folder / "file.yaml"
    file.write_text(EXPERIMENT)
    return load_experiment(file, changes)


def test_a_file_configures_mesh_and_sharding(tmp_path):
    loaded = experiment(tmp_path)
    trainer = build(loaded.value)
    layout = trainer.program.layout
    assert dict(layout.mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    specs = {path: spec for path, spec in layout.param_specs(trainer.state.params).items() if "kernel" in path}
    assert sorted(specs.values(), key=str) == [P("fsdp"), P(None, "data")]
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(trainer.state)} == {layout.mesh}


def test_mesh_and_sharding_are_stored_as_configured(tmp_path):
    config = experiment(tmp_path).value.trainer
    assert config_from(yaml.safe_load(dump_config(config)), type(config)) == config
    assert config.sharding.rules[1] == ShardingRuleConfig(match=".*kernel", axes=("fsdp", "tensor"))


def test_wrong_sharding_is_reported_with_its_line_before_anything_runs(tmp_path, monkeypatch, subtests):
    monkeypatch.setattr(
        "jax_trainer.core.compile.StateFunction.__call__", lambda *_, **__: pytest.fail("a state was made")
    )
    for change, message in [
        ("trainer.mesh.data=3", r"mesh {data: 3, fsdp: 4, tensor: 1} needs 12 devices.* 8"),
        ("trainer.mesh.fsdp=-1", "-1"),
        ("trainer.mesh.tensor=0", "tensor"),
        ("trainer.mesh.model=2", "no key `model`"),
        ("num_gpus=4", "`num_gpus` is 4, but `trainer.mesh` has 8 devices"),
        ("trainer.sharding.fsdp=on", "one of auto, off"),
        ("trainer.sharding.rules.0.match='('", "regular expression"),
        ("trainer.sharding.rules.0.match='.*kernel'", "Two rules.*'.*kernel'"),
        ("trainer.sharding.rules.0.axes=[model]", r"'model'.*data, fsdp, tensor"),
        ("trainer.sharding.rules.0.match=blocks", "'blocks' matches no parameter"),
        ("trainer.sharding.rules.0.axes=[null, fsdp]", r"kernel` \[16, 10\] along dimension 1.*10 is not.*by 4"),
    ]:
        with subtests.test(change), pytest.raises((ConfigError, SettingsError), match=message) as found:
            build(experiment(tmp_path, change).value).dry_run()
        if isinstance(found.value, SettingsError):
            assert change.startswith(found.value.problems[0][0])


def test_a_mesh_is_set_once(tmp_path):
    with pytest.raises(SettingsError, match="`mesh`.*Leave out one"):
        layout_for(TrainerConfig(mesh=MeshConfig(fsdp=2)), make_mesh())


def meshes() -> dict[str, Any]:
    mesh = make_mesh(fsdp=4)
    return {
        "mesh": mesh,
        "sizes": {"fsdp": 4},
        "layout": Layout(mesh=mesh),
        "shardings": (NamedSharding(mesh, P()), NamedSharding(mesh, P(("data", "fsdp")))),
    }


def test_a_trainer_takes_a_mesh_in_any_form(tmp_path_factory, subtests):
    for kind in meshes():
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(kind=kind):
            layout = plain_for("nnx", tmp_path, mesh=meshes()[kind]).program.layout
            assert dict(layout.mesh.shape) == {"data": 2, "fsdp": 4, "tensor": 1}
            assert layout.batch_axes == ("data", "fsdp")


def test_axes_about_which_the_compiler_may_not_decide_are_refused(tmp_path):
    with pytest.raises(LayoutError, match="Auto"):
        plain_for("nnx", tmp_path, mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,)))


def test_the_table_is_there_where_several_devices_are(tmp_path):
    assert plain_for("nnx", tmp_path).layout_table() is None
    table = plain_for("nnx", tmp_path, mesh={"data": 1, "fsdp": 8}, sharding=ALL).layout_table()
    assert table.shares["all"].per_device < 2 * table.shares["all"].ideal
    assert "fsdp" in table.text()


def on(count: int) -> Any:
    return None if count == 1 else make_mesh(data=1, fsdp=count, devices=jax.devices()[:count])


def trained(folder: Path, *counts: int) -> Any:
    """A run each of whose epochs is on so many devices; all of it in one folder."""
    run_folder: RunFolder | None = None
    trainer: Any = None
    for epoch, count in enumerate(counts, start=1):
        saver = {"saver": ModelCheckpointConfig()}
        logger = LoggerConfig(log_dir=str(folder), log_steps_every=1)
        trainer = plain_for("nnx", folder, mesh=on(count), callbacks=saver, logger=logger, sharding=ALL, ema=0.9)
        trainer.folder = run_folder
        train_plain(trainer, num_epochs=epoch, resume=run_folder is not None)
        assert trainer.folder is not None
        run_folder = RunFolder.open(trainer.folder.path)
    return trainer


@pytest.mark.parametrize(
    "counts",
    [(4, 1), *(pytest.param(counts, marks=pytest.mark.slow) for counts in ((8, 4, 2, 1, 8), (1, 8, 2, 4, 1)))],
    ids=str,
)
def test_a_run_resumes_on_more_or_fewer_devices(counts, tmp_path):
    moved = trained(tmp_path / "moved", *counts)
    stayed = plain_for("nnx", tmp_path, logger=LoggerConfig(log_dir=str(tmp_path), log_steps_every=1), ema=0.9)
    train_plain(stayed, num_epochs=len(counts))
    kernel = moved.state.params["out"]["kernel"]
    assert len(kernel.sharding.device_set) == counts[-1]
    mine, other = (list(values(trainer, "train/loss_step")) for trainer in (moved, stayed))
    assert len(mine) == len(other) > 3 * len(counts)
    np.testing.assert_allclose(mine, other, rtol=1e-5)
    assert other[-1] < 0.9 * other[0]


def test_defaults_are_one_device(tmp_path):
    assert TrainerConfig().mesh is None
    assert plain_for("linen", tmp_path).program.layout is None
