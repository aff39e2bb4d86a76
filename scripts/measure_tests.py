"""Where the time of the tests goes: CPU seconds, programs compiled and processes started, per test file.

    python scripts/measure_tests.py                          # all that `make test` runs, one after the other
    python scripts/measure_tests.py tests/core -m slow       # other tests; further arguments go to pytest
    python scripts/measure_tests.py --cold --out times.json  # compile everything anew; a row per test

CPU seconds do not depend on what else the machine does: those of the process, with the compiler's threads, and those
of the processes that a test started and waited for.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUICK = "not slow and not integration and not example and not scorecard"  # what `make test` runs
COMPILED, LOADED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"


class Times:
    """A pytest plugin that notes what each test costs, with its fixtures."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float | str]] = []
        self._events: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        """Listens to JAX, which the tests have imported by now: it counts a loaded program as compiled, too."""
        from jax import monitoring

        def note(event: str, *_: object, **__: object) -> None:
            self._events[event] += 1

        monitoring.register_event_duration_secs_listener(note)
        monitoring.register_event_listener(note)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Compares before and after."""
        before = self._now()
        result = yield
        spent = {name: value - before[name] for name, value in self._now().items()}
        self.rows.append({"test": item.nodeid, **spent})
        return result

    def _now(self) -> dict[str, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {
            "cpu": time.process_time(),
            "children": children.ru_utime + children.ru_stime,
            "compiled": self._events[COMPILED] - self._events[LOADED],
            "loaded": self._events[LOADED],
            "wall": time.perf_counter(),
        }


def table(rows: list[dict[str, float | str]]) -> str:
    """One line per file, the most expensive first."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        numbers = {name: value for name, value in row.items() if isinstance(value, float | int)}
        for name in (str(row["test"]).split("::")[0], "all"):
            files[name].update({**numbers, "tests": 1})
    cost = lambda entry: -entry[1]["cpu"] - entry[1]["children"]
    columns = ("cpu", "children", "compiled", "loaded", "tests")
    lines = [f"{'file':56}" + "".join(f"{name:>10}" for name in columns)]
    for name, sums in sorted(files.items(), key=cost):
        lines.append(f"{name:56}" + "".join(f"{sums[column]:10.{column in columns[:2]:d}f}" for column in columns))
    return "\n".join(lines)


def main() -> int:
    """Runs pytest, prints the table, and returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cold", action="store_true", help="compile everything anew, as the first run does")
    parser.add_argument("--out", type=Path, help="a JSON file with a row per test")
    chosen, arguments = parser.parse_known_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as cache:
        if chosen.cold:
            os.environ |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        times = Times()
        code = pytest.main(["-q", "-m", QUICK, *arguments], [times])
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(times.rows, indent=1))
    sys.stdout.write(f"\n{table(times.rows)}\n")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
