"""Whole experiments in two real processes: who writes, what comes out, and going on with another number of them."""

import json
import shutil
from pathlib import Path

import pytest

from jax_trainer.trainer import build, load_experiment
from tests.sharding.processes import pairs

JOB = Path(__file__).with_name("trainer_process_job.py")
TINY = """\
trainer:
  class_name: ImgClassifierTrainer
  train_epochs: 3
  max_steps_per_epoch: 4
  num_classes: 10
  ema: 0.9
  mesh: {data: 1, fsdp: -1}
  sharding: {smallest: 8}
  logger: {log_dir: runs}
  metrics:
    f1: {class_name: F1}
    auroc: {class_name: AUROC, log_mode: any}
  callbacks:
    ModelCheckpoint: {monitor: val/loss, every_n_steps: 3, keep_latest: 10}
    GradientSpikeMonitor: {log_to_disk: true, warmup_steps: 2, threshold: 1.0001, ema_decay: 0.3}
    JAXProfiler: {first_step: 2, profile_n_steps: 2}
    ThroughputMonitor: {}
    ModelSummary: {}
    LearningRateMonitor: {}
    HangMonitor: {seconds: 300}
model: {class_name: MLP, num_classes: 10, hidden: [32, 32], dropout: 0.1}
optimizer:
  class_name: AdamW
  learning_rate: {class_name: WarmupCosineDecaySchedule, peak_value: 1e-3, warmup_steps: 2}
dataset: {class_name: DigitsDataset, global_batch_size: 32}
"""
BOUND = 1e-5  # relative, of metrics: other numbers of devices add up in another order


def together(folder: Path, *words: str, resume: str = "") -> list[dict]:
    """What two processes say about an experiment that they have trained."""
    config = [f"trainer.logger.log_dir={folder / 'runs'}", *words]
    return [json.loads(pairs.lines(one)[-1]) for one in pairs.run(JOB, str(folder), resume, *config)]


def alone(folder: Path, *words: str, resume: str | bool = False) -> dict:
    """The same of this process, on one device."""
    words = (f"trainer.logger.log_dir={folder / 'runs'}", "trainer.mesh=null", *words)
    trainer = build(load_experiment(folder / "tiny.yaml", words).value)
    data = trainer.dataset
    found = trainer.train_model(data.train_loader, data.val_loader, data.test_loader, resume=resume, quiet=True)
    results = {str(place): {name: float(value) for name, value in each.items()} for place, each in found.items()}
    return {"results": results, "run": str(trainer.folder.path)}


def cut_short(run: str, folder: Path) -> str:
    """A copy of a run as it was after six steps."""
    copy = shutil.copytree(run, folder)
    later = [path for path in (copy / "checkpoints").glob("step_*") if int(path.name[5:]) > 6]
    assert later
    for path in later:
        shutil.rmtree(path)
    return str(copy)


def assert_agree(found: dict, wanted: dict) -> None:
    assert found["results"].keys() == wanted["results"].keys()
    for place, metrics in wanted["results"].items():
        assert found["results"][place] == pytest.approx(metrics, rel=BOUND)


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, list[dict]]:
    """An experiment that two processes have trained, with its state split over both."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "tiny.yaml").write_text(TINY)
    return folder, together(folder)


@pytest.mark.integration
def test_only_the_lead_writes_but_for_the_shares_of_checkpoints(done):
    folder, (lead, other) = done
    assert any(path.endswith("metrics.jsonl") for path in lead["written"])
    assert not [path for path in other["written"] if "/checkpoints/.partial-" not in path]
    run = Path(lead["run"])
    assert run == Path(other["run"])
    assert [path.name for path in (folder / "runs").iterdir()] == [run.name]
    kept = {path.name for path in run.iterdir()}
    assert {"layout.txt", "config.yaml", "metrics.jsonl", "gradient_spikes.npz", "plugins"} <= kept
    assert "fsdp" in (run / "layout.txt").read_text()


@pytest.mark.integration
def test_all_processes_return_the_same_metrics_which_are_those_of_one_process(done, tmp_path):
    folder, (lead, other) = done
    assert lead["results"] == other["results"]
    assert lead["devices"] == 2
    assert_agree(alone(folder), lead)
    assert {"val/f1", "val/auroc"} <= lead["results"]["1"].keys()


@pytest.mark.integration
def test_the_ragged_last_batch_of_an_evaluation_is_padded_in_every_process(done):
    assert [one["compilations"] for one in done[1]] == [1, 1]  # of validations and the test


@pytest.mark.integration
def test_a_run_of_two_processes_resumes_in_one_and_the_other_way(done, tmp_path):
    _, (lead, _) = done
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert_agree(alone(tmp_path, resume=cut_short(lead["run"], tmp_path / "of two")), lead)
    single = alone(tmp_path)
    assert_agree(together(tmp_path, resume=cut_short(single["run"], tmp_path / "of one"))[1], lead)
