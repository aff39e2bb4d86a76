"""`jax-trainer launch`: starts the processes that train one experiment together; what `tune` shares with it."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import yaml

from jax_trainer.config.redaction import secret_values
from jax_trainer.config.stop_signals import STOP_CODES
from jax_trainer.tools.cli.command import HEARTBEAT, Command, OfConfig, flag, integer, option, seconds
from jax_trainer.tools.cli.outcomes import CTRL_C, WRONG, Failure, Interrupted, Outcome, WrongInput, reporting

MOST_PROCESSES = 1024
OF_PROCESSES = ("devices_per_process", "platform", "cpus_per_process", "memory_per_process", "time", "restarts")
_ENGINES: dict[str, dict[str, tuple[str, ...]]] = {  # of the options that not every engine of a command has
    "launch": {"print": ("slurm", "kubernetes"), **dict.fromkeys(("image", "volume"), ("kubernetes",))},
    "tune": {"print": ("slurm",), **dict.fromkeys(("workers", *OF_PROCESSES), ("ray", "slurm"))},
}
_RESUME = "To resume, run the same command with `resume=auto`."


def _duration(text: str) -> int:
    """Seconds: a number with s, m, h or d, or [days-]hours:minutes:seconds."""
    if (found := re.fullmatch(r"([0-9]{1,7})([smhd])", text)) and int(found[1]):
        return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    if found := re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,3}):([0-5][0-9]):([0-5][0-9])", text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        if total := ((days * 24 + hours) * 60 + minutes) * 60 + seconds:
            return total
    raise argparse.ArgumentTypeError(f"expected a time such as 30m, 12h or 12:00:00, found {text[:40]!r}.")


SOME = integer(1, MOST_PROCESSES)


class OfWorkers(Command):
    """The arguments of a command whose processes an engine starts.

    Args:
        print: print what the engine reads, and start nothing: slurm (sbatch), kubernetes
        devices_per_process: GPUs of a process (default: split evenly), or CPU devices (default: 1)
        platform: of the devices (default: cuda on slurm and kubernetes, else any GPUs)
        cpus_per_process: CPU cores that a process reserves
        memory_per_process: memory that a process reserves
        address: ray: of a running cluster; auto: that of this machine (default: a new one)
        option: slurm: an option of sbatch, such as partition=gpu; repeatable
        time: limit of each start, which then saves and ends: 45s, 30m, 12h, 2d or 12:00:00
        restarts: resume up to K times after a lost process, a preemption or the time limit (default: 0)
    """

    group = ("engines", "what starts the processes, and what each of them gets")
    on: str
    print: bool = flag()
    devices_per_process: int | None = option("D", SOME, names="--devices-per-process --devices")
    platform: str | None = option(choices=("cuda", "cpu"))
    cpus_per_process: int | None = option("N", SOME)
    memory_per_process: int | None = option("GB", integer(1))
    address: str | None = option("HOST:PORT")
    time: int | None = option("TIME", _duration)
    restarts: int = option("K", integer(0, MOST_PROCESSES), 0)
    option: list[str] = option("NAME=VALUE", default=[], action="append")

    def check_options(self) -> None:
        """Refuses options that the engine does not have."""
        for name, engines in {"address": ("ray",), "option": ("slurm",), **_ENGINES[self.command]}.items():
            if getattr(self, name) and self.on not in engines:
                option, others = f"--{name.replace('_', '-')}", " or ".join(f"--on {engine}" for engine in engines)
                raise WrongInput(f"{option} is for {others}, not for --on {self.on}. Leave it out, or pass {others}.")

    def check_stored_words(self) -> None:
        """Refuses overrides with a secret, which the job of an engine would store."""
        for change in self.changes:
            key, _, value = change.partition("=")
            if secret_values(yaml.safe_load(value) if value.startswith(("{", "[")) else value, key):
                raise WrongInput(
                    f"The override of {key} has a secret, which the job would store. Set it in the file {self.config}, "
                    "or by the environment variable that its tool reads."
                )

    def ray_stdout(self) -> AbstractContextManager[Any]:
        """Sends what Ray forwards from its workers to standard error if ours must be JSON."""
        return redirect_stdout(sys.stderr) if self.json else nullcontext()

    def on_slurm(self, planned: Any, out: IO[str] | None) -> Outcome | str:
        """The printed script; or submits the job, shows its output until it ends, and returns its id."""
        from jax_trainer.tools.launching import LaunchError, slurm

        planned = replace(planned, platform=planned.platform or "cuda")
        for word in self.option:
            if not re.fullmatch(r"[a-z][a-z-]*=[^\s]+", word):
                raise WrongInput(f"--option is NAME=VALUE of sbatch, such as partition=gpu, found {word[:80]!r}.")
        options = dict(word.split("=", 1) for word in self.option)
        if self.print:
            return _printed(slurm.sbatch(planned, options))
        job = slurm.submit(planned, options)
        sys.stderr.write(f"jax-trainer: Submitted job {job}; logs in {slurm.FOLDER}.\n")
        try:
            slurm.follow(planned, job, out)
        except KeyboardInterrupt:
            text = f"Job {job} continues without this command. To end it, run `scancel {job}`."
            raise Interrupted(CTRL_C, text, "") from None
        except LaunchError as error:
            raise Failure(str(error), error.code) from None
        return job


class Launch(OfConfig, OfWorkers):
    """Start the processes that train one experiment together, each running `train`: on this machine, or on an engine.

      jax-trainer launch --processes-per-node 2 digits
      jax-trainer launch --on slurm --nodes 4 --processes-per-node 8 --time 12h --restarts 20 gpt2

    The primary process writes the run folder, and its output is shown unchanged; lines of the other processes start
    with their index. Ctrl-C or SIGTERM stops all processes at the same step, with one checkpoint.

    Args:
        changes: overrides of configuration values, such as trainer.train_epochs=3, and .py files that register your own
            classes; resume=auto: continue the newest run that computes the same, if any
        on: the engine that starts the processes (default: local, this machine)
        name: name of the job (default: that of CONFIG)
        nodes: number of machines (default: 1)
        processes_per_node: processes on each of them (default: 1)
        heartbeat: timeout after which a process without heartbeats is considered dead (default: 30)
        image: kubernetes: container image with jax-trainer and your code
        volume: kubernetes: mount a volume claim; the first is the working folder; repeatable

    Examples:
        jax-trainer launch --processes-per-node 2 digits
        jax-trainer launch --on slurm --nodes 2 --time 4h mine.yaml resume=auto
    """

    summary = "train in several processes, on this machine or on Ray, SLURM or Kubernetes"
    trains = True

    on: str = option(default="local", choices=("local", "ray", "slurm", "kubernetes"))
    name: str = option("NAME", default="")
    nodes: int = option("N", SOME, 1)
    processes_per_node: int = option("P", SOME, 1)
    heartbeat: float = option("SECONDS", seconds(2), HEARTBEAT)
    image: str | None = option("IMAGE")
    volume: list[str] = option("CLAIM:/PATH", default=[], action="append")

    def run(self) -> Outcome:
        from jax_trainer.tools.cli.main import main
        from jax_trainer.tools.launching import Launch, LaunchError, kubernetes, local, ray_cluster, slurm

        with reporting(wrong=LaunchError):
            self.check_options()
            same = ("config", "name", "nodes", "processes_per_node", "heartbeat", "quiet", "json", *OF_PROCESSES)
            options = {name: getattr(self, name) for name in same}
            planned = Launch(**options, changes=tuple(self.changes), imports=tuple(self.imports))
            if self.on == "local":
                return _attempts(planned, partial(local.run, planned))
            if self.on == "ray":
                with self.ray_stdout(), ray_cluster.cluster(self.address, planned):
                    return _attempts(planned, partial(ray_cluster.run, planned, main))
            if self.on == "kubernetes":
                if not self.print or not self.image:
                    text = "For Kubernetes, write the manifest with --print and --image, and apply it: "
                    raise WrongInput(f"{text}`launch --on kubernetes --print --image IMAGE … | kubectl apply -f -`.")
                self.check_stored_words()
                planned = replace(planned, platform=planned.platform or "cuda")
                return _printed(kubernetes.manifest(planned, image=self.image, volumes=tuple(self.volume)))
            self.check_stored_words()
            job = self.on_slurm(planned, None if self.json else sys.stdout)
            if isinstance(job, Outcome):
                return job
            # what earlier starts and libraries have printed comes before it
            result = Path(slurm.FOLDER, f"{job}.out").read_text().strip().rpartition("\n")[2] if self.json else "{}"
            return Outcome({**json.loads(result), "job": job, "processes": planned.processes})


def _printed(text: str) -> Outcome:
    return Outcome({"status": "printed", "text": text}, lambda console: console.out(text, end="", highlight=False))


def _attempts(planned: Any, run: Callable[..., Any]) -> Outcome:
    """Runs until all processes succeed, or no restart is left."""
    from jax_trainer.tools.launching import RESUMABLE

    for attempt in range(planned.restarts + 1):
        ended = run(resume=attempt > 0)
        if not ended.failed:
            return Outcome({**json.loads(ended.output or "{}"), "processes": planned.processes})
        first, is_last = next(iter(ended.failed.values())), attempt == planned.restarts
        first = 128 + ended.stopped_by if ended.stopped_by else first  # also of processes that had to be killed
        if first in STOP_CODES and (is_last or ended.stopped_by or not ended.timed_out):
            raise Interrupted(first, f"{ended.text} {_RESUME}", "")
        if first == WRONG:
            raise WrongInput(ended.text)
        if first not in RESUMABLE or is_last:
            raise Failure(f"{ended.text} {_RESUME}")
        left = planned.restarts - attempt
        sys.stderr.write(f"jax-trainer: {ended.text} Restarting ({left} restarts left).\n")
    raise AssertionError("the last attempt returns or raises")
