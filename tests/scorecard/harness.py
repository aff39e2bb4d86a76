"""Runs the job in processes of its own, kills them, starts them again, and compares what came out."""

import itertools
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from job import Options

import jax_trainer

TIMEOUT = 180.0  # seconds after which a process counts as hanging
CARD = "JAX_TRAINER_SCORECARD"
_CLOCKS = ("time", "seconds", "per_second", "waited", "throughput")  # what the clock says differs from run to run
_OUTPUTS, _NUMBERS = tempfile.TemporaryDirectory(prefix="scorecard-"), itertools.count(1)
_CHILDREN: list["Child"] = []
_REFERENCES: dict[Options, Options] = {}


@dataclass
class Ended:
    """How a process ended: its exit code, what it wrote, how long it took."""

    code: int
    text: str
    seconds: float


class Child:
    """A process that runs the job, in a group of its own."""

    def __init__(self, options: Options, *, cwd: Path | str | None = None, **environment: str) -> None:
        self.options, out = options, Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "marked").unlink(missing_ok=True)
        self._said = Path(_OUTPUTS.name) / f"{next(_NUMBERS)}.txt"
        self.began = time.monotonic()
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                options.command(),
                stdout=said,
                stderr=said,
                env=child_environment(options, environment),
                start_new_session=True,
                cwd=cwd,
            )
        _CHILDREN.append(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout: float = TIMEOUT) -> Ended:
        """Waits for the end; one that takes too long hangs, which is a failure."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"The process hangs: {timeout:g} s.\n{self._ended().text[-3000:]}") from None
        return self._ended()

    def wait_at_most(self, seconds: float) -> bool:
        """Whether it ended within this time."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_running

    def until(self, reached: Any, timeout: float = TIMEOUT) -> None:
        """Waits until `reached()`, or the end."""
        deadline = time.monotonic() + timeout
        while self.is_running and not reached():
            assert time.monotonic() < deadline, "the process never came as far as it should"
            time.sleep(0.005)

    def until_marked(self) -> None:
        """Waits until the job says that the place is reached."""
        self.until((Path(self.options.out) / "marked").exists)
        assert self.is_running, f"the process ended before the place was reached:\n{self._ended().text[-3000:]}"

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        os.kill(self._process.pid, number)

    def kill(self) -> Ended:
        """SIGKILL to all of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return self._ended()

    def _ended(self) -> Ended:
        text = self._said.read_text(errors="replace")
        return Ended(self._process.returncode, text, time.monotonic() - self.began)


def end_children() -> None:
    """Kills what a case that failed has left running."""
    while _CHILDREN:
        _CHILDREN.pop().kill()


def child_environment(options: Options, changes: Mapping[str, str]) -> dict[str, str]:
    """Like that of the tests, with one device or as many as asked for."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JOB_", "JAXTRAINER_"))}
    flags = "" if options.devices == 1 else f"--xla_force_host_platform_device_count={options.devices}"
    source = Path(jax_trainer.__file__).parents[1]  # the same library as here
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
    return {**inherited, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **changes}


def run(options: Options, *, failpoint: str = "", trouble: str = "", **environment: str) -> Ended:
    """Runs the job to its end, however it ends."""
    faults = {"JAXTRAINER_FAILPOINT": failpoint, "JOB_TROUBLE": trouble}
    return Child(options, **{name: value for name, value in faults.items() if value}, **environment).wait()


def until_done(options: Options, most: int = 3, **environment: str) -> int:
    """Gives the same command until it ends well; how often that took."""
    attempt, ended = 1, run(options, **environment)
    while ended.code and attempt < most:
        attempt, ended = attempt + 1, run(options, **environment)
    if ended.code == 0:
        return attempt
    raise AssertionError(f"The run does not end well when started again: exit code {ended.code}.\n{ended.text[-3000:]}")


def reference(options: Options, folder: Path, **environment: str) -> Options:
    """The same job, never disturbed; made once per configuration."""
    key = replace(options, out="", version="j", resume="auto", fork=0)
    if key not in _REFERENCES:
        undisturbed = replace(key, out=str(folder / f"reference-{len(_REFERENCES)}"))
        ended = run(undisturbed, **environment)
        assert ended.code == 0, f"The undisturbed run failed:\n{ended.text[-3000:]}"
        (Path(undisturbed.out) / "seconds").write_text(str(ended.seconds))
        _REFERENCES[key] = undisturbed
    return _REFERENCES[key]


def lines(file: Path) -> list[dict[str, Any]]:
    """What a file of JSON lines holds."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def ledger(options: Options) -> list[dict[str, Any]]:
    """What the steps of a job were trained on."""
    return lines(Path(options.out) / "ledger.jsonl")


def starts(options: Options) -> list[int]:
    """The step from which each process of a job resumed."""
    return [row["step"] for row in lines(Path(options.out) / "starts.jsonl")]


def saves(options: Options, kind: str = "taken") -> list[int]:
    """The steps whose states were taken over to be saved, or "asked for" to be, in order."""
    return [row["step"] for row in lines(Path(options.out) / "saves.jsonl") if row["is"] == kind]


def progress(options: Options) -> int:
    """The last step that was dispatched."""
    file = Path(options.out) / "progress"
    return int(file.read_text() or 0) if file.exists() else 0


def result(options: Options) -> dict[str, Any]:
    """What came out of a job that is done."""
    return json.loads((Path(options.out) / "result.json").read_text())


def rows(options: Options) -> list[dict[str, Any]]:
    """What the run recorded, without what the clock says and where it is."""
    kept = []
    for row in lines(options.folder / "metrics.jsonl"):
        row.pop("hparams", None)
        kept.append({name: _untimed(value) for name, value in row.items() if not _is_clock(name)})
    return kept


def _untimed(value: Any) -> Any:
    return {name: one for name, one in value.items() if not _is_clock(name)} if isinstance(value, dict) else value


def _is_clock(name: str) -> bool:
    return any(word in name.rpartition("/")[2] for word in _CLOCKS)


def differences(options: Options, undisturbed: Options) -> list[str]:
    """In what a job differs from the one that was never disturbed; nothing if it is the same, bit for bit."""
    found, wanted = result(options), result(undisturbed)
    found_problems = [f"{part} differ" for part in wanted["parts"] if found["parts"][part] != wanted["parts"][part]]
    if found["digest"] != wanted["digest"] and not found_problems:
        found_problems.append("the steps differ")
    found_problems += _first_difference("ledger", ledger(options), ledger(undisturbed))
    found_problems += _first_difference("metrics.jsonl", rows(options), rows(undisturbed))
    found_problems += [
        f"results[{place}] differ: {found['results'].get(place)} instead of {wanted['results'][place]}"
        for place in wanted["results"]
        if found["results"].get(place) != wanted["results"][place]
    ]
    return found_problems


def ledger_differences(options: Options, undisturbed: Options, *, keys: tuple[str, ...] = ("step", "ids")) -> list[str]:
    """The same for what was trained on alone."""
    only = [[{key: row[key] for key in keys} for row in ledger(one)] for one in (options, undisturbed)]
    return _first_difference("ledger", *only)


def _first_difference(name: str, found: list[Any], wanted: list[Any]) -> list[str]:
    for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if one != other:
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            changed = {key: (one.get(key), other.get(key)) for key in keys}
            return [f"{name} differs from line {index + 1} on: step {one.get('step')}, {str(changed)[:300]}"]
    return [] if len(found) == len(wanted) else [f"{name} has {len(found)} lines instead of {len(wanted)}"]


class Score:
    """What a case came to: how many runs, how many as they should be, and some numbers.

    Used as `with Score("A1") as score:`; leaving the block fails the test unless there were runs and all of them are as
    they should be.
    """

    def __init__(self, case: str) -> None:
        self.case, self.runs, self.passed = case, 0, 0
        self.numbers: dict[str, Any] = {}
        self.problems: list[str] = []

    def add(self, problems: list[str], what: str = "") -> None:
        """One more run; it is as it should be if there are no problems."""
        self.runs += 1
        self.passed += not problems
        self.problems += [f"{what}: {problem}" if what else problem for problem in problems]

    def check(self, holds: bool, what: str) -> None:
        """One more run, of which one thing is asked."""
        self.add([] if holds else [what])

    def note(self, **numbers: Any) -> None:
        """Numbers for the table."""
        self.numbers |= numbers

    def __enter__(self) -> "Score":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.add([f"{type(error).__name__}: {error}"])
        record(self)
        if error is None:
            listed = "\n".join(self.problems[:10])
            assert self.runs > 0, f"{self.case}: nothing was tried"
            assert self.passed == self.runs, (
                f"{self.case}: {self.passed} of {self.runs} are as they should be:\n{listed}"
            )


def record(score: Score) -> None:
    """Appends a line to the file that the environment names, for `scripts/scorecard.py`."""
    file = os.environ.get(CARD)
    if file:
        row = {
            "case": score.case,
            "runs": score.runs,
            "passed": score.passed,
            "numbers": score.numbers,
            "problems": score.problems[:5],
        }
        with Path(file).open("ab", buffering=0) as opened:
            opened.write(json.dumps(row).encode() + b"\n")
