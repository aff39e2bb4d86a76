"""A class of the user's under a name that we have too is the one that is used, in every style and after a resume."""

import copy
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compoconf import Registry, parse_config, register
from flax import nnx

from jax_trainer.adapters import build_model
from jax_trainer.callbacks import Callback, EarlyStopping, EarlyStoppingConfig
from jax_trainer.checkpoint.folder import RunFolder
from jax_trainer.config import ConfigError, config_from, dump_config, import_user_code
from jax_trainer.config.registration import NameTakenError, full_name, implementation_of
from jax_trainer.config.settings import classes_in, config_of
from jax_trainer.models import CNN, CNNConfig
from jax_trainer.tools.cli import main
from jax_trainer.trainer import Experiment, ImgClassifierTrainer, TrainerConfig, TrainerModule, stored_run
from jax_trainer.trainer.experiment import stored_as

OWN = """
from dataclasses import dataclass
from compoconf import register
import jax_trainer.callbacks, jax_trainer.datasets.examples, jax_trainer.logger.jsonl, jax_trainer.models
import jax_trainer.optimizer, jax_trainer.trainer
"""
KINDS = {  # a class of ours of every kind that a file can name: where it is, and where in an experiment
    "CNN": ("jax_trainer.models", "model"),
    "ImgClassifierTrainer": ("jax_trainer.trainer", "trainer"),
    "EarlyStopping": ("jax_trainer.callbacks", "trainer.callbacks.EarlyStopping"),
    "DigitsDataset": ("jax_trainer.datasets.examples", "dataset"),
    "AdamW": ("jax_trainer.optimizer", "optimizer"),
    "CosineSchedule": ("jax_trainer.optimizer", "optimizer.learning_rate"),
    "GradClipNorm": ("jax_trainer.optimizer", "optimizer.transforms.clip"),
    "JSONLToolLogger": ("jax_trainer.logger", "trainer.logger.tool_config"),
}
EXPERIMENT: dict[str, Any] = {
    "trainer": {
        "class_name": "ImgClassifierTrainer",
        "train_epochs": 1,
        "max_steps_per_epoch": 2,
        "num_classes": 10,
        "callbacks": {"EarlyStopping": {"monitor": "val/loss"}, "ModelCheckpoint": {"monitor": "val/loss"}},
        "logger": {"tool_config": {"class_name": "JSONLToolLogger"}},
    },
    "model": {"class_name": "CNN", "channels": [4], "hidden": 8},
    "optimizer": {
        "class_name": "AdamW",
        "learning_rate": {"class_name": "CosineSchedule", "init_value": 1e-3},
        "transforms": {"clip": {"class_name": "GradClipNorm", "max_norm": 1.0}},
    },
    "dataset": {"class_name": "DigitsDataset", "global_batch_size": 32},
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing that was imported or registered stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = {config_of(cls): config_of(cls).class_name for cls in Registry.implementations()}  # type: ignore[attr-defined]
    monkeypatch.setattr(Registry, "_registries", copy.deepcopy(Registry._registries))
    modules = set(sys.modules)
    yield
    for config, name in known.items():
        config.class_name = name  # type: ignore[attr-defined]
    for name in [name for name in sys.modules if name not in modules and name.startswith("own_")]:
        del sys.modules[name]


def own_file(*names: str, module: str = "own_parts_here", body: str = "    pass") -> Path:
    """A file with a class of the user's for each of these names of ours, which derives from ours."""
    places = {name: KINDS[name][0] if name in KINDS else "jax_trainer.models" for name in names}
    classes = (f"@register\nclass {name}({place}.{name}):\n{body}\n" for name, place in places.items())
    file = Path(f"{module}.py")
    file.write_text(OWN + "\n".join(classes))
    return file


def classes_of(data: dict[str, Any]) -> dict[str, str]:
    return {path: full_name(cls) for path, cls in classes_in(config_from(data, Experiment))}


@pytest.mark.parametrize("name", KINDS)
def test_a_class_of_yours_under_a_name_of_ours_is_the_one_that_a_file_names(
    name: str, caplog: pytest.LogCaptureFixture
):
    path = KINDS[name][1]
    ours = classes_of(EXPERIMENT)[path]
    assert ours.startswith("jax_trainer.")
    import_user_code(own_file(name))
    assert classes_of(EXPERIMENT)[path] == f"own_parts_here.{name}"
    [line] = [record.getMessage() for record in caplog.records]
    assert f"own_parts_here.{name}" in line and ours in line


SECTIONS: dict[str, dict[str, Any] | None] = {
    "ModelCheckpoint": {"monitor": "val/acc"},
    "LearningRateMonitor": {"every_n_epochs": 1},
    "DisableGC": {},
    "ThroughputMonitor": None,
}


LOADING = (parse_config, lambda root, data: config_from(data, root))  # in Python, and as from a file


def test_a_key_that_names_a_callback_means_it_with_any_section():
    for name, section in SECTIONS.items():
        data = {"train_epochs": 1, "callbacks": {name: section, "other": {"class_name": "EarlyStopping"}}}
        for load in LOADING:
            config: Any = load(TrainerConfig, data)
            assert [one.class_name for one in config.callbacks.values()] == [name, "EarlyStopping"]


def test_a_key_names_one_of_two_classes_that_share_a_configuration():
    own = register(type("OwnStopping", (EarlyStopping,), {"__module__": "own_stopping"}))
    data = {"train_epochs": 1, "callbacks": {name: {"monitor": "val/acc"} for name in ("EarlyStopping", "OwnStopping")}}
    for load in LOADING:
        config: Any = load(TrainerConfig, data)
        assert [*map(implementation_of, config.callbacks.values())] == [EarlyStopping, own]


def test_a_section_that_several_classes_could_have_is_refused():
    for load in LOADING:
        with pytest.raises(ValueError, match=r"(?s)mine.*class_name.*EarlyStopping.*ModelCheckpoint"):
            load(TrainerConfig, {"train_epochs": 1, "callbacks": {"mine": {"monitor": "val/acc"}}})


def test_a_class_of_ours_that_is_imported_later_does_not_take_the_name_back(caplog: pytest.LogCaptureFixture):
    import_user_code(own_file("CNN"))
    register(type("CNN", (CNN,), {"__module__": "jax_trainer.models.later"}))  # as a module of ours would
    assert classes_of(EXPERIMENT)["model"] == "own_parts_here.CNN"


def test_a_linen_model_of_yours_takes_the_name_of_our_nnx_model():
    Path("own_linen.py").write_text(
        "from dataclasses import dataclass\nfrom compoconf import register\n"
        "from jax_trainer.adapters import BaseModelConfig, BaseModelLinen\n"
        "@dataclass\nclass CNNConfig(BaseModelConfig):\n    hidden: int = 1\n    channels: tuple[int, ...] = (1,)\n"
        "@register\nclass CNN(BaseModelLinen):\n    config: CNNConfig\n"
    )
    import_user_code("own_linen.py")
    assert classes_of(EXPERIMENT)["model"] == "own_linen.CNN"


def test_our_configuration_in_python_still_makes_our_class():
    Path("own_model.py").write_text(
        "from dataclasses import dataclass\nfrom compoconf import register\nimport jax_trainer.models\n"
        "@dataclass\nclass CNNConfig(jax_trainer.models.CNNConfig):\n    own: int = 1\n"
        "@register\nclass CNN(jax_trainer.models.CNN):\n    config: CNNConfig\n"
    )
    import_user_code("own_model.py")
    own = sys.modules["own_model"]
    for config, cls in ((CNNConfig(channels=(4,)), CNN), (own.CNNConfig(channels=(4,)), own.CNN)):
        built = nnx.eval_shape(lambda config=config: build_model(config, np.zeros((1, 8, 8, 1)), nnx.Rngs(0)))
        assert type(built) is cls
        assert f"class_name: {full_name(cls)}" in dump_config({"model": config})


def test_ours_can_be_asked_for_by_its_path_whether_it_has_lost_its_name_or_not():
    by_path = {**EXPERIMENT, "model": {**EXPERIMENT["model"], "class_name": "jax_trainer.models.cnn.CNN"}}
    assert classes_of(by_path)["model"] == "jax_trainer.models.cnn.CNN"
    import_user_code(own_file("CNN"))
    assert classes_of(by_path)["model"] == "jax_trainer.models.cnn.CNN"


def test_two_classes_of_yours_with_one_name_are_refused_with_both_paths():
    import_user_code(own_file("CNN", module="own_one"))
    with pytest.raises(NameTakenError, match=r"CNN.*own_one\.CNN.*own_two\.CNN"):
        import_user_code(own_file("CNN", module="own_two"))


def test_a_module_that_is_reloaded_brings_its_new_classes():
    own_file("EarlyStopping")
    import_user_code("own_parts_here")
    module = sys.modules["own_parts_here"]
    for _ in range(2):
        module = importlib.reload(module)
        assert Registry.get_class(Callback, "EarlyStopping") is module.EarlyStopping  # type: ignore[arg-type]


def test_a_cell_that_runs_again_brings_its_new_class():
    def cell() -> type:
        @register
        class OwnCell(Callback):
            config: EarlyStoppingConfig

        return OwnCell

    cell()
    last = cell()
    assert Registry.get_class(Callback, "OwnCell") is last  # type: ignore[arg-type]


def test_a_class_of_a_script_has_the_path_by_which_it_would_be_imported(monkeypatch: pytest.MonkeyPatch):
    own = type("Own", (), {"__module__": "__main__"})
    for module, path in (
        (SimpleNamespace(__file__="/home/me/train.py", __spec__=None), "train.Own"),
        (SimpleNamespace(__file__="/x/models.py", __spec__=SimpleNamespace(name="my.models")), "my.models.Own"),
        (SimpleNamespace(), "__main__.Own"),  # a notebook
    ):
        monkeypatch.setitem(sys.modules, "__main__", module)
        assert full_name(own) == path


def test_a_trainer_of_yours_that_is_not_registered_is_not_stored_as_ours_of_that_name():
    own = type("ImgClassifierTrainer", (TrainerModule,), {"__module__": "own_script"})
    assert stored_as(own) is TrainerModule
    assert stored_as(ImgClassifierTrainer) is ImgClassifierTrainer


def test_check_shows_the_module_path_of_every_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "own.yaml").write_text(dump_config(config_from(EXPERIMENT, Experiment)))
    assert main(["check", "own.yaml", str(own_file("CNN", "AdamW")), "trainer.callbacks.EarlyStopping.patience=2"]) == 0
    said = capsys.readouterr()
    for path in ("own_parts_here.CNN", "own_parts_here.AdamW", "jax_trainer.trainer.img_classifier"):
        assert path in said.out
    assert said.err.count("own_parts_here.CNN") == 1


def test_a_run_is_resumed_with_the_class_that_it_was_trained_with(tmp_path: Path):
    quick = {"model": {"class_name": "MLP", "hidden": []}, "optimizer": {"class_name": "SGD", "learning_rate": 0.1}}
    (tmp_path / "own.yaml").write_text(dump_config(config_from({**EXPERIMENT, **quick}, Experiment)))
    assert main(["train", "own.yaml", "-q"]) == 0
    [ours] = (tmp_path / "runs" / "MLP").iterdir()
    import_user_code(own_file("MLP"))
    with pytest.raises(ConfigError, match=r"model\.class_name: .*jax_trainer\.models\.mlp\.MLP"):
        stored_run(RunFolder.open(ours))
    assert main(["train", "own.yaml", "-q"]) == 0
    [own] = set((tmp_path / "runs" / "MLP").iterdir()) - {ours}
    assert "class_name: own_parts_here.MLP" in (own / "config.yaml").read_text()
    assert implementation_of(stored_run(RunFolder.open(own)).value.model).__module__ == "own_parts_here"
    asked = stored_run(RunFolder.open(ours), ["model.class_name=MLP"])  # by a person, who may mean another class
    assert implementation_of(asked.value.model).__module__ == "own_parts_here"
    for registry in Registry._registries.values():  # another process, which has not imported it
        for name in [name for name, cls in registry.items() if cls.__module__ == "own_parts_here"]:
            del registry[name]
    with pytest.raises(ConfigError, match=r"model\.class_name: .*own_parts_here\.MLP.*--import"):
        stored_run(RunFolder.open(own))
