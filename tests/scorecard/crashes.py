"""Ways to end a process of the job before it is done, and what must hold afterwards."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from harness import Child, Ended, progress, run, saves, starts
from job import EVERY, Options

from jax_trainer.checkpoint.store import CheckpointStore


def committed(options: Options) -> list[int]:
    """The steps of which there is a whole checkpoint, every file of it verified."""
    return committed_in(options.folder / "checkpoints")


def committed_in(folder: Path) -> list[int]:
    """The same for the folder of a store."""
    store = CheckpointStore(folder)
    return [saved.step for saved in store.all() if not store.verify(saved.path)]


def killed_at(options: Options, failpoint: str, *, interval: int = EVERY, **environment: str) -> list[str]:
    """Lets a failpoint kill the process; what is wrong afterwards."""
    before = len(saves(options, "asked for"))
    ended = run(options, failpoint=failpoint, **environment)
    if ended.code != -signal.SIGKILL:
        return [f"it was not killed, but ended with {ended.code}: {ended.text[-1000:]}"]
    if len(saves(options, "asked for")) <= before:
        return ["it was killed before anything was saved"]
    taken, kept = max(saves(options), default=0), committed(options)
    lost = taken - max(kept, default=0)
    problems = [] if kept or taken <= interval else ["no valid checkpoint is left"]
    return problems + (
        [f"{lost} steps are lost: {taken} was being saved, and there are {kept}"] if lost > interval else []
    )


def killed_after(options: Options, seconds: float) -> bool:
    """SIGKILL after a time; whether the process was still there to be killed."""
    child = Child(options)
    if child.wait_at_most(seconds):
        ended = child.wait()
        assert ended.code == 0, f"It failed by itself with {ended.code}:\n{ended.text[-3000:]}"
        return False
    child.kill()
    return True


def killed_when(options: Options, reached: Callable[[Child], bool]) -> None:
    """SIGKILL as soon as the process is as far as this."""
    child = Child(options)
    child.until(lambda: reached(child))
    assert child.is_running, f"it ended before it was to be killed:\n{child.wait().text[-3000:]}"
    child.kill()


def terminated(
    options: Options,
    trouble: str,
    *,
    failpoint: str = "",
    number: int = signal.SIGTERM,
    code: tuple[int, ...] = (143,),
    within: float = 5.0,
    pace: float = 0.02,
    saved: bool = True,
) -> list[str]:
    """Sends a signal where the job says so; what is wrong afterwards."""
    ended, seconds = signalled(options, trouble, [number], failpoint=failpoint, pace=pace)
    problems = [] if ended.code in code else [f"the exit code is {ended.code}: {ended.text[-1500:]}"]
    problems += [f"it took {seconds:.1f} s to end"] if seconds > within else []
    latest = max(committed(options), default=0)
    if saved and latest != progress(options):
        problems.append(f"the latest checkpoint is that of step {latest}, and step {progress(options)} was the last")
    return problems


def signalled(
    options: Options, trouble: str, numbers: list[int], *, failpoint: str = "", pace: float = 0.02, pause: float = 1.0
) -> tuple[Ended, float]:
    """Sends these signals where the job says so, `pause` seconds apart; how long the end took after the last."""
    faults = {"JAXTRAINER_FAILPOINT": failpoint} if failpoint else {}
    child = Child(options, JOB_TROUBLE=trouble, JOB_PACE=str(pace), **faults)
    child.until_marked()
    for index, number in enumerate(numbers):
        time.sleep(pause if index else 0)
        child.signal(number)
    began = time.monotonic()
    ended = child.wait(90)
    return ended, time.monotonic() - began


def lost_work(options: Options) -> int:
    """How many steps the last process had to repeat."""
    return progress(options) - starts(options)[-1]


def leftovers(folder: Path) -> list[str]:
    """What of unfinished checkpoints is left in a folder."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("step_") or "." in path.name)
