import json

from jax_trainer.testing import numbered_loader
from tests.trainer.trainer_runs import EPOCHS, STEPS, digits, plain_for, trainer_for

# 64 pixels to 8 units, with a bias each; their norm; 10 classes
PARAMETERS = {"linear": 64 * 8 + 8, "norm": 8 + 8, "out": 8 * 10 + 10}


def test_what_would_be_trained_is_counted(flavour, tmp_path):
    report = trainer_for(flavour, tmp_path / "new", hidden=True, ema=0.9, detect_nans=True).dry_run()
    complete = sum(PARAMETERS.values())
    assert report.parameter_count == complete == 626
    assert report.state_bytes == {
        "params": 4 * complete,
        "model_state": 4 * (8 + 8),  # a mean and a variance per unit
        "opt_state": 4 * (complete + 3),  # the momentum; counts of updates and of the schedule; the rate
        "extra": 4 * (complete + 1),  # the average, and how many steps were skipped
    }
    shapes = {leaf.path.partition(".")[2]: leaf.shape for leaf in report.parameters if leaf.path.startswith("out")}
    assert shapes == {"bias": (10,), "kernel": (8, 10)}
    assert report.batch == {"input": "uint8[64, 8, 8, 1]", "target": "int32[64]"}
    assert report.steps == EPOCHS * STEPS
    assert report.devices == "1 × cpu"
    assert {"loss", "acc", "optimizer/grad_global_norm"} <= set(report.reported)
    assert not (tmp_path / "new").exists()


def test_the_steps_of_the_plan_are_counted(tmp_path_factory, subtests):
    for changes, steps in [
        ({"train_epochs": 3}, 3 * STEPS),
        ({"train_epochs": 3, "max_steps": 5}, 5),
        ({"train_epochs": None, "max_steps": 35}, 35),
        ({"train_epochs": None, "max_time": 9.0}, None),
        ({"train_epochs": None, "fast_dev_run": 2}, 2),
        ({"train_epochs": 3, "fast_dev_run": 2}, 3 * STEPS),  # schedules are those of the run that is tried
        ({"train_epochs": 3, "max_steps_per_epoch": 2}, 6),
        ({"train_epochs": 3, "overfit_batches": 1}, 3),
    ]:
        tmp_path = tmp_path_factory.mktemp("case")
        with subtests.test(changes=changes, steps=steps):
            assert plain_for("linen", tmp_path, **changes).dry_run(numbered_loader(32 * STEPS)).steps == steps


def test_the_length_of_a_stream_is_unknown(tmp_path):
    report = plain_for("linen", tmp_path).dry_run(iter([]))
    assert report.steps is None


def test_scripts_get_plain_data(tmp_path):
    report = trainer_for("linen", tmp_path, hidden=True).dry_run(digits().train_loader)
    data = json.loads(json.dumps(report.data()))
    assert (data["parameter_count"], data["steps"], data["state_bytes"]["params"]) == (626, 16, 2504)
    assert data["parameters"][0] == {"path": "hidden.bias", "shape": [8], "dtype": "float32", "bytes": 32}
