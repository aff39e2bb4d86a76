"""Trains the example configurations and compares the results with those in their headers.

python scripts/run_configs.py                    # all with an expected result; `python scripts/fetch_data.py` first
python scripts/run_configs.py src/jax_trainer/configs/digits.yaml
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

CONFIGS = Path(__file__).parent.parent / "src/jax_trainer/configs"
_PROMISE = re.compile(
    r"^# Expected: (?P<metric>\S+) (?P<sign>[≥≤]) (?P<value>[0-9.]+) after about (?P<seconds>[0-9]+) s", re.M
)


class Promise(NamedTuple):
    """The expected result in the header of a configuration, on two CPU cores."""

    metric: str
    sign: str
    value: float
    seconds: int

    @classmethod
    def of(cls, file: Path) -> "Promise":
        """The promise in the header of `file`."""
        match = _PROMISE.search(file.read_text(encoding="utf-8"))
        if match is None:
            raise ValueError(f"{file} has no line `# Expected: test/acc ≥ 0.97 after about 8 s` in its header.")
        return cls(match["metric"], match["sign"], float(match["value"]), int(match["seconds"]))

    def is_kept_by(self, value: float) -> bool:
        """Whether `value` is as good as promised."""
        return value >= self.value if self.sign == "≥" else value <= self.value


def run(file: Path, folder: Path) -> float:
    """Trains `file`; returns the promised metric of the test set."""
    command = [sys.executable, "-m", "jax_trainer", "train", str(file), f"trainer.logger.log_dir={folder}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{file} ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)["metrics"]["test"][Promise.of(file).metric]


def main() -> int:
    """Trains the given files, or all; returns the number of broken promises."""
    promising = (file for file in sorted(CONFIGS.glob("*.yaml")) if _PROMISE.search(file.read_text(encoding="utf-8")))
    files = [Path(word) for word in sys.argv[1:]] or list(promising)
    broken = 0
    for file in files:
        promise, began = Promise.of(file), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            value = run(file, Path(folder))
        is_kept = promise.is_kept_by(value)
        broken += not is_kept
        found = f"{promise.metric} {value:.4f} (promised {promise.sign} {promise.value})"
        took = f"{time.perf_counter() - began:.0f} s (promised about {promise.seconds})"
        sys.stdout.write(f"{'kept  ' if is_kept else 'BROKEN'}  {file.name:20}  {found}  {took}\n")
        sys.stdout.flush()
    return broken


if __name__ == "__main__":
    sys.exit(main())
