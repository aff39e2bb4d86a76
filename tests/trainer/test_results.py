from trainer_runs import plain_for, rows, train_plain

from jax_trainer.trainer.results import named_sets


def test_sets_are_named_after_what_they_are_for():
    assert named_sets("val", None) == {}
    assert named_sets("val", [1]) == {"val": [1]}
    assert named_sets("test", {"test": 1, "noisy": 2}) == {"test": 1, "test_noisy": 2}


def test_of_several_validations_in_an_epoch_the_last_counts(tmp_path):
    trainer = plain_for("nnx", tmp_path, val_every_n_steps=2)
    results = train_plain(trainer)
    first, last = (row for row in rows(trainer) if "val/loss" in row)
    assert results == {1: {name: value for name, value in last.items() if name.startswith("val")}}
    assert first["val/loss"] != last["val/loss"]
