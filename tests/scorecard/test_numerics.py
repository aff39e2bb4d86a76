"""Group C, numerics: NaN, spikes, ragged batches, and observers that must not change the result."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jax_trainer.core import NonFiniteError
from jax_trainer.datasets import ArrayLoader, SupervisedBatch
from jax_trainer.testing import assert_finite, digest, numbered_data
from tests.scorecard.harness import Score, lines
from tests.scorecard.in_process import Digests, options_for, run_job
from tests.scorecard.job import BATCH, EPOCH, EXAMPLES, Job, ids_of_epoch, trainer_for
from tests.scorecard.oracles import MODES, metric_problems, oracle_of

pytestmark = pytest.mark.scorecard

BAD = 12  # the step whose batch is bad


def test_c1_a_batch_of_nan_ends_the_run_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_FAULTS", f"nan:{BAD}")
    options = options_for(tmp_path / "raise", policy="raise", steps=20)
    with Score("C1") as score:
        with pytest.raises(NonFiniteError, match=f"Step {BAD}: ") as caught:
            run_job(options)
        kept = options.folder / "nonfinite"
        score.check(caught.value.step == BAD, f"step {caught.value.step}")
        score.check(json.loads((kept / "report.json").read_text())["step"] == BAD, "report.json")
        ids = [int(number) for number in np.load(kept / "batch.npz")["id"]]
        score.check(ids == ids_of_epoch(options, 1)[(BAD - 1) * BATCH : BAD * BATCH], f"the batch has the ids {ids}")
        score.check((kept / "state" / f"step_{BAD - 1:08d}").is_dir(), "the state before it is not kept")


def test_c1_a_skipped_update_changes_nothing_but_the_count(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_FAULTS", f"nan:{BAD}")
    digests = Digests()
    trainer = run_job(options_for(tmp_path / "skip", policy="skip", steps=20), callbacks=[digests])
    with Score("C1") as score:
        score.check(digests.at[BAD] == digests.at[BAD - 1], "the skipped step changed the state")
        score.check(digests.at[BAD + 1]["params"] != digests.at[BAD]["params"], "the next step was skipped as well")
        score.check(int(trainer.state.step) == 20, f"it ended at step {trainer.state.step}")
        assert_finite(trainer.state)


def test_c1_a_rollback_skips_the_bad_batch_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_FAULTS", f"nan:{BAD}")
    options = options_for(tmp_path / "once", policy="rollback", save_every=5, steps=EPOCH, top_k=0)
    with Score("C1") as score:
        trainer = run_job(options)
        assert_finite(trainer.state)
        steps = [row for row in lines(tmp_path / "once" / "ledger.jsonl") if row["step"] < EPOCH]
        ids = [number for row in steps for number in row["ids"]]
        bad = ids_of_epoch(options, 1)[(BAD - 1) * BATCH : BAD * BATCH]
        score.check(int(trainer.state.step) in (EPOCH - 1, EPOCH), f"it ended at step {trainer.state.step}")
        score.check(not set(bad) & set(ids[-(EPOCH - BAD) * BATCH :]), "the bad batch was trained on")
        monkeypatch.setenv("JOB_FAULTS", ",".join(f"nan:{step}" for step in range(BAD, BAD + 6)))
        with pytest.raises(NonFiniteError):
            run_job(replace(options, out=str(tmp_path / "often"), max_rollbacks=2))
        score.add([], "too many")


def test_c2_too_many_skips_in_a_row_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_FAULTS", ",".join(f"nan:{step}" for step in range(BAD, BAD + 10)))
    digests = Digests()
    with Score("C2") as score:
        with pytest.raises(NonFiniteError, match=f"Step {BAD + 3}: ") as caught:
            run_job(options_for(tmp_path / "run", policy="skip", max_skipped=3), callbacks=[digests])
        score.check(caught.value.step == BAD + 3, f"step {caught.value.step}")
        score.check(
            digests.at[max(digests.at)]["params"] == digests.at[BAD - 1]["params"],
            "parameters are not the last good ones",
        )


def test_c3_a_spike_is_logged_and_no_later_step_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_FAULTS", "spike:30")
    options = options_for(tmp_path / "run", policy="skip", extras="", steps=EPOCH)
    with Score("C3") as score:
        run_job(options)
        rows = lines(options.folder / "metrics.jsonl")
        spikes = sum(row.get("optimizer/spikes_losses", 0) + row.get("optimizer/spikes_grad_norms", 0) for row in rows)
        skipped = sum(row.get("train/guard/skipped_epoch", 0) for row in rows)
        score.check(spikes >= 1, f"{spikes} spikes were recorded")
        score.check(skipped == 0, f"{skipped} steps were skipped")
        score.note(spikes=spikes)


class Tuples(Job):
    """Takes batches as tuples."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch[0]

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return super().loss_function(model, dict(zip(("x", "y", "id"), batch, strict=True)), train)


class Supervised(Job):
    """Takes batches as `SupervisedBatch`."""

    def batch_to_input(self, batch: Any) -> Any:
        return batch.input

    def loss_function(self, model: Any, batch: Any, train: bool = True) -> Any:
        return super().loss_function(model, {"x": batch.input, "y": batch.target, "id": batch.target}, train)


def _as(kind: type[Job], data: dict[str, np.ndarray]) -> Any:
    if kind is Supervised:
        return SupervisedBatch.of(data["x"], data["y"])
    return tuple(data.values()) if kind is Tuples else data


def check_ragged(score: Score, folder: Any, kind: type[Job], **changes: Any) -> None:
    """Trains and validates one epoch of 1,003 examples, and compares every metric with numpy."""
    data, evaluated = numbered_data(EXAMPLES), numbered_data(EXAMPLES, seed=1)
    options = options_for(folder, steps=EPOCH, val_epochs=1, ledger=0, **changes)
    trainer = trainer_for(options, kind=kind)
    trainer.exmp_input = _as(kind, {name: array[:BATCH] for name, array in data.items()})
    loader = ArrayLoader(_as(kind, data), BATCH, shuffle=True, seed=options.seed)
    results = trainer.train_model(loader, ArrayLoader(_as(kind, evaluated), BATCH))
    trainings = [row for row in lines(options.folder / "metrics.jsonl") if "train/x_mean_epoch" in row]
    order = loader.order(1)
    score.add(metric_problems(trainings[-1], oracle_of({k: v[order] for k, v in data.items()}), "train"), kind.__name__)
    score.add(metric_problems(results[1], oracle_of(evaluated), "val"), kind.__name__)


def test_c4_metrics_of_ragged_batches_equal_numpy(tmp_path):
    with Score("C4") as score:
        check_ragged(score, tmp_path / "dict", Job)
        score.note(modes=len(MODES) + 1)


@pytest.mark.parametrize("kind", [Tuples, Supervised])
def test_c4_metrics_of_ragged_batches_equal_numpy_whatever_a_batch_is(kind, tmp_path):
    with Score("C4") as score:
        check_ragged(score, tmp_path / kind.__name__, kind)


@pytest.mark.parametrize("changes", [{"flavour": "linen"}, {"steps_per_call": 8}, {"resident": 1}, {"accumulate": 3}])
def test_c4_metrics_of_ragged_batches_equal_numpy_however_steps_are_run(changes, tmp_path):
    with Score("C4") as score:
        check_ragged(score, tmp_path / "run", Job, **changes)


def test_c4_concatenated_ids_are_exact(tmp_path):
    with Score("C4") as score:
        options = options_for(tmp_path / "run", steps=EPOCH)
        run_job(options)
        ids = [number for row in lines(tmp_path / "run" / "ledger.jsonl") for number in row["ids"]]
        score.check(ids == ids_of_epoch(options, 1), "the ids of the steps are not the order of the epoch")


def state_digests(trainer: Job) -> dict[str, str]:
    """The digests of all that training computes."""
    return {name: digest(getattr(trainer.state, name)) for name in ("params", "model_state", "opt_state", "rng")}


def test_c12_validation_changes_no_bit_of_training(tmp_path):
    with Score("C12") as score:
        for name, base in (("plain", {}), ("window", {"window": 3}), ("chunks", {"steps_per_call": 4})):
            without = state_digests(run_job(options_for(tmp_path / f"{name}-none", **base)))
            for val_every, val_epochs in ((1, 0), (7, 1), (0, 1), (0, 3)):
                folder = tmp_path / f"{name}-{val_every}-{val_epochs}"
                found = state_digests(run_job(options_for(folder, val_every=val_every, val_epochs=val_epochs, **base)))
                differ = [part for part in without if found[part] != without[part]]
                score.check(not differ, f"{name}, every {val_every} steps, {val_epochs} epochs: {differ} differ")


OBSERVED = {
    "bar": {"extras": "bare,bar"},
    "tensorboard": {"extras": "bare,tensorboard"},
    "profiler": {"extras": "bare,profiler"},
    "monitors": {"extras": ""},
    "every step logged": {"log_every": 1},
    "nothing logged": {"log_every": 0},
    "saved every step": {"save_every": 1, "top_k": 0},
    "saved every 16 steps": {"save_every": 16, "top_k": 0},
    "guard": {"policy": "skip"},
    "statistics": {"extras": "bare,stats"},
    "no gradient norm": {"extras": "bare,nonorm"},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_c13_observers_change_no_bit_of_training(tmp_path):
    with Score("C13") as score:
        for flavour in ("linen", "nnx"):
            alone = state_digests(run_job(options_for(tmp_path / f"{flavour}-alone", flavour=flavour)))
            for name, changes in OBSERVED.items():
                found = state_digests(run_job(options_for(tmp_path / f"{flavour}-{name}", flavour=flavour, **changes)))
                differ = [part for part in alone if found[part] != alone[part]]
                score.check(not differ, f"{flavour}, {name}: {differ} differ")
