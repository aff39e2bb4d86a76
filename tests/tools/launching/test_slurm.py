"""SLURM: the script as it is printed and submitted. `test_slurm_cluster.py` has a cluster that runs it."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jax_trainer.tools.launching import Launch, Workers, slurm
from jax_trainer.tools.launching.slurm import sbatch
from tests.tools.cli.cli_runs import ROOT, run_command


def test_the_printed_script_is_the_one_of_the_guide(tmp_path: Path):
    page = (ROOT / "docs" / "guides" / "processes.md").read_text()
    shown = re.search(r"```bash\n(#!/bin/bash.*?)```", page, re.DOTALL)
    assert shown is not None
    words = ["--nodes", "4", "--processes-per-node", "8", "--cpus-per-process", "8", "--time", "12h"]
    words += ["--restarts", "20", "gpt2"]
    assert run_command("launch", "--on", "slurm", "--print", *words, folder=ROOT).out == shown[1]


@pytest.mark.parametrize("count", ["", "1"], ids=["started", "requeued"])
@pytest.mark.parametrize(
    "launch",
    [
        Launch(config="a b.yaml", changes=("trainer.name='x y'",), platform="cpu", restarts=2),
        Launch(config="x.yaml", nodes=2, devices_per_process=4, processes_per_node=2),
        Launch(config="x.yaml", changes=("resume=runs/x",), platform="cpu"),
    ],
)
def test_the_printed_script_is_bash_that_passes_every_word_on_and_resumes_when_requeued(
    launch: Launch, count: str, tmp_path: Path
):
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nSLURM_LOCALID=1 "$@"')
    (tmp_path / "jax-trainer").write_text('#!/bin/bash\nprintf "%s\\n" "$@" "$JAX_LOCAL_DEVICE_IDS"\nexit 3')
    for tool in tmp_path.iterdir():
        tool.chmod(0o700)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": count}
    script = sbatch(launch, {"partition": "gpu"})
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    devices = "" if launch.platform == "cpu" else "4,5,6,7"
    assert done.stdout.splitlines() == [*launch.words(resume=bool(count)), devices]
    assert "#SBATCH --partition=gpu\n" in script


@pytest.mark.parametrize(("code", "count", "is_requeued"), [(143, 1, True), (143, 2, False), (1, 0, False)])
def test_the_script_of_workers_is_an_array_that_requeues_one_job_of_it(
    code: int, count: int, is_requeued: bool, tmp_path: Path
):
    tools = {"srun": 'shift; "$@"', "jax-trainer": f'echo "$@" "$ID"\nexit {code}', "scontrol": 'echo "$@"'}
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": str(count)}
    environment = {**os.environ, **array, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ("tune", "x.yaml", "--space", "space.yaml")
    workers = Workers(config="x.yaml", command=command, workers=8, id_variable="ID", restarts=2, devices_per_process=2)
    script = sbatch(workers)
    assert "#SBATCH --array=0-7\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n" in script
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stdout.splitlines() == [" ".join([*command, "7_3"]), *["requeue 7_3"] * is_requeued]
    alone = sbatch(replace(workers, workers=1))  # a job of its own, with its id
    assert "--array" not in alone
    done = subprocess.run(["bash", "-c", alone], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [" ".join([*command, "7"]), *["requeue 7"] * is_requeued]


@pytest.mark.parametrize(("patience", "failures"), [(60.0, 2), (0.0, 1)], ids=["returns", "stays away"])
def test_a_controller_that_does_not_answer_is_asked_again_for_a_while(
    patience: float, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "scontrol").write_text(
        f"#!/bin/bash\necho >> {tmp_path}/asked\n"
        f"if [ $(wc -l < {tmp_path}/asked) -le {failures} ]; then echo Socket timed out >&2; exit 1; fi\n"
        "echo 'JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0 RunTime=1'\n"
    )
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_POLL", 0.0)
    monkeypatch.setattr(slurm, "_OUTAGE_SECONDS", patience)
    if patience:
        slurm.follow(Launch(config="x.yaml"), "7", None)
        return
    with pytest.raises(slurm.JobFailed, match=r"Job 7.*Socket timed out.*may still run"):
        slurm.follow(Launch(config="x.yaml"), "7", None)
