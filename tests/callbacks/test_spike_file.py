import logging
import os

import numpy as np
import pytest

from jax_trainer.callbacks.spikes import FILE, SpikeFile


def written(folder) -> dict[str, list]:
    with np.load(folder / FILE, allow_pickle=False) as found:
        return {name: found[name].tolist() for name in found}


def test_the_file_has_steps_values_and_averages_of_each_quantity(tmp_path):
    file = SpikeFile(tmp_path)
    file.add("loss", 7, 9.0, 1.5)
    file.add("loss", 9, 8.0, 1.25)
    file.write()
    assert written(tmp_path) == {
        "grad_norm_steps": [],
        "grad_norm_values": [],
        "grad_norm_averages": [],
        "loss_steps": [7, 9],
        "loss_values": [9.0, 8.0],
        "loss_averages": [1.5, 1.25],
    }
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_nothing_is_written_where_there_is_nothing(tmp_path):
    SpikeFile(tmp_path).write()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_keeps_what_was_before_its_checkpoint(tmp_path):
    first = SpikeFile(tmp_path)
    for step in (3, 5, 8):
        first.add("loss", step, float(step), 1.0)
    first.write()
    second = SpikeFile(tmp_path)
    second.resume(5)
    second.add("loss", 7, 7.0, 1.0)
    second.write()
    assert written(tmp_path)["loss_steps"] == [3, 5, 7]


def test_a_file_that_is_damaged_costs_a_warning(tmp_path, caplog):
    (tmp_path / FILE).write_bytes(b"not a zip file")
    file = SpikeFile(tmp_path)
    with caplog.at_level(logging.WARNING, "jax_trainer"):
        file.resume(5)
    file.add("loss", 7, 7.0, 1.0)
    file.write()
    assert "spikes" in caplog.text and "replaced" in caplog.text
    assert written(tmp_path)["loss_steps"] == [7]


@pytest.mark.parametrize("written_since", [False, True])
def test_spikes_that_were_not_in_the_file_at_the_checkpoint_come_from_it_once(tmp_path, written_since):
    first = SpikeFile(tmp_path)
    first.add("loss", 3, 3.0, 1.0)
    first.write()
    first.add("loss", 5, float("inf"), 1.0)
    first.add("grad_norm", 5, 6.0, 2.0)
    kept = first.unwritten  # a checkpoint is saved at step 6
    assert kept == {"grad_norm": [(5, 6.0, 2.0)], "loss": [(5, float("inf"), 1.0)]}
    first.add("loss", 8, 8.0, 1.0)
    if written_since:
        first.write()
    second = SpikeFile(tmp_path)
    second.resume(6, kept)
    found = written(tmp_path)
    assert (found["loss_steps"], found["loss_values"]) == ([3, 5], [3.0, float("inf")])
    assert (found["grad_norm_steps"], found["grad_norm_averages"]) == ([5], [2.0])
    assert second.unwritten == {"grad_norm": [], "loss": []}


def test_spikes_of_a_run_whose_file_was_never_written_come_from_its_checkpoint(tmp_path):
    SpikeFile(tmp_path).resume(6, {"loss": [[5, 9.0, 1.0]]})
    assert written(tmp_path)["loss_steps"] == [5]


def test_the_file_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    file, synced = SpikeFile(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((os.fstat(number).st_size, list(tmp_path.iterdir()))))
    file.add("loss", 3, 3.0, 1.0)
    file.write()
    assert synced == [((tmp_path / FILE).stat().st_size, [tmp_path / f".partial-{FILE}"])]
