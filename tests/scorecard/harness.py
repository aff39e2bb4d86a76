"""Runs the job in child processes, kills and restarts them, and compares the results."""

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

import jax_trainer
from tests.scorecard.job import Options

TIMEOUT = 180.0  # seconds after which a process is considered hanging
CARD = "JAX_TRAINER_SCORECARD"
_CLOCKS = (
    "mfu",
    "memory_",
    "time",
    "seconds",
    "per_second",
    "waited",
    "throughput",
)  # metrics that measure time differ from run to run
_OUTPUTS, _NUMBERS = tempfile.TemporaryDirectory(prefix="scorecard-"), itertools.count(1)
_CHILDREN: list["Child"] = []
_REFERENCES: dict[Options, Options] = {}


@dataclass
class ProcessResult:
    """The exit code of a process, its output, and its duration in seconds."""

    code: int
    text: str
    seconds: float


class Child:
    """A child process that runs the job, in its own process group."""

    def __init__(self, options: Options, *, cwd: Path | str | None = None, **environment: str) -> None:
        self.options, out = options, Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        (out / "marked").unlink(missing_ok=True)
        self._output_file = Path(_OUTPUTS.name) / f"{next(_NUMBERS)}.txt"
        self.began = time.monotonic()
        with self._output_file.open("wb") as output:
            self._process = subprocess.Popen(
                options.command(),
                stdout=output,
                stderr=output,
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

    def wait(self, timeout: float = TIMEOUT) -> ProcessResult:
        """Waits for the exit; fails after `timeout` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"The process hangs: {timeout:g} s.\n{self._ended().text[-3000:]}") from None
        return self._ended()

    def wait_at_most(self, seconds: float) -> bool:
        """Whether it exits within `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return not self.is_running

    def until(self, reached: Any, timeout: float = TIMEOUT) -> None:
        """Waits until `reached()` is True or the process exits."""
        deadline = time.monotonic() + timeout
        while self.is_running and not reached():
            assert time.monotonic() < deadline, "the process did not get that far"
            time.sleep(0.005)

    def until_marked(self) -> None:
        """Waits until the job has written `marked`."""
        self.until((Path(self.options.out) / "marked").exists)
        assert self.is_running, f"the process exited before it wrote `marked`:\n{self._ended().text[-3000:]}"

    def signal(self, number: int) -> None:
        """Sends a signal to the process, not to its group."""
        os.kill(self._process.pid, number)

    def kill(self) -> ProcessResult:
        """Sends SIGKILL to the process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return self._ended()

    def _ended(self) -> ProcessResult:
        text = self._output_file.read_text(errors="replace")
        return ProcessResult(self._process.returncode, text, time.monotonic() - self.began)


def end_children() -> None:
    """Kills all children that a failed case left running."""
    while _CHILDREN:
        _CHILDREN.pop().kill()


def child_environment(options: Options, changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of the tests, with the number of devices of the job."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JOB_", "JAXTRAINER_"))}
    flags = "" if options.devices == 1 else f"--xla_force_host_platform_device_count={options.devices}"
    source = Path(jax_trainer.__file__).parents[1]  # the same library as here
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH", "")]))
    return {**inherited, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **changes}


def run(options: Options, *, failpoint: str = "", faults: str = "", **environment: str) -> ProcessResult:
    """Runs the job until it exits."""
    changes = {"JAXTRAINER_FAILPOINT": failpoint, "JOB_FAULTS": faults}
    return Child(options, **{name: value for name, value in changes.items() if value}, **environment).wait()


def run_until_done(options: Options, most: int = 3, **environment: str) -> int:
    """Repeats the command until it succeeds; returns the number of attempts."""
    attempt, ended = 1, run(options, **environment)
    while ended.code and attempt < most:
        attempt, ended = attempt + 1, run(options, **environment)
    if ended.code == 0:
        return attempt
    raise AssertionError(f"The run fails when it is restarted: exit code {ended.code}.\n{ended.text[-3000:]}")


def reference(options: Options, folder: Path, **environment: str) -> Options:
    """The same job without faults; runs once per configuration."""
    key = replace(options, out="", version="j", resume="auto", fork=0)
    if key not in _REFERENCES:
        undisturbed = replace(key, out=str(folder / f"reference-{len(_REFERENCES)}"))
        ended = run(undisturbed, **environment)
        assert ended.code == 0, f"The undisturbed run failed:\n{ended.text[-3000:]}"
        (Path(undisturbed.out) / "seconds").write_text(str(ended.seconds))
        _REFERENCES[key] = undisturbed
    return _REFERENCES[key]


def lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file; none if there is no file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def ledger(options: Options) -> list[dict[str, Any]]:
    """The ledger of a job: a row per step."""
    return lines(Path(options.out) / "ledger.jsonl")


def starts(options: Options) -> list[int]:
    """The step from which each process of a job resumed."""
    return [row["step"] for row in lines(Path(options.out) / "starts.jsonl")]


def saves(options: Options, kind: str = "copied") -> list[int]:
    """The steps whose states were copied for a save, or whose save was "requested", in order."""
    return [row["step"] for row in lines(Path(options.out) / "saves.jsonl") if row["is"] == kind]


def progress(options: Options) -> int:
    """The last step that was dispatched."""
    file = Path(options.out) / "progress"
    return int(file.read_text() or 0) if file.exists() else 0


def result(options: Options) -> dict[str, Any]:
    """The result of a finished job."""
    return json.loads((Path(options.out) / "result.json").read_text())


def rows(options: Options) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without times and hyperparameters."""
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
    """The differences between a job and the undisturbed one; empty if they are bit-identical."""
    found, expected = result(options), result(undisturbed)
    problems = [f"{part} differ" for part in expected["parts"] if found["parts"][part] != expected["parts"][part]]
    if found["digest"] != expected["digest"] and not problems:
        problems.append("the steps differ")
    problems += _first_difference("ledger", ledger(options), ledger(undisturbed))
    problems += _first_difference("metrics.jsonl", rows(options), rows(undisturbed))
    problems += [
        f"results[{place}] differ: {found['results'].get(place)} instead of {expected['results'][place]}"
        for place in expected["results"]
        if found["results"].get(place) != expected["results"][place]
    ]
    return problems


def ledger_differences(options: Options, undisturbed: Options, *, keys: tuple[str, ...] = ("step", "ids")) -> list[str]:
    """The differences between the ledgers only."""
    only = [[{key: row[key] for key in keys} for row in ledger(one)] for one in (options, undisturbed)]
    return _first_difference("ledger", *only)


def _first_difference(name: str, found: list[Any], expected: list[Any]) -> list[str]:
    for index, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
            changed = {key: (one.get(key), other.get(key)) for key in keys}
            return [f"{name} differs from line {index + 1} on: step {one.get('step')}, {str(changed)[:300]}"]
    return [] if len(found) == len(expected) else [f"{name} has {len(found)} lines instead of {len(expected)}"]


class Score:
    """The result of a case: how many runs, how many passed, and some numbers.

    Used as `with Score("A1") as score:`; leaving the block fails the test unless there were runs and all passed.
    """

    def __init__(self, case: str) -> None:
        self.case, self.runs, self.passed = case, 0, 0
        self.numbers: dict[str, Any] = {}
        self.problems: list[str] = []

    def add(self, problems: list[str], what: str = "") -> None:
        """Adds a run, which passed if it has no problems."""
        self.runs += 1
        self.passed += not problems
        self.problems += [f"{what}: {problem}" if what else problem for problem in problems]

    def check(self, holds: bool, what: str) -> None:
        """Adds a run with a single check."""
        self.add([] if holds else [what])

    def note(self, **numbers: Any) -> None:
        """Adds numbers to the table."""
        self.numbers |= numbers

    def __enter__(self) -> "Score":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.add([f"{type(error).__name__}: {error}"])
        record(self)
        if error is None:
            listed = "\n".join(self.problems[:10])
            assert self.runs > 0, f"{self.case}: no runs"
            assert self.passed == self.runs, f"{self.case}: {self.passed} of {self.runs} runs passed:\n{listed}"


def record(score: Score) -> None:
    """Appends the result to the file that the environment names, for `scripts/scorecard.py`."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    write_row(
        case=score.case,
        test=test,
        runs=score.runs,
        passed=score.passed,
        numbers=score.numbers,
        problems=score.problems[:5],
    )


def write_row(**row: Any) -> None:
    """Appends a line to the file that the environment names, if it does."""
    file = os.environ.get(CARD)
    if file:
        with Path(file).open("ab", buffering=0) as opened:
            opened.write(json.dumps(row).encode() + b"\n")


def finished_tests() -> set[str]:
    """The tests that an earlier call has finished."""
    file = Path(os.environ.get(CARD, ""))
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {row["finished"] for row in rows if "finished" in row}
