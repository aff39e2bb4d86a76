import pytest

from jax_trainer.config.settings import SettingsError
from jax_trainer.optimizer import AdamWConfig
from jax_trainer.trainer import ImgClassifierTrainer, ImgClassifierTrainerConfig
from tests.trainer.trainer_runs import MODELS, digits, rows, settings


def test_accuracy_has_a_spread_in_evaluation_and_a_maximum_in_training(done):
    written = {name for row in rows(done.trainer) for name in row}
    assert {"train/acc_step", "train/acc_epoch", "train/acc_max_epoch", "val/acc_std", "test/acc_std"} <= written
    assert not {"train/acc_std_epoch", "train/acc_max_step", "val/acc_max"} & written


def test_the_spread_is_that_between_batches(done):
    trainer, val = done.trainer, digits().val
    accs = [trainer.eval_model([val[at : at + 64]])["val/acc"] for at in range(0, 180, 64)]
    mean = (64 * accs[0] + 64 * accs[1] + 52 * accs[2]) / 180
    assert trainer.eval_model(digits().val_loader)["val/acc"] == pytest.approx(mean)
    equal = trainer.eval_model([val[:64], val[64:128]])
    assert equal["val/acc_std"] == pytest.approx(abs(accs[0] - accs[1]) / 2, rel=1e-5)


def test_a_model_with_another_number_of_classes_is_an_error(flavour, tmp_path):
    data, config = digits(), ImgClassifierTrainerConfig(num_classes=12, **settings(tmp_path))
    trainer = ImgClassifierTrainer(config, MODELS[flavour](), AdamWConfig(), data.train[:64], dataset=data)
    message = "10 .*`trainer.num_classes` is 12"
    with pytest.raises(SettingsError, match=message) as error:
        trainer.dry_run()
    assert error.value.problems[0][0] == "trainer.num_classes"


def test_there_are_at_least_two_classes():
    with pytest.raises(SettingsError, match="`num_classes` must be .* of at least 2, got 1"):
        ImgClassifierTrainerConfig(num_classes=1)
