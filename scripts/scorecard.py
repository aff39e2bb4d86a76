"""Runs the reliability scorecard and writes what it came to into `docs/explanation/reliability.md`.

python scripts/scorecard.py                  # all of it, and the page
python scripts/scorecard.py --only A,B2      # some groups or cases, without the page
python scripts/scorecard.py --kills 5        # fewer kills at random times
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "reliability.md"
BEGIN, END = "<!-- scorecard -->", "<!-- /scorecard -->"
ENOUGH = {0: 1.0, 1: 0.95, 2: 0.8}  # the share of runs that must be as they should be, by priority
INTRODUCTION = f"""# Reliability

The fault-injection scorecard. Every case injects the fault of its row into a training run, in child processes where
that matters, and compares the result with an undisturbed run, bit for bit: parameters, optimizer state, random
numbers, metric values, log rows and the examples of every step. `make scorecard` runs all cases and writes this
table; `make test` runs a few of them.

P0 must pass in every run, P1 in 95 % and P2 in 80 % of the runs.

{BEGIN}
{END}
"""


class Case(NamedTuple):
    """How much a case matters, and what it does."""

    priority: int
    what: str


CASES = {
    "A1": Case(0, "SIGKILL at random times, from import to the last save; the same command again until done"),
    "A2": Case(0, "SIGKILL at every point of a save; at most one interval is lost, and a valid checkpoint is left"),
    "A3": Case(
        0, "kills inside an epoch, at its first and last batch, at its end, in validation; chunks, resident, Grain"
    ),
    "A4": Case(0, "kills inside an accumulation window of three batches"),
    "A5": Case(
        0, "SIGTERM in training, evaluation, at the start, while saving, while the loader blocks: saved, exit 143"
    ),
    "A6": Case(1, "a second SIGTERM or Ctrl-C during the final save"),
    "A7": Case(0, "an exception in the loss, a callback, the loader, the validation"),
    "A8": Case(1, "the process just ends while a save is under way"),
    "A9": Case(1, "ten resumes of one step each"),
    "A10": Case(1, "resuming a finished run, with more epochs, with more steps around the end of an epoch"),
    "A11": Case(1, "linen and nnx, and other numbers of workers after a resume: the same examples"),
    "A12": Case(2, "resuming on two devices what ran on one"),
    "A13": Case(1, "the same seed in other folders, time zones and hash seeds"),
    "B1": Case(0, "every file of the newest checkpoint truncated, deleted or zeroed: the one before is restored"),
    "B2": Case(0, "single bits flipped in every file of a checkpoint"),
    "B3": Case(0, "strange files, folders and links among the checkpoints"),
    "B4": Case(0, "a full disk at any point of a save; `stop` and `continue`"),
    "B5": Case(1, "no room for one checkpoint at the start"),
    "B6": Case(1, "a read-only or missing place, a file in its place, one that vanishes"),
    "B7": Case(1, "an I/O error that passes"),
    "B8": Case(1, "a disk slower than the saves come"),
    "B9": Case(0, "all checkpoints damaged: refuses to begin from scratch"),
    "B10": Case(0, "two processes in one run folder; one that died"),
    "B11": Case(1, "eight runs that begin at once"),
    "B12": Case(0, "a run forked off another leaves that one byte for byte"),
    "B13": Case(0, "which checkpoints are kept: rising, falling, tied, NaN and infinite metrics, restarts"),
    "B14": Case(1, "restoring into a changed model or optimizer"),
    "B15": Case(2, "checkpoints of every format so far"),
    "B16": Case(0, "records that say what cannot be, with digests that fit: the checkpoint before is restored"),
    "C1": Case(0, "a batch of NaN: raise, skip, roll back"),
    "C2": Case(1, "ten batches of NaN in a row where three may be skipped"),
    "C3": Case(1, "a batch a hundred times too large"),
    "C4": Case(0, "metrics of 1,003 examples in batches of 32 against numpy, every mode, every kind of batch"),
    "C5": Case(0, "21 examples evaluated by two processes, in batches of 8 and 4, on one and two devices each"),
    "C6": Case(0, "empty training and validation data, one example, fewer than a batch"),
    "C7": Case(1, "data that ends early, never, or was used up"),
    "C8": Case(1, "a batch of another shape, type or structure; text; objects; doubles"),
    "C9": Case(1, "batches of twenty lengths"),
    "C10": Case(1, "a loader's worker that is killed, raises or hangs"),
    "C11": Case(1, "not enough memory"),
    "C12": Case(1, "validation of any frequency changes no bit of training"),
    "C13": Case(1, "loggers, bars, profilers, statistics, saving change no bit of training"),
    "D1": Case(0, "a logging tool that raises: when made, always, once, when closed"),
    "D2": Case(0, "a logging tool that blocks; Weights & Biases missing, offline, without a key"),
    "D3": Case(0, "a record that is deleted or cannot be written"),
    "D4": Case(1, "a callback that raises"),
    "D5": Case(0, "10,000 steps with 200 saves and 20 validations: memory, arrays, threads, files"),
    "D6": Case(1, "fifty trainers in one process"),
    "D7": Case(0, "one of two processes is killed: the other ends in time and names it; both go on bit for bit"),
    "D8": Case(1, "SIGTERM to one of two processes: both stop at one step, with one checkpoint"),
    "D9": Case(1, "a process ten times slower than the other is named within 100 steps"),
    "D10": Case(1, "a step that hangs: the stacks of all threads, exit code 75"),
    "D11": Case(2, "clocks that jump, other time zones"),
    "D12": Case(1, "training in a thread, and beside a SIGTERM handler of the user's"),
    "D13": Case(0, "standard output and error that are full, closed or that nobody reads"),
    "D14": Case(0, "a disk that is full for a while: every row once after a resume"),
    "mutants": Case(0, "seeded bugs: each of six turns a case red"),
}


@dataclass
class Tally:
    """What the tests of a case came to."""

    runs: int = 0
    passed: int = 0
    numbers: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Takes what one test recorded."""
        self.runs += row["runs"]
        self.passed += row["passed"]
        self.numbers |= row["numbers"]
        self.problems += row["problems"]

    def is_enough(self, priority: int) -> bool:
        """Whether enough of it is as it should be. A P0 case that did not run is not."""
        return self.passed >= ENOUGH[priority] * self.runs and (self.runs > 0 or priority > 0)


def chosen(words: str) -> list[str]:
    """The cases that are meant: all, or those of the groups and names given."""
    wanted = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [word for word in wanted if word not in CASES and word not in ("A", "B", "C", "D")]
    if unknown:
        raise SystemExit(f"There is no case {unknown[0]!r}. There are the groups A, B, C, D and {', '.join(CASES)}.")
    return [case for case in CASES if not wanted or case in wanted or (case[0] in wanted and case != "mutants")]


def run(cases: list[str], *, workers: int, kills: int, card: Path) -> None:
    """Runs the tests of these cases."""
    names = ["test_mutants" if case == "mutants" else f"test_{case.lower()}_" for case in cases]
    names += ["test_a2_a5_"] if "A5" in cases else []  # one run for both
    command = [sys.executable, "-m", "pytest", "tests/scorecard", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += [] if len(cases) == len(CASES) else ["-k", " or ".join(names)]
    command += ["-n", str(workers), "--dist", "load"] if workers > 1 else []
    around = {**os.environ, "JAX_TRAINER_SCORECARD": str(card), "JAX_TRAINER_KILLS": str(kills)}
    subprocess.run(command, cwd=ROOT, env=around, check=False)


def tallied(card: Path) -> dict[str, Tally]:
    """What was recorded, by case."""
    found: dict[str, Tally] = {}
    for line in card.read_text(encoding="utf-8").splitlines() if card.exists() else ():
        row = json.loads(line)
        found.setdefault(row["case"], Tally()).add(row)
    return found


def table(cases: list[str], found: dict[str, Tally]) -> str:
    """What it came to, in Markdown."""
    rows = ["| case | P | what | runs | passed | numbers |", "|---|---|---|---|---|---|"]
    for case in cases:
        tally = found.get(case, Tally())
        numbers = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in tally.numbers.items())
        passed = f"{tally.passed}" if tally.is_enough(CASES[case].priority) else f"**{tally.passed}**"
        runs = tally.runs or "not run"
        rows.append(f"| {case} | {CASES[case].priority} | {CASES[case].what} | {runs} | {passed} | {numbers} |")
    return "\n".join(rows)


def write_page(text: str, minutes: float) -> None:
    """Puts the table into the page."""
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else INTRODUCTION
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    took = f"All of it took {minutes:.0f} minutes with {os.cpu_count()} CPU cores."
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{took}\n{END}{after}", encoding="utf-8")


def main() -> int:
    """Runs what is asked for; 1 if a case is below what its priority asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="groups and cases, such as A,B2; without it, all, and the page is written"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that run tests; above 1, times are worth less"
    )
    parser.add_argument("--kills", type=int, default=50, help="of A1, for each of linen and nnx")
    asked = parser.parse_args()
    cases, began = chosen(asked.only), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        card = Path(folder) / "card.jsonl"
        run(cases, workers=asked.workers, kills=asked.kills, card=card)
        found = tallied(card)
    text = table(cases, found)
    sys.stdout.write(f"\n{text}\n")
    red = [case for case in cases if not found.get(case, Tally()).is_enough(CASES[case].priority)]
    for case in red:
        sys.stdout.write(f"\n{case}:\n" + "\n".join(f"  {one}" for one in found.get(case, Tally()).problems) + "\n")
    if not asked.only:
        write_page(text, (time.monotonic() - began) / 60)
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
