"""The scorecard checks itself: each mutant must make the named case fail."""

from dataclasses import replace

import pytest

from tests.scorecard.crashes import kill_at
from tests.scorecard.harness import Score, differences, lines, reference, result, run
from tests.scorecard.job import EPOCH, Options, examples_of, ids_of_epoch
from tests.scorecard.oracles import metric_problems, oracle_of

pytestmark = pytest.mark.scorecard

SHORT = Options(out="", steps=45)


@pytest.mark.parametrize(
    ("mutant", "words"), [("rng", "rng differ"), ("count", "opt_state differ"), ("batch", "ledger differs")]
)
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_state_lost_on_resume_turns_a1_red(mutant, words, flavour, tmp_path, references):
    options = replace(SHORT, out=str(tmp_path / "run"), flavour=flavour)
    undisturbed = reference(options, references)
    with Score("mutants") as score:
        assert run(options, faults="kill:23", JOB_MUTANT=mutant).code == -9
        ended = run(options, JOB_MUTANT=mutant)
        assert ended.code == 0, ended.text[-2000:]
        found = differences(options, undisturbed)
        score.check(any(words in one for one in found), f"{mutant}: A1 finds {found}")


def test_deleting_before_committing_turns_a2_red(tmp_path):
    options = replace(SHORT, out=str(tmp_path / "run"))
    with Score("mutants") as score:
        problems = kill_at(options, "before_rename:kill:4")
        score.check(problems == [], f"without the mutant A2 finds {problems}")
        options = replace(SHORT, out=str(tmp_path / "mutant"))
        found = kill_at(options, "before_rename:kill:4", JOB_MUTANT="delete")
        score.check(any("no valid checkpoint" in one for one in found), f"delete: A2 finds {found}")


def test_a_mean_of_means_turns_c4_red(tmp_path):
    with Score("mutants") as score:
        for mutant in ("", "means"):
            options = replace(SHORT, out=str(tmp_path / f"run-{mutant}"), steps=EPOCH)
            ended = run(options, **({"JOB_MUTANT": mutant} if mutant else {}))
            assert ended.code == 0, ended.text[-1000:]
            order = ids_of_epoch(options, 1)
            ordered = {name: array[order] for name, array in examples_of(options).items()}
            trainings = [row for row in lines(options.folder / "metrics.jsonl") if "train/x_mean_epoch" in row]
            found = metric_problems(trainings[-1], oracle_of(ordered), "train")
            score.check(bool(found) == bool(mutant), f"{mutant or 'original'}: C4 finds {found}")


def test_skipping_by_zero_times_nan_turns_c1_red(tmp_path):
    with Score("mutants") as score:
        for mutant in ("", "zero"):
            options = replace(
                SHORT,
                out=str(tmp_path / f"run-{mutant}"),
                policy="skip",
                save_every=0,
                val_every=0,
                val_epochs=0,
                test=0,
            )
            ended = run(options, faults="nan:12", **({"JOB_MUTANT": mutant} if mutant else {}))
            is_red = ended.code != 0 or not result(options)["finite"]
            score.check(
                is_red == bool(mutant),
                f"{mutant or 'original'}: C1 is {'red' if is_red else 'green'}: {ended.text[-500:]}",
            )
