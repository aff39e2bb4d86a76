"""A run of a trainer with an `__init__` of its own is loaded like any other, or the error names what to pass."""

from typing import Any

import optax
import pytest
from flax import nnx
from trainer_runs import EXAMPLE, STEPS, Plain, first_examples, settings

from jax_trainer.callbacks import ModelCheckpointConfig
from jax_trainer.testing import assert_same_bits, numbered_loader

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


PARTS: dict[str, Any] = {"model": line, "optimizer": optax.sgd(0.1), "exmp_input": EXAMPLE}


def run_of(trainer: Any) -> Any:
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64))
    return trainer


def options(folder: Any) -> dict[str, Any]:
    return settings(folder, train_epochs=1, callbacks={"saver": ModelCheckpointConfig()})


@pytest.mark.parametrize(
    ("kind", "given", "again"),
    [
        (WithDefault, PARTS, PARTS),
        (WithDefault, {**PARTS, "scale": 3.0}, {**PARTS, "scale": 3.0}),
        (Required, {**PARTS, "scale": 3.0}, {**PARTS, "scale": 3.0}),
        (MakesItsParts, {"scale": 3.0}, {"scale": 3.0}),
    ],
    ids=["a default", "forwarded", "required", "makes its parts"],
)
def test_a_subclass_with_a_custom_init_is_loaded_with_its_weights(kind, given, again, tmp_path):
    trainer = run_of(kind(**given, **options(tmp_path)))
    loaded = kind.load_from_checkpoint(trainer.folder.path, **again)
    assert loaded.scale == given.get("scale", 2.0)
    assert loaded.folder.path == trainer.folder.path
    assert_same_bits(loaded.state.params, trainer.state.params)


def test_a_subclass_that_takes_nothing_but_its_configuration_is_loaded_too(tmp_path):
    trainer = run_of(MakesItsParts(**options(tmp_path)))
    loaded = Closed.load_from_checkpoint(trainer.folder.path)
    assert loaded.folder is not None and loaded.folder.path == trainer.folder.path
    assert_same_bits(loaded.state.params, trainer.state.params)
    with pytest.raises(TypeError, match="`Closed.__init__` has no parameter `model`"):
        Closed.load_from_checkpoint(trainer.folder.path, model=line)


def test_what_a_subclass_needs_and_no_run_stores_is_named(tmp_path):
    trainer = run_of(WithDefault(**PARTS, **options(tmp_path)))
    with pytest.raises(TypeError, match=r"`Required.__init__` requires `scale`.*load_from_checkpoint"):
        Required.load_from_checkpoint(trainer.folder.path, **PARTS)
