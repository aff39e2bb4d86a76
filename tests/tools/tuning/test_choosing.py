from pathlib import Path
from typing import Any

import optuna
import pytest

from jax_trainer.tools.tuning import StudyError, TuneResult, read_space, tune
from jax_trainer.tools.tuning.storage import quiet_optuna
from jax_trainer.tools.tuning.study import PRUNERS, Study
from tests.tools.tuning.tuning_runs import LINE, parabola

SPACE = {"x": {"low": 0.0, "high": 1.0}, "n": {"low": 1, "high": 8, "log": True}, "c": ["a", "b", [1, 2]]}


def bumpy(values: dict[str, Any], trial: Any) -> float:
    return (values["x"] - 0.3) ** 2 + values["n"] / 10 + (values["c"] == "a")


def tried(found: TuneResult) -> list[dict[str, Any]]:
    """The values of all trials, in the order in which they were made."""
    return [trial["params"] for trial in sorted(found.trials, key=lambda trial: trial["trial"])]


def test_the_same_seed_makes_the_same_trials(tmp_path: Path, subtests):
    for number, sampler in enumerate(["tpe", "random"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(sampler=sampler):
            options: dict[str, Any] = {"trials": 7, "sampler": sampler, "startup": 4, "quiet": True}
            first = tune(bumpy, SPACE, seed=3, folder=folder / "a", **options)
            again = tune(bumpy, SPACE, seed=3, folder=folder / "b", **options)
            other = tune(bumpy, SPACE, seed=4, folder=folder / "c", **{**options, "trials": 1})
            assert tried(first) == tried(again) and tried(first)[:1] != tried(other)
            assert len({str(values) for values in tried(first)}) == 7


def test_a_resumed_study_makes_the_trials_that_it_would_have_made(tmp_path: Path):
    options: dict[str, Any] = {"seed": 5, "startup": 3, "quiet": True}
    full = tune(bumpy, SPACE, trials=8, folder=tmp_path / "full", **options)
    for trials in (2, 5, 8):
        parts = tune(bumpy, SPACE, trials=trials, folder=tmp_path / "parts", **options)
    assert tried(parts) == tried(full)


def test_after_the_first_trials_the_sampler_has_learnt(tmp_path: Path):
    learnt = tune(parabola, LINE, trials=30, startup=6, seed=0, folder=tmp_path, quiet=True)
    late = [abs(values["x"] - 0.3) for values in tried(learnt)[15:]]
    assert sum(late) / len(late) < 0.2  # by chance it would be 0.29
    assert learnt.value is not None and learnt.value < 1e-3


def test_a_grid_has_every_combination_once(tmp_path: Path):
    grid = {"n": {"low": 1, "high": 3}, "x": {"low": 0.0, "high": 0.5, "step": 0.25}, "c": ["b", [1, 2]]}
    part = tune(bumpy, grid, trials=5, sampler="grid", folder=tmp_path, quiet=True)
    full = tune(bumpy, grid, trials=100, sampler="grid", folder=tmp_path, quiet=True)
    expected = [{"n": n, "x": x, "c": c} for n in (1, 2, 3) for x in (0.0, 0.25, 0.5) for c in ("b", [1, 2])]
    assert tried(part) == expected[:5]
    assert tried(full) == expected
    assert full.params == {"n": 1, "x": 0.25, "c": "b"}


def test_a_grid_needs_values_that_can_be_counted(tmp_path: Path):
    for space in (LINE, {"x": {"low": 0, "high": 10**9}}, {"x": {"low": 0.0, "high": 1.0, "step": 1e-6}}):
        with pytest.raises(StudyError, match="`x` has too many values.*`step`"):
            tune(parabola, space, sampler="grid", folder=tmp_path)
    large = {"x": {"low": 0, "high": 999}, "y": list(range(100))}
    with pytest.raises(StudyError, match="A grid of 100,000 combinations is too large"):
        tune(parabola, large, sampler="grid", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def stepwise(values: dict[str, Any], trial: Any) -> float:
    for step in range(1, 10):
        trial.report(values["x"], step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return values["x"]


def test_a_pruner_cuts_what_promises_little(tmp_path: Path, subtests):
    for number, pruner in enumerate(PRUNERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(pruner=pruner):
            options: dict[str, Any] = {"sampler": "random", "pruner": pruner, "startup": 2, "seed": 1, "quiet": True}
            found = tune(stepwise, LINE, trials=9, folder=folder, **options)
            cut = [trial for trial in found.trials if trial["state"] == "pruned"]
            assert bool(cut) == (pruner != "none")
            assert all(0 < trial["reports"] < 10 and trial["value"] > found.value for trial in cut)


def test_no_trial_is_cut_before_enough_are_over(tmp_path: Path):
    options: dict[str, Any] = {"sampler": "random", "seed": 1, "quiet": True}
    found = tune(stepwise, LINE, trials=9, startup=7, folder=tmp_path, **options)
    assert all(trial["trial"] >= 7 for trial in found.trials if trial["state"] == "pruned")


def test_processes_at_the_same_time_choose_differently(monkeypatch: pytest.MonkeyPatch):
    class Watched(Study):
        def _new_sampler(self, number: float, salt: int) -> Any:
            self.samplers = [*getattr(self, "samplers", ()), super()._new_sampler(number, salt)]
            return self.samplers[-1]

    drawn = []
    for others in (0, 1):
        monkeypatch.setattr(Study, "running", lambda self, others=others: others)
        with quiet_optuna():
            study = Watched(optuna.storages.InMemoryStorage(), "line", read_space(LINE), {"mode": "min"}, seed=0)
            study.ask()
        drawn.append(study.samplers[0]._rng.rng.uniform())
    assert drawn[0] != drawn[1]
