"""Runs the reliability scorecard and writes the results into `docs/explanation/reliability.md`.

python scripts/scorecard.py                  # all cases; writes the page
python scripts/scorecard.py --resume         # goes on where an earlier call stopped
python scripts/scorecard.py --only A,B2      # some groups or cases; does not write the page
python scripts/scorecard.py -j 2             # cases that measure no time in two processes, then the others
python scripts/scorecard.py --kills 5        # fewer kills at random times

The results of finished tests are kept in `.scorecard/`, in a file for each commit and state of the working tree.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- scorecard -->", "<!-- /scorecard -->"
CARDS = ROOT / ".scorecard"
TESTED = ("src", "tests", "scripts/scorecard.py")  # what the results depend on
REQUIRED = {0: 1.0, 1: 0.95, 2: 0.8}  # the share of runs that must pass, by priority
INTRODUCTION = f"""# Reliability

The fault-injection scorecard. Every case injects the fault of its row into a training run, in child processes where
that matters, and compares the result with an undisturbed run, bit for bit: parameters, optimizer state, random
numbers, metric values, log rows and the examples of every step. `make scorecard` runs all cases and writes this
table; `make test` runs a few of them.

P0 must pass in every run, P1 in 95 % and P2 in 80 % of the runs.

{BEGIN}
{END}
"""


# have limits in seconds, or on memory: never in parallel
TIMED = {
    *("A5", "A6", "A8", "B5", "B7", "B8", "B10", "B11", "C9", "C10"),
    *("D2", "D5", "D6", "D7", "D8", "D9", "D10", "D12", "mutants"),
}


class Case(NamedTuple):
    """The priority of a case, and the fault it injects."""

    priority: int
    what: str


CASES = {
    "A1": Case(
        0, "SIGKILL at random times, from import to the last save; the same command is repeated until the run completes"
    ),
    "A2": Case(
        0, "SIGKILL at every point of a save: at most one save interval is lost, and a valid checkpoint remains"
    ),
    "A3": Case(
        0,
        "SIGKILL inside an epoch, at its first and last batch, at its end, in validation; chunks, resident data, Grain",
    ),
    "A4": Case(0, "SIGKILL inside an accumulation window of three batches"),
    "A5": Case(
        0,
        "SIGTERM in training, in evaluation, at the start, during a save, in a blocked loader: saves, exits with 143",
    ),
    "A6": Case(1, "a second SIGTERM or Ctrl-C during the final save"),
    "A7": Case(0, "an exception in the loss, a callback, the loader or the validation"),
    "A8": Case(1, "the process exits during a save"),
    "A9": Case(1, "ten resumes of one step each"),
    "A10": Case(1, "resuming a finished run, with more epochs, with more steps around the end of an epoch"),
    "A11": Case(1, "linen and nnx, and different numbers of loader threads after a resume: same examples"),
    "A12": Case(2, "resuming a one-device run on two devices"),
    "A13": Case(1, "the same seed in different folders, time zones and hash seeds"),
    "B1": Case(
        0, "every file of the newest checkpoint truncated, deleted or zeroed: the previous checkpoint is restored"
    ),
    "B2": Case(0, "single bit flips in every file of a checkpoint"),
    "B3": Case(0, "foreign files, folders and links among the checkpoints"),
    "B4": Case(0, "a full disk at any point of a save; `stop` and `continue`"),
    "B5": Case(1, "too little disk space for one checkpoint at the start"),
    "B6": Case(1, "a checkpoint path that is read-only, missing, a file, or disappears"),
    "B7": Case(1, "a transient I/O error"),
    "B8": Case(1, "a disk slower than the save interval"),
    "B9": Case(0, "all checkpoints damaged: the run refuses to restart from scratch"),
    "B10": Case(0, "two processes in one run folder; a lock left by a dead process"),
    "B11": Case(1, "eight runs that start at once"),
    "B12": Case(0, "a fork leaves the original run byte-identical"),
    "B13": Case(0, "retention with rising, falling, tied, NaN and infinite metrics, and across restarts"),
    "B14": Case(1, "restoring into a changed model or optimizer"),
    "B15": Case(2, "checkpoints of all earlier formats"),
    "B16": Case(0, "invalid records with valid digests: the previous checkpoint is restored"),
    "C1": Case(0, "a NaN batch: raise, skip, roll back"),
    "C2": Case(1, "ten NaN batches in a row with `max_skipped: 3`"),
    "C3": Case(1, "a batch with inputs scaled by 100"),
    "C4": Case(0, "metrics of 1,003 examples in batches of 32 against numpy, every mode, every batch type"),
    "C5": Case(0, "21 examples evaluated by two processes, in batches of 8 and 4, on one and two devices each"),
    "C6": Case(0, "empty training and validation data, one example, less than one batch"),
    "C7": Case(1, "data that ends early, never ends, or is exhausted"),
    "C8": Case(1, "a batch with another shape, dtype or structure; strings; objects; float64"),
    "C9": Case(1, "batches of twenty lengths"),
    "C10": Case(1, "a loader worker that is killed, raises or hangs"),
    "C11": Case(1, "out of memory"),
    "C12": Case(1, "validation at any frequency does not change training, bit for bit"),
    "C13": Case(1, "loggers, progress bars, profilers, statistics and saves do not change training, bit for bit"),
    "D1": Case(0, "a logging tool that raises: at creation, at every call, once, at close"),
    "D2": Case(0, "a logging tool that blocks; Weights & Biases missing, offline, without an API key"),
    "D3": Case(0, "a metrics file that is deleted or cannot be written"),
    "D4": Case(1, "an exception in a callback"),
    "D5": Case(0, "10,000 steps with 200 saves and 20 validations: growth of memory, arrays, threads, open files"),
    "D6": Case(1, "fifty trainers in one process"),
    "D7": Case(
        0, "SIGKILL to one of two processes: the other exits in time and names it; the resumed run is bit-identical"
    ),
    "D8": Case(1, "SIGTERM to one of two processes: both stop at the same step, with one checkpoint"),
    "D9": Case(1, "a process ten times slower than the other is named within 100 steps"),
    "D10": Case(1, "a hanging step: stacks of all threads, exit code 75"),
    "D11": Case(2, "clock jumps and different time zones"),
    "D12": Case(1, "training in a thread, and with a SIGTERM handler of the user"),
    "D13": Case(0, "standard output and error full, closed or unread"),
    "D14": Case(0, "a temporarily full disk: every row once after a resume"),
    "mutants": Case(0, "seeded bugs: each of the six makes a case fail"),
}


@dataclass
class Tally:
    """The results of the tests of a case."""

    runs: int = 0
    passed: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Adds the row of one test."""
        self.runs += row["runs"]
        self.passed += row["passed"]
        self.numbers |= row["numbers"]
        self.problems += row["problems"]

    def passes(self, priority: int) -> bool:
        """Whether the required share of runs passed. A P0 case without runs fails."""
        return self.passed >= REQUIRED[priority] * self.runs and (self.runs > 0 or priority > 0)


def select_cases(words: str) -> list[str]:
    """The cases of these groups and names, separated by commas; all if empty."""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in CASES and word not in ("A", "B", "C", "D")]
    if unknown:
        raise SystemExit(f"Unknown case {unknown[0]!r}. Groups: A, B, C, D. Cases: {', '.join(CASES)}.")
    return [case for case in CASES if not wanted or case in wanted or (case[0] in wanted and case != "mutants")]


def card_of(kills: int) -> Path:
    """The file of the results: another one for each commit, change of the working tree, and number of kills."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout

    digest = hashlib.sha256(git("diff", "HEAD", "--binary", "--", *TESTED))
    for name in sorted(git("ls-files", "-z", "--others", "--exclude-standard", "--", *TESTED).split(b"\0")):
        digest.update(name + b"\0" + ((ROOT / os.fsdecode(name)).read_bytes() if name else b""))
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
    return CARDS / f"{commit}-{digest.hexdigest()[:12]}-{kills}.jsonl"


def run(cases: list[str], *, jobs: int, kills: int, card: Path) -> None:
    """Runs the tests of these cases that have not finished."""
    together = [case for case in cases if case not in TIMED] if jobs > 1 else []
    phases = [(together, jobs), ([case for case in cases if case not in together], 1)]
    for chosen, processes in (phase for phase in phases if phase[0]):
        names = ["test_mutants" if case == "mutants" else f"test_{case.lower()}_" for case in chosen]
        names += ["test_a2_a5_"] if "A5" in chosen else []  # one run for both
        command = [sys.executable, "-m", "pytest", "tests/scorecard", "-q", "-p", "no:cacheprovider", "--tb=short"]
        command += [] if len(chosen) == len(CASES) else ["-k", " or ".join(names)]
        command += ["-n", str(processes), "--dist", "load"] if processes > 1 else []
        environment = {**os.environ, "JAX_TRAINER_SCORECARD": str(card), "JAX_TRAINER_KILLS": str(kills)}
        subprocess.run(command, cwd=ROOT, env=environment, check=False)


def read_tallies(card: Path) -> tuple[dict[str, Tally], float]:
    """The results of the finished tests by case, and their seconds."""
    rows = [json.loads(line) for line in card.read_text(encoding="utf-8").splitlines()] if card.exists() else []
    finished = {row["finished"]: row["seconds"] for row in rows if "finished" in row}
    found: dict[str, Tally] = {}
    last = {(row["case"], row["test"]): row for row in rows if row.get("test") in finished}
    for (case, _), row in last.items():  # a test that was killed and ran again counts once
        found.setdefault(case, Tally()).add(row)
    return found, sum(finished.values())


def table(cases: list[str], found: dict[str, Tally]) -> str:
    """The results as a Markdown table."""
    rows = ["| case | P | what | runs | passed | numbers |", "|---|---|---|---|---|---|"]
    for case in cases:
        tally = found.get(case, Tally())
        numbers = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in tally.numbers.items())
        passed = f"{tally.passed}" if tally.passes(CASES[case].priority) else f"**{tally.passed}**"
        runs = tally.runs or "not run"
        rows.append(f"| {case} | {CASES[case].priority} | {CASES[case].what} | {runs} | {passed} | {numbers} |")
    return "\n".join(rows)


def write_page(text: str, minutes: float) -> None:
    """Writes the table into the page."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else INTRODUCTION
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    duration = f"Duration: {minutes:.0f} minutes on {os.cpu_count()} CPU cores."
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{duration}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Runs the selected cases; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="groups and cases, such as A,B2; default: all cases, and the page is written"
    )
    parser.add_argument("--resume", action="store_true", help="keep the results of tests that have finished")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="processes for the cases that measure no time")
    parser.add_argument("--kills", type=int, default=50, help="kills of case A1, for each of linen and nnx")
    args = parser.parse_args()
    cases, card = select_cases(args.only), card_of(args.kills)
    card.parent.mkdir(exist_ok=True)
    if not args.resume:
        card.unlink(missing_ok=True)
    run(cases, jobs=args.jobs, kills=args.kills, card=card)
    found, seconds = read_tallies(card)
    text = table(cases, found)
    sys.stdout.write(f"\n{text}\n")
    failed = [case for case in cases if not found.get(case, Tally()).passes(CASES[case].priority)]
    for case in failed:
        sys.stdout.write(f"\n{case}:\n" + "\n".join(f"  {one}" for one in found.get(case, Tally()).problems) + "\n")
    if not args.only:
        write_page(text, seconds / 60)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
