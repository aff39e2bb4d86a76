"""Numbers of numpy are numbers wherever one is given, and are stored as plain ones; an integer has 64 bits."""
# numbers that the annotations do not name are what is tested here
# pyright: reportArgumentType=false

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

from jax_trainer import TrainLoop, TrainTask, every_n_steps, fit, get_default_checkpointer, train_fn
from jax_trainer.config import ConfigError, config_from, dump_config, load_config
from jax_trainer.config.settings import AtLeast, Settings, SettingsError
from jax_trainer.datasets import ArrayLoader
from jax_trainer.datasets.arrays import Order
from jax_trainer.engine import Plan
from jax_trainer.optimizer import SGDConfig
from jax_trainer.testing import cross_entropy, numbered_loader
from jax_trainer.tools.tuning.space import read_space
from jax_trainer.trainer import TrainerConfig, TrainerModule
from tests.rows import each

ONES = {"int64": np.int64(2), "uint8": np.uint8(2), "0-d": np.array(2), "jax": jnp.asarray(2), "int": 2}


@dataclass
class NumbersConfig(Settings):
    """All kinds of numbers."""

    size: Annotated[int, AtLeast(1)] = 1
    rate: float | None = None
    flag: bool = False
    sizes: tuple[int, ...] = ()
    rates: dict[str, float] | None = None
    anything: Any = None


@each("kind", ONES)
def test_a_configuration_takes_it_and_stores_a_plain_number(kind: str):
    config = NumbersConfig(size=ONES[kind], rate=np.float32(0.5), flag=np.True_, sizes=(ONES[kind], 3),
                           rates={"a": np.float64(0.25)}, anything=[np.array(1.5)])  # fmt: skip
    assert config == NumbersConfig(2, 0.5, True, (2, 3), {"a": 0.25}, [1.5])
    assert [type(one) for one in (config.size, config.rate, config.flag, config.sizes[0])] == [int, float, bool, int]
    assert config_from(yaml.safe_load(dump_config(config)), NumbersConfig) == config
    assert config_from({"size": ONES[kind], "sizes": [ONES[kind]]}, NumbersConfig).sizes == (2,)


@each("value", [np.float32(1.5), np.array([1, 2]), np.True_, np.int64(-1), 1.0])
def test_a_bool_or_fraction_for_an_integer_is_refused(value: Any):
    with pytest.raises(SettingsError, match="`size`"):
        NumbersConfig(size=value)
    with pytest.raises(ValueError, match="`max_epochs`"):
        Plan(max_epochs=value)


@each("kind", ONES)
def test_plans_loaders_and_loops_take_it(kind: str):
    two = ONES[kind]
    assert type(Plan(max_epochs=two, max_steps=two, steps_per_call=two).max_epochs) is int
    assert type(Order(examples=4, batch_size=two, seed=two).seed) is int
    assert len(ArrayLoader(np.zeros(8), two, seed=two)) == 4
    assert every_n_steps(two)(lambda step, **_: None).every_n_steps == 2  # type: ignore[attr-defined]
    train_fn(fns=(lambda *_: (0.0, {}), lambda *_: 0.0), n_steps=two, eval_every_n_steps=two, n_eval_batches=two)
    read_space({"optimizer.learning_rate": {"low": np.float64(0.1), "high": 1.0}, "model.c_hid": [two, 8]})


def test_a_saver_takes_it(tmp_path: Path):
    get_default_checkpointer(tmp_path, save_every_n_steps=np.int64(2))


def test_fit_takes_them_and_stores_plain_numbers(tmp_path: Path):
    x = np.zeros((4, 2), np.float32)
    hparams = {"lr": np.float64(0.5), "width": np.int32(3), "decay": jnp.float32(0.25)}
    options: dict[str, Any] = {"log_dir": tmp_path, "progress": False, "tensorboard": False, "hparams": hparams}
    result = fit(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), (x, x[:, :1]), loss_fn=lambda y, t: ((y - t) ** 2).mean(),
                 optimizer=optax.sgd(0.1), num_epochs=np.int64(2), batch_size=np.int64(2), seed=np.int64(1),
                 steps_per_epoch=np.int64(1), **options)  # fmt: skip
    stored = yaml.safe_load((Path(result.folder) / "config.yaml").read_text())
    assert (stored["num_epochs"], stored["batch_size"], stored["seed"], stored["steps_per_epoch"]) == (2, 2, 1, 1)
    assert stored["hparams"] == {"lr": 0.5, "width": 3, "decay": 0.25}


def test_a_trainer_takes_them_and_stores_plain_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Own(TrainerModule):
        """A trainer of the user's."""

        def batch_to_input(self, batch):
            return batch["x"]

        def loss_function(self, model, batch, train=True):
            return cross_entropy(model(batch["x"]), batch["y"]).mean(), {}

    monkeypatch.chdir(tmp_path)
    example = next(iter(numbered_loader(32)))
    keywords: dict[str, Any] = {"seed": np.int64(3), "max_steps": np.int64(1), "enable_progress_bar": False}
    parts = {"model": lambda rngs: nnx.Linear(8, 4, rngs=rngs), "exmp_input": example}
    optimizer = SGDConfig(learning_rate=np.float32(0.5))
    trainer = Own(**parts, optimizer_config=optimizer, other_configs={"seed": np.int64(3)}, **keywords)
    trainer.train_model(numbered_loader(32), num_epochs=np.int64(1))
    assert trainer.folder is not None
    stored = json.loads((trainer.folder.path / "hparams.json").read_text())
    assert (stored["trainer.seed"], stored["optimizer.learning_rate"], stored["seed"]) == (3, 0.5, 3)


def test_a_loop_takes_them():
    x = np.zeros((2, 2), np.float32)
    task = TrainTask(lambda variables, x: x @ variables["params"]["w"], optax.sgd(0.1), lambda y: y.mean(), [(x, ())])
    loop = TrainLoop(lambda rngs, x: {"params": {"w": jnp.zeros((2, 1))}}, task, n_steps=np.int64(1), stdout=False)
    assert [checkpoint.step for checkpoint in loop] == [1]


HUGE = int("9" * 99)


@each("value", [HUGE, -HUGE, 2**63])
def test_a_integer_beyond_64_bits_is_refused_with_its_key_and_the_bound(value: int, tmp_path: Path):
    with pytest.raises(SettingsError, match=r"`seed`.*9223372036854775807"):
        TrainerConfig(seed=value)
    for anything in (value, [{"a": value}]):
        with pytest.raises(SettingsError, match=r"`anything`.*9223372036854775807"):
            NumbersConfig(anything=anything)
    file = tmp_path / "huge.yaml"
    file.write_text(f"size: {value}\nsizes: [1, {value}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, NumbersConfig, [f"anything={value}"])
    problems = {problem.key: problem.text for problem in caught.value.problems}
    assert set(problems) == {"size", "sizes.1", "anything"}
    assert all("9223372036854775807" in text for text in problems.values())


def test_the_largest_integer_is_accepted_and_a_float_may_be_larger():
    assert NumbersConfig(size=2**63 - 1, rate=HUGE).rate == float(HUGE)


GIVEN_IN_PYTHON = {
    "num_epochs": lambda: fit(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), (np.zeros((4, 2)), np.zeros((4, 1))),
                              loss_fn=lambda y, t: ((y - t) ** 2).mean(), optimizer=optax.sgd(0.1), num_epochs=HUGE),
    "n_steps": lambda: train_fn(fns=(lambda: None, lambda: None), n_steps=HUGE, eval_every_n_steps=1, n_eval_batches=1),
    "batch_size": lambda: ArrayLoader((np.zeros((4, 2)),), HUGE),
    "max_steps": lambda: Plan(max_steps=HUGE),
}  # fmt: skip


@each("name", GIVEN_IN_PYTHON)
def test_a_integer_of_99_digits_is_refused_in_python_as_well(name: str):
    with pytest.raises(ValueError, match=f"`{name}`.*99 digits.*{2**63 - 1}"):
        GIVEN_IN_PYTHON[name]()
