"""Kill or signal a process of the job, and check what it leaves behind."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from jax_trainer.checkpoint.store import CheckpointStore
from tests.scorecard.harness import Child, ProcessResult, progress, run, saves, starts
from tests.scorecard.job import EVERY, Options


def committed(options: Options) -> list[int]:
    """The steps of all complete checkpoints, verified file by file."""
    return committed_in(options.folder / "checkpoints")


def committed_in(folder: Path) -> list[int]:
    """The same for the folder of a store."""
    store = CheckpointStore(folder)
    return [saved.step for saved in store.all() if not store.verify(saved.path)]


def kill_at(options: Options, failpoint: str, *, interval: int = EVERY, **environment: str) -> list[str]:
    """Kills the process at a failpoint; returns the problems found afterwards."""
    before = len(saves(options, "requested"))
    ended = run(options, failpoint=failpoint, **environment)
    if ended.code != -signal.SIGKILL:
        return [f"it was not killed but exited with {ended.code}: {ended.text[-1000:]}"]
    if len(saves(options, "requested")) <= before:
        return ["it was killed before the first save"]
    copied, kept = max(saves(options), default=0), committed(options)
    lost = copied - max(kept, default=0)
    problems = [] if kept or copied <= interval else ["no valid checkpoint is left"]
    return problems + (
        [f"{lost} steps are lost: step {copied} was being saved, the checkpoints are {kept}"] if lost > interval else []
    )


def kill_after(options: Options, seconds: float) -> bool:
    """Sends SIGKILL after `seconds`; returns whether the process was still running."""
    child = Child(options)
    if child.wait_at_most(seconds):
        ended = child.wait()
        assert ended.code == 0, f"It failed with exit code {ended.code} before the kill:\n{ended.text[-3000:]}"
        return False
    child.kill()
    return True


def kill_when(options: Options, reached: Callable[[Child], bool]) -> None:
    """Sends SIGKILL as soon as `reached` returns True."""
    child = Child(options)
    child.until(lambda: reached(child))
    assert child.is_running, f"it ended before the kill:\n{child.wait().text[-3000:]}"
    child.kill()


def terminate(
    options: Options,
    faults: str,
    *,
    failpoint: str = "",
    number: int = signal.SIGTERM,
    code: tuple[int, ...] = (143,),
    within: float = 5.0,
    pace: float = 0.02,
    saved: bool = True,
) -> list[str]:
    """Sends a signal when the job has written `marked`; returns the problems found afterwards."""
    ended, seconds = send_signals(options, faults, [number], failpoint=failpoint, pace=pace)
    problems = [] if ended.code in code else [f"the exit code is {ended.code}: {ended.text[-1500:]}"]
    problems += [f"it took {seconds:.1f} s to end"] if seconds > within else []
    latest = max(committed(options), default=0)
    if saved and latest != progress(options):
        problems.append(f"the latest checkpoint is step {latest}, the last step was {progress(options)}")
    return problems


def send_signals(
    options: Options, faults: str, numbers: list[int], *, failpoint: str = "", pace: float = 0.02, pause: float = 1.0
) -> tuple[ProcessResult, float]:
    """Sends signals `pause` seconds apart, from `marked` on; also returns the seconds from the last one to the exit."""
    failpoints = {"JAXTRAINER_FAILPOINT": failpoint} if failpoint else {}
    child = Child(options, JOB_FAULTS=faults, JOB_PACE=str(pace), **failpoints)
    child.until_marked()
    for index, number in enumerate(numbers):
        time.sleep(pause if index else 0)
        child.signal(number)
    began = time.monotonic()
    ended = child.wait(90)
    return ended, time.monotonic() - began


def lost_work(options: Options) -> int:
    """The number of steps that the last process repeated."""
    return progress(options) - starts(options)[-1]


def leftovers(folder: Path) -> list[str]:
    """The remains of unfinished checkpoints in a folder."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step_") or "." in path.name)
