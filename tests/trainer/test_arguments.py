"""A trainer in plain Python: a model and an optax optimizer, and no configuration."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_trainer.callbacks import LambdaCallback, ModelCheckpointConfig
from jax_trainer.config import ConfigError
from jax_trainer.config.settings import SettingsError
from jax_trainer.models import SimpleClassifierConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.testing import assert_same_bits, numbered_loader
from jax_trainer.trainer import TrainerConfig
from tests.trainer.trainer_runs import EXAMPLE, STEPS, Plain, first_examples, settings

FEATURES, CLASSES = EXAMPLE["x"].shape[-1], 4


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(FEATURES, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(CLASSES, name="out")(x)


def sized(exmp_input: Any, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(exmp_input.shape[-1], CLASSES, rngs=rngs)


class OtherwiseNamed(Net):
    def __init__(this, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)


KINDS: dict[str, Any] = {
    "an nnx module": lambda: Net(nnx.Rngs(0)),
    "a class of nnx modules": lambda: Net,
    "a class that calls its objects otherwise": lambda: OtherwiseNamed,
    "a function that builds one": lambda: sized,
    "a linen module": Dense,
}


def plain(folder: Any, model: Any, **changes: Any) -> Any:
    options = {**settings(folder), "train_epochs": 2, **changes}
    return Plain(model=model, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **options)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind.endswith(" module") else kind for kind in KINDS]
)
def test_a_model_and_an_optimizer_are_all_it_needs(kind, tmp_path):
    trainer = plain(tmp_path, KINDS[kind]())
    results = trainer.train_model(numbered_loader(32 * STEPS), first_examples(64), first_examples(32))
    assert results[2]["val/loss"] < results[1]["val/loss"]
    assert trainer.model_mode == ("linen" if "linen" in kind else "nnx")
    assert int(trainer.state.step) == 2 * STEPS


def test_an_nnx_module_keeps_its_weights_and_training_begins_from_them(tmp_path):
    module = Net(nnx.Rngs(5))
    first = jnp.copy(module.out.kernel[...])
    trainer = plain(tmp_path, module)
    assert_same_bits(trainer.state.params["out"]["kernel"], first)
    trainer.train_model(numbered_loader(32 * STEPS))
    assert_same_bits(module.out.kernel[...], first)
    assert not np.array_equal(trainer.bind_model().out.kernel[...], first)


def test_training_matches_a_hand_written_optax_loop(tmp_path):
    trainer = plain(tmp_path, Dense(), train_epochs=1)
    params, tx = trainer.state.params, optax.sgd(0.1)
    opt_state = tx.init(params)
    loader = numbered_loader(32 * STEPS)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = batch["x"] @ params["out"]["kernel"] + params["out"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    @jax.jit
    def updated(params: Any, opt_state: Any, batch: Any) -> Any:
        updates, opt_state = tx.update(jax.grad(loss)(params, batch), opt_state)
        return optax.apply_updates(params, updates), opt_state

    for batch in loader.epoch(1):
        params, opt_state = updated(params, opt_state, batch)
    trainer.train_model(numbered_loader(32 * STEPS))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), trainer.state.params, params)


def test_such_a_run_is_loaded_with_the_same_objects(tmp_path):
    trainer = plain(tmp_path, Dense())
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64))
    trainer.save_model()
    folder = trainer.folder.path
    loaded = Plain.load_from_checkpoint(folder, EXAMPLE, model=Dense(), optimizer=optax.sgd(0.1))
    assert_same_bits(loaded.state.params, trainer.state.params)
    with pytest.raises(SettingsError, match="pass `model` again"):
        Plain.load_from_checkpoint(folder, EXAMPLE, optimizer=optax.sgd(0.1))
    assert json.loads((folder / "hparams.json").read_text())["trainer.train_epochs"] == 2


def test_wrong_arguments_are_refused_at_once(subtests):
    for given, message in [
        ({"model": Net}, "Pass either `optimizer_config` or `optimizer`"),
        ({"optimizer": optax.sgd(0.1)}, "Pass either `model_config` or `model`"),
        ({"model": Net, "model_config": SimpleClassifierConfig(), "optimizer": optax.sgd(0.1)}, "not both"),
        ({"model": Net, "optimizer": 0.1}, "`optimizer`.*0.1.*optax.adam"),
        ({"model": 3, "optimizer": optax.sgd(0.1)}, "The model is a int"),
        ({"model": Dense, "optimizer": optax.sgd(0.1)}, "linen class Dense"),
        ({"model": Net, "optimizer": optax.sgd(0.1), "exmp_input": None}, "Pass `exmp_input`, an example batch"),
        (
            {"config": TrainerConfig(), "model": Net, "optimizer": optax.sgd(0.1), "train_epochs": 2},
            "`config`.*train_epochs",
        ),
        ({"model": Net, "optimizer": optax.sgd(0.1), "train_epoch": 2}, "train_epoch"),
    ]:
        with subtests.test(given=given, message=message), pytest.raises(TypeError, match=message):
            Plain(**{"exmp_input": EXAMPLE, **given})


def test_parts_may_have_their_keys_as_in_a_file(tmp_path):
    parts = {"model_config": {"class_name": "SimpleClassifier", "c_hid": 4}, "exmp_input": EXAMPLE}
    trainer: Any = Plain(**parts, optimizer_config={"class_name": "AdamW", "b1": 0.8}, **settings(tmp_path))
    assert (trainer.optimizer_config, trainer.model_config) == (AdamWConfig(b1=0.8), SimpleClassifierConfig(c_hid=4))
    with pytest.raises(ConfigError, match="optimizer.class_name.*AdamX"):
        Plain(**parts, optimizer_config={"class_name": "AdamX"}, **settings(tmp_path))


def test_the_log_folder_of_a_run_is_named(tmp_path):
    with pytest.raises(AttributeError, match="`trainer.folder.path`"):
        plain(tmp_path, Dense()).log_dir  # noqa: B018 - reading it raises


def test_callbacks_are_objects_or_configurations_in_a_list_or_by_name(tmp_path):
    saver, watcher = ModelCheckpointConfig(monitor="val/acc", mode="max"), LambdaCallback()
    listed = plain(tmp_path, Dense(), callbacks=[saver, watcher, LambdaCallback()])
    assert listed.config.callbacks == {"ModelCheckpoint": saver}  # stored with the run
    listed.train_model(numbered_loader(32 * STEPS), first_examples(64), num_epochs=1)
    assert list(listed.callbacks) == ["ModelCheckpoint", "LambdaCallback", "LambdaCallback_2"]
    assert any(listed.folder.checkpoints.iterdir())
    by_name = plain(tmp_path, Dense(), callbacks={"best": saver, "mine": watcher})
    assert by_name.config.callbacks == {"best": saver}
    with pytest.raises(TypeError, match="The callback 'int' is a int. .*configuration"):
        plain(tmp_path, Dense(), callbacks=[3])


def test_configurations_and_objects_can_be_mixed(tmp_path):
    options = settings(tmp_path)
    mixed = Plain(TrainerConfig(**options), None, AdamWConfig(), EXAMPLE, model=Dense())
    assert "model" not in mixed.configs and mixed.configs["optimizer"] is mixed.optimizer_config


def test_a_property_of_a_trainer_raises_its_own_attribute_error(tmp_path):
    class Wrong(Plain):
        @property
        def vocabulary(self) -> int:
            dataset: Any = self.dataset
            return dataset.token_count

    trainer = Wrong(model=Net, optimizer=optax.sgd(0.1), exmp_input=EXAMPLE, **settings(tmp_path))
    with pytest.raises(AttributeError, match="token_count"):
        trainer.vocabulary  # noqa: B018 - reading it raises
