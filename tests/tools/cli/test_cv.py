"""`cv`: one table, one folder per fold, and nothing trained twice."""

from tests.tools.cli.cli_runs import QUICK, run_command


def test_folds_are_trained_once_and_shown_in_one_table(tmp_path):
    (tmp_path / "run.yaml").write_text(QUICK)
    command = ("cv", "run.yaml", "--folds", "2", "trainer.train_epochs=1", "--folder", "folds")
    result = run_command(*command, "--json", folder=tmp_path)
    assert (result.code, result.err, result.data["status"]) == (0, "", "completed")
    metrics = [one["metrics"]["val/acc"] for one in result.data["folds"]]
    assert result.data["mean"]["val/acc"] == sum(metrics) / 2
    assert sorted(path.name for path in (tmp_path / "folds").iterdir()) == ["fold_1", "fold_2"]
    runs = sorted(tmp_path.glob("folds/fold_*/*/run.json"))
    again = run_command(*command, folder=tmp_path)
    assert again.code == 0
    for word in ("mean", "std", "fold 2", "val/acc", "test/loss"):
        assert word in again.out
    assert runs == sorted(tmp_path.glob("folds/fold_*/*/run.json")) and len(runs) == 2
    wrong = run_command(*command, "--folds", "1", folder=tmp_path)
    assert wrong.code == 2 and "folds" in wrong.err
    resumed = run_command("resume", runs[0].parent, folder=tmp_path)  # on which examples, only `cv` knows
    assert resumed.code == 2 and "dataset" in resumed.err
