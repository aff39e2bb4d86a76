"""Whatever the optimizer, a monitored learning rate is logged where it can be seen, and training is trained."""

import logging
from typing import Any

import optax
import pytest

from jax_trainer.callbacks import LearningRateMonitor, LearningRateMonitorConfig
from jax_trainer.optimizer import SGDConfig
from jax_trainer.styles import fit
from jax_trainer.testing import linear_program, numbered_loader
from tests.trainer.trainer_runs import EXAMPLE, LINEAR, NUMBERS, STEPS, Plain, first_examples, settings, values

EPOCHS = 2
RATE = optax.linear_schedule(1.0, 0.0, 10)
INJECTED = optax.inject_hyperparams(optax.sgd)(learning_rate=RATE)
AT = [1 - step / 10 for step in range(EPOCHS * STEPS)]  # the rates of the updates
SEEN = {
    "inject_hyperparams": INJECTED,
    "chained": optax.chain(optax.clip_by_global_norm(1.0), INJECTED),
    "MultiSteps": optax.MultiSteps(INJECTED, 1).gradient_transformation(),
    "multi_transform": optax.multi_transform({"all": INJECTED}, lambda params: "all"),
}


def trained(folder: Any, optimizer: Any, callback: Any) -> Any:
    options = settings(folder, train_epochs=EPOCHS, check_val_every_n_epoch=0, log_grad_norm=False)
    named = {"optimizer_config" if isinstance(optimizer, SGDConfig) else "optimizer": optimizer}
    model = LINEAR["nnx"](num_classes=4)
    trainer = Plain(model_config=model, exmp_input=EXAMPLE, callbacks=[callback], **named, **options)
    trainer.train_model(numbered_loader(32 * STEPS), first_examples(64))
    return trainer


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("inject_hyperparams", LearningRateMonitor),
        *(
            pytest.param(name, LearningRateMonitorConfig, marks=() if name == "chained" else pytest.mark.slow)
            for name in SEEN
        ),
    ],
)
def test_a_rate_that_the_state_of_any_optax_optimizer_has_is_logged_per_epoch_and_per_step(name, given, tmp_path):
    trainer = trained(tmp_path, SEEN[name], given())
    assert list(values(trainer, "optimizer/lr")) == pytest.approx([AT[0], AT[0], AT[STEPS - 1]])
    assert list(values(trainer, "optimizer/lr_step")) == pytest.approx(AT[1::2])  # log_steps_every is 2


def test_the_rate_of_configured_optimizers_is_logged_per_step_too(tmp_path):
    trainer = trained(tmp_path, SGDConfig(learning_rate=0.01), LearningRateMonitorConfig())
    assert list(values(trainer, "optimizer/lr_step")) == pytest.approx([0.01] * (EPOCHS * STEPS // 2))


def with_trainer(folder: Any) -> Any:
    return trained(folder, optax.sgd(0.01), LearningRateMonitorConfig())


def with_fit(folder: Any) -> Any:
    options: dict[str, Any] = {"log_dir": str(folder), "tensorboard": False, "progress": False}
    return fit(linear_program(), [NUMBERS], num_epochs=EPOCHS, callbacks=[LearningRateMonitorConfig()], **options)


def test_a_rate_that_cannot_be_seen_is_named_once_and_ends_nothing(tmp_path_factory, caplog, subtests):
    for train in [with_trainer, with_fit]:
        tmp_path = tmp_path_factory.mktemp("case")
        caplog.clear()
        with subtests.test(train=train):
            with caplog.at_level(logging.WARNING, "jax_trainer"):
                train(tmp_path)
            (said,) = [record.message for record in caplog.records if "LearningRateMonitor" in record.message]
            assert "optimizer/lr" in said
            assert "inject_hyperparams" in said
