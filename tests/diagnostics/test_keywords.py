"""Unknown keywords get a suggestion in every style, in Python and in files."""

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_trainer import EvalLoop, LoRA, TrainLoop, TrainTask, fit, train_fn
from jax_trainer.callbacks import EarlyStopping, EarlyStoppingConfig, ModelCheckpoint
from jax_trainer.config import ConfigError, config_from
from jax_trainer.config.settings import SettingsError
from jax_trainer.datasets import ArrayLoader
from jax_trainer.diagnostics import suggestions
from jax_trainer.diagnostics.suggestions import nearest
from jax_trainer.logger import LoggerConfig
from jax_trainer.models import MLPConfig
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.runs import named_callbacks
from jax_trainer.runs.sections import LoRAConfig
from jax_trainer.testing import TinyNNX, numbered_loader
from jax_trainer.tools.tuning import tune
from jax_trainer.trainer import Experiment, TrainerConfig, TrainerModule
from tests.rows import noted_row

X = np.zeros((4, 2), np.float32)


class Own(TrainerModule):
    """A user's trainer."""

    def batch_to_input(self, batch):
        return batch["x"]

    def loss_function(self, model, batch, train=True):
        loss = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()
        return loss, {}


def trainer(**keywords: Any) -> Own:
    example = next(iter(numbered_loader(32)))
    return Own(model=lambda rngs: TinyNNX(rngs=rngs), optimizer=optax.sgd(0.1), exmp_input=example, **keywords)


def fitted(**keywords: Any) -> Any:
    return fit(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), (X, X[:, :1]), optimizer=optax.sgd(0.1), **keywords)


WRONG = [
    (trainer, "max_epochs", "`train_epochs`"),
    (trainer, "epochs", "`train_epochs`"),
    (trainer, "accumulate_grad_batches", "`accumulate`.*multiply the batch size by 1"),
    (trainer, "gradient_clip_val", "`clip_norm`"),
    (trainer, "max_grad_norm", "`clip_norm`"),
    (trainer, "clipvalue", "`GradClipValue`"),
    (fitted, "max_grad_norm", "`clip_norm`"),
    (trainer, "limit_train_batches", "`max_steps_per_epoch`"),
    (trainer, "patience", "`EarlyStopping`"),
    (trainer, "log_every_n_steps", "`log_steps_every`"),
    (trainer, "default_root_dir", "`log_dir`"),
    (trainer, "num_sanity_val_steps", "`jax-trainer check`"),
    (trainer, "profiler", "`JAXProfiler`"),
    (fitted, "profiler", "`JAXProfiler`"),
    (trainer, "class_weight", "`class_weights`.*loss function"),
    (trainer, "sample_weight", "`fit`.*loss function"),
    (fitted, "initial_epoch", "`resume=`"),
    (fitted, "accumulate_grad_batches", "`accumulate`.*batch size by 1"),
    (fitted, "early_stopping", "`EarlyStopping`"),
    (train_fn, "gradient_accumulation_steps", "`accumulate`.*batch size by 1"),
    (LoRA, "r", "`rank`"),
    (LoRA, "target_modules", "`match`"),
    (ModelCheckpoint, "dirpath", "run's folder"),
    (trainer, "val_check_interval", "`val_every_n_steps`"),
    (trainer, "devices", "`mesh`"),
    (trainer, "callback", "`callbacks`"),
    (trainer, "lr", "optimizer"),
    (trainer, "nonsense_of_mine", ".*train_epochs"),
    (fitted, "epochs", "`num_epochs`"),
    (fitted, "max_epochs", "`num_epochs`"),
    (fitted, "loss", "`loss_fn`"),
    (fitted, "validation_data", "`test_ds`"),
    (fitted, "optimizer_config", "`optimizer`"),
    (trainer, "dataset_config", "`dataset`"),
    (fitted, "verbose", "`progress`"),
    (fitted, "batchsize", "`batch_size`"),
    (fitted, "learning_rate", "optimizer"),
    (fitted, "deterministic", "CPU.*on a GPU.*xla_gpu_deterministic_ops"),
    (train_fn, "max_steps", "`n_steps`"),
    (train_fn, "callback", "`callbacks`"),
    (TrainLoop, "num_steps", "`n_steps`"),
    (TrainTask, "loss_fn", "`loss`"),
    (EvalLoop, "nsteps", "`n_steps`"),
    (ArrayLoader, "batchsize", "`batch_size`"),
    (tune, "n_trials", "`trials`"),
    (TrainerConfig, "max_epochs", "`train_epochs`"),
    (AdamWConfig, "learning_rat", "`learning_rate`"),
    (MLPConfig, "hiden", "`hidden`"),
    (EarlyStoppingConfig, "paitence", "`patience`"),
    (EarlyStopping, "paitence", "`patience`"),
    (ModelCheckpoint, "save_total_limit", "`save_top_k`"),
]


def test_an_unknown_keyword_is_answered_with_a_suggestion():
    for call, keyword, suggested in WRONG:
        with noted_row(call, keyword, suggested), pytest.raises(TypeError, match=f"`{keyword}`.*{suggested}"):
            call(**{keyword: 1})


def test_a_precision_of_lightning_is_answered_with_ours():
    for value, suggested in [
        (16, "f16"),
        ("float16", "f16"),
        ("16-mixed", "f16"),
        ("bf16-mixed", "bf16"),
        (32, "f32"),
        ("float32", "f32"),
    ]:
        with (
            noted_row(value, suggested),
            pytest.raises(SettingsError, match=rf"`precision`.*got {value!r}.*`{suggested}`"),
        ):
            trainer(precision=value)
    with pytest.raises(ValueError, match=rf"`precision`.*{value!r}.*`{suggested}`"):
        fitted(loss_fn=optax.l2_loss, precision=value)


def test_a_value_that_lightning_accepts_is_answered_with_how_to_write_it():
    for key, value, suggested in [
        ("fast_dev_run", True, "`fast_dev_run=1`"),
        ("limit_val_batches", 0.1, "number of batches"),
        ("limit_test_batches", 0.1, "number of batches"),
        ("max_time", "00:00:10", "seconds"),
        ("max_time", {"hours": 12}, "43200"),
    ]:
        with noted_row(key, value, suggested):
            with pytest.raises(SettingsError, match=rf"`{key}`.*{suggested}"):
                trainer(**{key: value})
            with pytest.raises(ConfigError, match=rf"trainer.{key}: .*{suggested}"):
                config_from({"trainer": {"class_name": "TrainerModule", key: value}}, Experiment)


def test_a_file_gets_the_same_suggestions():
    data: dict[str, Any] = {"trainer": {"class_name": "TrainerModule", "max_epochs": 1, "patience": 2, "precision": 16}}
    data["trainer"]["accumulate_grad_batches"] = 4
    with pytest.raises(ConfigError) as caught:
        config_from(data, Experiment)
    problems = {problem.key: problem.text for problem in caught.value.problems}
    assert "`train_epochs`" in problems["trainer.max_epochs"]
    assert "`EarlyStopping`" in problems["trainer.patience"]
    assert "`f16`" in problems["trainer.precision"]
    assert re.search("`accumulate`.*batch size by 4", problems["trainer.accumulate_grad_batches"])


def test_no_option_is_answered_twice():
    tree = ast.parse(Path(suggestions.__file__).read_text())
    [table] = [node.value for node in tree.body if isinstance(node, ast.Assign) and "_ELSEWHERE" in ast.unparse(node)]
    assert isinstance(table, ast.Dict)
    keys: list[str] = []
    for key, value in zip(table.keys, table.values, strict=True):  # no key: `**dict.fromkeys(keys, text)`
        names = f"[{ast.unparse(key)}]" if key is not None else ast.unparse(value.args[0])  # type: ignore[attr-defined]
        keys += eval(names, dict(vars(suggestions)))
    assert len(keys) > 20 and [key for key, count in Counter(keys).items() if count > 1] == []


def test_a_short_word_is_near_only_to_one_with_a_single_edit():
    for word, known, expected in [
        ("trian", ["train", "tune"], "train"),
        ("LoRA", ["Lars", "Lion"], ""),
        ("hiden", ["hidden"], "hidden"),
        ("Lar", ["Lars"], "Lars"),
    ]:
        assert nearest(word, known) == expected


def test_a_callback_is_configured_by_keywords():
    stopping = EarlyStopping(monitor="val/acc", mode="max", patience=2)
    assert stopping.config == EarlyStoppingConfig(monitor="val/acc", mode="max", patience=2)
    with pytest.raises(SettingsError, match="`patience`.*got 0"):
        EarlyStopping(patience=0)
    with pytest.raises(TypeError, match=r"`config`.*patience"):
        EarlyStopping(EarlyStoppingConfig(), patience=2)


WRITTEN: dict[str, Any] = {
    "EarlyStopping": {"monitor": "val/loss", "patience": 2},
    "other": {"class_name": "LearningRateMonitor"},
    "ThroughputMonitor": None,
}


def test_callbacks_can_be_written_as_in_a_file():
    named = named_callbacks(WRITTEN)
    assert named["EarlyStopping"] == EarlyStoppingConfig(monitor="val/loss", patience=2)
    assert [type(one).__name__ for one in named.values()][1:] == [
        "LearningRateMonitorConfig",
        "ThroughputMonitorConfig",
    ]
    with pytest.raises(ConfigError, match=r"callbacks\.EarlyStopping\.moniter.*Did you mean `monitor`"):
        named_callbacks({"EarlyStopping": {"moniter": "val/acc"}})
    with pytest.raises(ConfigError, match=r"callbacks\.EarlyStoping.*Did you mean `EarlyStopping`"):
        named_callbacks({"EarlyStoping": {"monitor": "val/acc"}})


def test_a_trainer_takes_callbacks_as_they_are_written_in_a_file():
    made = trainer(callbacks=WRITTEN)
    assert made.config.callbacks["EarlyStopping"] == EarlyStoppingConfig(monitor="val/loss", patience=2)


def test_fit_takes_callbacks_as_they_are_written_in_a_file(tmp_path: Path):
    options: dict[str, Any] = {"log_dir": tmp_path, "progress": False, "tensorboard": False, "num_epochs": 3}
    stopping = {"EarlyStopping": {"monitor": "train/loss", "check_on_train_epoch_end": True, "stopping_threshold": 9.0}}
    result = fitted(loss_fn=lambda y, t: ((y - t) ** 2).mean(), callbacks=stopping, **options)
    assert result.state.step == 1
    assert jax.tree.leaves(result.state.params)


def test_a_trainer_takes_the_logger_as_it_is_written_in_a_file():
    for logger in [{"class_name": "Logger", "log_steps_every": 1}, {"log_steps_every": 1}]:
        with noted_row(logger):
            assert trainer(logger=logger).config.logger == LoggerConfig(log_steps_every=1)
            with pytest.raises(ConfigError, match=r"logger\.log_step_every.*`log_steps_every`"):
                trainer(logger={"log_step_every": 1})


def test_a_trainer_takes_lora_as_it_is_written_in_a_file():
    assert trainer(lora={"match": ".*kernel", "rank": 2}).config.lora == LoRAConfig(match=".*kernel", rank=2)
    with pytest.raises(ConfigError, match=r"lora\.r:.*`rank`"):
        trainer(lora={"match": ".*kernel", "r": 2})
    with pytest.raises(ConfigError, match=r"lora\.match"):
        trainer(lora={"rank": 2})


def test_positional_arguments_that_must_be_keywords_are_answered_with_their_names():
    for call, args, message in [
        (fit, (None, X, X, optax.sgd(0.1)), "fit .*`test_ds`.*got 4.*`loss_fn=`.*`optimizer=`"),
        (train_fn, ((None, None), 10), "train_fn .*no positional.*got 2.*`fns=`.*`n_steps=`"),
    ]:
        with noted_row(call, args, message), pytest.raises(TypeError, match=message):
            call(*args)
