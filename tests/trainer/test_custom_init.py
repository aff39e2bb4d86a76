"""A run of a trainer with an `__init__` of its own is loaded from its folder, or the error names what to pass."""

from dataclasses import dataclass
from typing import Any

import optax
import pytest
import yaml
from compoconf import register
from flax import nnx

from jax_trainer.callbacks import LambdaCallback, ModelCheckpoint, ModelCheckpointConfig
from jax_trainer.config.settings import SettingsError
from jax_trainer.testing import assert_same_bits, numbered_loader
from jax_trainer.trainer import (
    ImgClassifierTrainer,
    ImgClassifierTrainerConfig,
    TrainerConfig,
    TrainerModule,
    build,
    stored_run,
)
from tests.trainer.trainer_runs import EXAMPLE, LINEAR, SGD, STEPS, Plain, digits, first_examples, settings

WIDTH = EXAMPLE["x"].shape[-1]


def line(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(WIDTH, 4, rngs=rngs)


class WithDefault(Plain):
    """A parameter of its own, with a default."""

    def __init__(self, scale: float = 2.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale


class Required(WithDefault):
    """A parameter that must be given, in the place where others have their configuration."""

    def __init__(self, scale: float, **kwargs: Any) -> None:
        super().__init__(scale, **kwargs)


class MakesItsParts(WithDefault):
    """Knows its model, its optimizer and its example itself."""

    def __init__(self, scale: float = 2.0, **kwargs: Any) -> None:
        super().__init__(scale, model=line, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **kwargs)


class Closed(MakesItsParts):
    """Takes its configuration, and nothing else that it does not name."""

    def __init__(self, config: Any = None, scale: float = 2.0) -> None:
        super().__init__(scale, config=config)


class Forwards(WithDefault):
    """Passes on whatever it gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Overridable(WithDefault):
    """Has defaults for its parts."""

    def __init__(self, scale: float, **kwargs: Any) -> None:
        super().__init__(scale, **{"model": line, "optimizer": optax.sgd(0.1), "exmp_input": EXAMPLE, **kwargs})


class Named(WithDefault):
    """Names its model in its own way."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        super().__init__(model={"line": line}[model], **kwargs)


PARTS: dict[str, Any] = {"model": line, "optimizer": optax.sgd(0.1), "exmp_input": EXAMPLE}


def run_of(trainer: Any) -> Any:
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64))
    return trainer


def options(folder: Any, **changes: Any) -> dict[str, Any]:
    return settings(folder, train_epochs=1, callbacks={"saver": ModelCheckpointConfig()}, **changes)


def test_a_subclass_with_a_custom_init_is_loaded_with_its_arguments_and_weights(tmp_path_factory, subtests):
    for case, (kind, given, again) in zip(
        ["a default", "given", "required", "given again", "forwarded", "its parts", "default parts", "text"],
        [
            (WithDefault, PARTS, PARTS),
            (WithDefault, {**PARTS, "scale": 3.0}, PARTS),
            (Required, {**PARTS, "scale": 3.0}, PARTS),
            (Required, {**PARTS, "scale": 3.0}, {**PARTS, "scale": 4.0}),
            (Forwards, {**PARTS, "scale": 3.0}, PARTS),
            (MakesItsParts, {"scale": 3.0}, {}),
            (Overridable, {"scale": 3.0}, {}),
            (
                Named,
                {**PARTS, "model": "line", "scale": 3.0},
                {name: PARTS[name] for name in ("optimizer", "exmp_input")},
            ),
        ],
        strict=True,
    ):
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(case=case):
            trainer = run_of(kind(**given, **options(tmp_path)))
            loaded: Any = kind.load_from_checkpoint(trainer.folder.path, **again)
            assert loaded.scale == again.get("scale", given.get("scale", 2.0))
            assert loaded.folder.path == trainer.folder.path
            assert_same_bits(loaded.state.params, trainer.state.params)


class Conflicting(MakesItsParts):
    """Sets what its configuration has, too."""

    def __init__(self, scale: float, folder: Any = None, **kwargs: Any) -> None:
        keys = settings(folder, train_epochs=1)
        saver, watcher = ModelCheckpoint(monitor="val/loss", mode="max"), LambdaCallback()
        super().__init__(scale, callbacks=[saver, watcher], seed=1, **{**keys, **kwargs})


def test_the_stored_configuration_wins_over_keywords_of_the_constructor(tmp_path):
    path = run_of(Conflicting(3.0, folder=tmp_path, train_epochs=2)).folder.path
    loaded: Any = Conflicting.load_from_checkpoint(
        path, overrides=["trainer.seed=5", "trainer.callbacks.ModelCheckpoint.mode=min"]
    )
    assert (loaded.config.train_epochs, loaded.config.seed, loaded.scale) == (2, 5, 3.0)
    assert loaded.config.saver.mode == "min"
    run_of(loaded)
    assert list(loaded.callbacks) == ["ModelCheckpoint", "LambdaCallback"]


@dataclass
class ScaledConfig(ImgClassifierTrainerConfig):
    """Nothing of its own."""


@register
class Scaled(ImgClassifierTrainer):
    """A registered trainer with an argument of its own."""

    config: ScaledConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: Any, scale: float, widths: tuple[int, ...] = (), **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.scale, self.widths = scale, widths


def test_a_configured_run_is_loaded_from_its_folder_alone(tmp_path):
    parts = {"model_config": LINEAR["nnx"](num_classes=10), "optimizer_config": SGD, "dataset": digits()}
    trainer: Any = Scaled(ScaledConfig(**settings(tmp_path, max_steps=1)), 3.0, (4, 5), **parts)
    trainer.train_model(digits().train_loader)
    trainer.save_model()
    loaded: Any = TrainerModule.load_from_checkpoint(trainer.folder.path)
    assert (type(loaded), loaded.scale, loaded.widths) == (Scaled, 3.0, (4, 5))
    assert_same_bits(loaded.state.params, trainer.state.params)
    overrides = ["arguments.scale=7.0", f"trainer.logger.log_dir={tmp_path}"]
    assert build(stored_run(trainer.folder, overrides).value).scale == 7.0
    assert trainer.configs.items() <= loaded.configs.items()


def test_a_subclass_that_takes_nothing_but_its_configuration_is_loaded_too(tmp_path):
    trainer = run_of(MakesItsParts(**options(tmp_path)))
    loaded = Closed.load_from_checkpoint(trainer.folder.path)
    assert loaded.folder is not None and loaded.folder.path == trainer.folder.path
    assert_same_bits(loaded.state.params, trainer.state.params)
    other = line(nnx.Rngs(5))
    assert Closed.load_from_checkpoint(trainer.folder.path, model=other)._model.model is other  # not that of the class


class Objects(MakesItsParts):
    """Takes what a file can have, and what it cannot."""

    def __init__(self, notes: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.notes = notes


def test_an_argument_is_loaded_exactly_or_must_be_passed_again(tmp_path_factory, subtests):
    for notes in [
        {"a": (1, 2.5), "b": [None, True]},
        {1: "x"},
        float("nan"),
        "a ${reference}",
        {"a.b": 1},
        print,
        "x" * 9999,
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(notes=notes):
            trainer = run_of(Objects(notes, **options(tmp_path)))
            stored = yaml.safe_load(trainer.folder.config_file.read_text())
            if is_stored := "not_stored" not in stored:
                assert repr(Objects.load_from_checkpoint(trainer.folder.path).notes) == repr(notes)
            else:
                assert stored["not_stored"] == ["notes"] and "notes" not in stored.get("arguments", {})
                with pytest.raises(SettingsError, match="`notes`.*again"):
                    Objects.load_from_checkpoint(trainer.folder.path)
                assert Objects.load_from_checkpoint(trainer.folder.path, notes=notes).notes is notes
            assert is_stored == (notes is not print and "a.b" not in str(notes) and len(str(notes)) < 9999)


def test_secret_arguments_are_not_stored(tmp_path):
    class Secret(MakesItsParts):
        def __init__(self, api_key: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)

    folder = run_of(Secret(api_key="hunter2hunter2", **options(tmp_path))).folder.path
    assert not [file for file in folder.rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()]
    with pytest.raises(SettingsError, match="`api_key`.*again"):
        Secret.load_from_checkpoint(folder)
    Secret.load_from_checkpoint(folder, api_key="hunter2hunter2")


def test_what_a_subclass_needs_and_no_run_stores_is_named(tmp_path):
    trainer = run_of(Plain(**PARTS, **options(tmp_path)))
    with pytest.raises(TypeError, match="`Required`.*'scale'.*load_from_checkpoint"):
        Required.load_from_checkpoint(trainer.folder.path, **PARTS)


def test_an_argument_that_the_class_does_not_have_is_refused(tmp_path_factory, subtests):
    for kind, wrong, match in [
        (MakesItsParts, {"train_epochs": 5}, "`train_epochs`.*overrides=.'trainer.train_epochs=5'"),
        (MakesItsParts, {"wich": "best"}, "wich"),
        (Closed, {"wich": "best"}, "`Closed`.*'wich'"),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(kind=kind, wrong=wrong, match=match):
            trainer = run_of(MakesItsParts(**options(tmp_path)))
            with pytest.raises(TypeError, match=match):
                kind.load_from_checkpoint(trainer.folder.path, **wrong)


def test_a_trainer_without_an_init_of_its_own_stores_no_arguments(tmp_path):
    trainer = Plain(TrainerConfig(**settings(tmp_path)), LINEAR["nnx"](), SGD, EXAMPLE)
    assert trainer.configs.keys() == {"trainer", "model", "optimizer"}
