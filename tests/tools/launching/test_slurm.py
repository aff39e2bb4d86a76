"""SLURM: the script as it is printed and submitted. `test_slurm_cluster.py` has a cluster that runs it."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jax_trainer.tools.launching import Launch, slurm
from jax_trainer.tools.launching.slurm import sbatch
from tests.tools.cli.cli_runs import ROOT, run_command


def test_the_printed_script_is_the_one_of_the_guide(tmp_path: Path):
    page = (ROOT / "docs" / "guides" / "processes.md").read_text()
    shown = re.search(r"```bash\n(#!/bin/bash.*?)```", page, re.DOTALL)
    assert shown is not None
    words = ["--nodes", "4", "--processes-per-node", "8", "--cpus-per-process", "8", "--time", "12h"]
    words += ["--restarts", "20", "gpt2"]
    assert run_command("launch", "--on", "slurm", "--print", *words, folder=ROOT).out == shown[1]


def test_the_printed_script_is_bash_that_passes_every_word_on_and_resumes_when_requeued(tmp_path: Path, subtests):
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nSLURM_LOCALID=1 "$@"')
    (tmp_path / "jax-trainer").write_text('#!/bin/bash\nprintf "%s\\n" "$@" "$JAX_LOCAL_DEVICE_IDS"\nexit 3')
    for tool in tmp_path.iterdir():
        tool.chmod(0o700)
    launches = [
        Launch(config="a b.yaml", changes=("trainer.name='x y'",), platform="cpu", restarts=2),
        Launch(config="x.yaml", nodes=2, devices_per_process=4, processes_per_node=2),
        Launch(config="x.yaml", changes=("resume=runs/x",), platform="cpu"),
    ]
    for count in ["", "1"]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": count}
        for launch in launches:
            with subtests.test(count=count, launch=launch):
                script = sbatch(launch, {"partition": "gpu"})
                done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
                assert done.returncode == 3, done.stderr
                devices = "" if launch.platform == "cpu" else "4,5,6,7"
                assert done.stdout.splitlines() == [*launch.words(resume=bool(count)), devices]
                assert "#SBATCH --partition=gpu\n" in script


def test_the_script_of_workers_is_an_array_that_requeues_one_job_of_it(tmp_path: Path, subtests):
    for number, (code, count, is_requeued) in enumerate([(143, 1, True), (143, 2, False), (1, 0, False)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(code=code):
            tools = {"srun": 'shift; "$@"', "jax-trainer": f'echo "$@" "$ID"\nexit {code}', "scontrol": 'echo "$@"'}
            for name, text in tools.items():
                (folder / name).write_text(f"#!/bin/bash\n{text}\n")
                (folder / name).chmod(0o700)
            array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": str(count)}
            environment = {**os.environ, **array, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
            command = ("tune", "x.yaml", "--space", "space.yaml")
            workers = Launch(
                config="x.yaml", command=command, workers=8, id_variable="ID", restarts=2, devices_per_process=2
            )
            script = sbatch(workers)
            assert (
                "#SBATCH --array=0-7\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n"
                in script
            )
            done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
            assert done.returncode == code, done.stderr
            assert done.stdout.splitlines() == [" ".join([*command, "7_3"]), *["requeue 7_3"] * is_requeued]
            alone = sbatch(replace(workers, workers=1))  # a job of its own, with its id
            assert "--array" not in alone
            done = subprocess.run(["bash", "-c", alone], env=environment, capture_output=True, text=True)
            assert done.stdout.splitlines() == [" ".join([*command, "7"]), *["requeue 7"] * is_requeued]


def test_a_controller_that_does_not_answer_is_asked_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests
):
    for number, (patience, failures) in enumerate([(60.0, 2), (0.0, 1)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with subtests.test(patience=patience):
            (folder / "scontrol").write_text(
                f"#!/bin/bash\necho >> {folder}/asked\n"
                f"if [ $(wc -l < {folder}/asked) -le {failures} ]; then echo Socket timed out >&2; exit 1; fi\n"
                "echo 'JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0 RunTime=1'\n"
            )
            (folder / "scontrol").chmod(0o700)
            monkeypatch.chdir(folder)
            monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
            monkeypatch.setattr(slurm, "_POLL", 0.0)
            monkeypatch.setattr(slurm, "_OUTAGE_SECONDS", patience)
            if patience:
                slurm.follow(Launch(config="x.yaml"), "7", None)
                continue
            with pytest.raises(slurm.JobFailed, match=r"Job 7.*Socket timed out.*may still run"):
                slurm.follow(Launch(config="x.yaml"), "7", None)
