"""How long a training takes to start: from the command to the first step, with a cold and with a warm cache.

    PYTHONPATH=src python benchmarks/start.py [--config gpt2] [--max-steps 40] [--repeats 3] [KEY=VALUE …]

Each run is a new process that runs `jax-trainer train` with this file and a cache folder of its own: empty for the cold
run, then filled. The parts up to the first step follow each other. Tracing and compiling are among them, and are listed
below by what JAX reports: programs that are compiled at once overlap, so their sum may exceed the time that passed. The
first step ends when its result is there. A report, not a test.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DEFAULTS = {"digits": None, "gpt2": 40}  # with the number of steps; None: as in the file
PARTS = ("interpreter and imports", "configuration", "data and trainer", "to the first step", "first step", "the rest")
SHOWN = {
    "jaxpr_trace_duration": "trace",
    "jaxpr_to_mlir_module_duration": "lower",
    "backend_compile_duration": "compile",
    "fingerprint": "fingerprint of the run",
}


def child(words: list[str]) -> int:
    """Runs the command line in this process, and writes the times to the file that the parent names."""
    from jax_trainer.tools.cli import main

    command_line, marks, events = (
        sys.modules["jax_trainer.tools.cli.main"],
        {"started": float(os.environ["START_AT"])},
        [],
    )
    imported = command_line._imported

    def watched() -> Any:
        running = imported()  # as the command does: beside it, a thread starts the GPU
        marks["interpreter and imports"] = time.time()
        _watch(marks, events)
        return running

    setattr(command_line, "_imported", watched)  # noqa: B010
    code = main(words)
    Path(os.environ["START_FILE"]).write_text(json.dumps({"marks": marks, "events": _totals(events)}))
    return code


def _watch(marks: dict[str, float], events: list[Any]) -> None:
    """Has the parts of a training write when they have ended, and JAX what it has compiled."""
    import jax

    import jax_trainer.trainer as training
    from jax_trainer.engine.dispatcher import StepDispatcher
    from jax_trainer.runs import Fingerprint
    from jax_trainer.tools.cli import running

    def listen(event: str, duration_secs: float, **more: str | int) -> None:
        events.append((event, duration_secs, more))

    jax.monitoring.register_event_duration_secs_listener(listen)

    def marked(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def measured(*args: Any, **options: Any) -> Any:
            returned = original(*args, **options)
            marks.setdefault(part, time.time())
            return returned

        setattr(owner, name, measured)

    fingerprint_of = Fingerprint.of

    def fingerprint(*args: Any, **options: Any) -> Fingerprint:
        started = time.perf_counter()
        returned = fingerprint_of(*args, **options)
        events.append(("/fingerprint", time.perf_counter() - started, {}))
        return returned

    setattr(Fingerprint, "of", fingerprint)  # noqa: B010 - a classmethod

    def first_dispatch(self: Any, *args: Any) -> Any:
        setattr(StepDispatcher, "dispatch", dispatch)  # noqa: B010 - the first call only
        marks["to the first step"] = time.time()
        returned = dispatch(self, *args)
        jax.block_until_ready(returned[0].leaves)
        marks["first step"] = time.time()
        return returned

    marked(training, "load_experiment", "configuration")
    marked(running, "built", "data and trainer")
    dispatch = StepDispatcher.dispatch
    setattr(StepDispatcher, "dispatch", first_dispatch)  # noqa: B010 - of another signature


def _totals(events: list[Any]) -> dict[str, list[float]]:
    """Count and seconds of what JAX reports, by kind and program."""
    totals: dict[str, list[float]] = {}
    for name, took, more in events:
        kind, program = SHOWN.get(name.rpartition("/")[2], ""), str(more.get("fun_name", ""))
        program = program.removeprefix("jit(").removesuffix(")")
        if kind:
            known = program in ("init", "train_step", "train_chunk", "eval_step", "predict_step")
            row = kind if name == "/fingerprint" else f"{kind} {program if known else 'others'}"
            one = totals.setdefault(row, [0, 0.0])
            one[0], one[1] = one[0] + 1, one[1] + took
    return totals


def run(config: str, steps: int | None, changes: list[str], cache: str, folder: str) -> dict[str, Any]:
    """The times of one run, in a new process."""
    times = Path(folder) / "times.json"
    limits = [] if steps is None else [f"trainer.max_steps={steps}"]
    words = ["train", config, *limits, f"trainer.logger.log_dir={folder}/runs", "--quiet", *changes]
    others = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    started = time.time()
    more = {"START_AT": str(started), "START_FILE": str(times), "JAX_TRAINER_COMPILATION_CACHE": cache}
    subprocess.run([sys.executable, __file__, "--child", *words], env={**others, **more}, check=True, cwd=ROOT)
    report = json.loads(times.read_text())
    report["marks"]["the rest"] = time.time()
    return report


def parts_of(report: dict[str, Any]) -> dict[str, float]:
    """The seconds of each part, to the first step, and of the whole command."""
    marks = report["marks"]
    before = [marks["started"], *(marks[part] for part in PARTS)]
    parts = {part: after - start for part, start, after in zip(PARTS, before, before[1:], strict=False)}
    parts["= command to first step"] = marks["first step"] - marks["started"]
    parts["= whole command"] = marks["the rest"] - marks["started"]
    return parts | {name: seconds for name, (_, seconds) in sorted(report["events"].items())}


def main() -> int:
    """Prints a table per configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="default: digits, and gpt2 where there is a GPU")
    parser.add_argument("--max-steps", type=int, help="steps of a run; default: as in the file, 40 for gpt2")
    parser.add_argument("--repeats", type=int, default=3, help="runs with the warm cache; the median counts")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    args, changes = parser.parse_known_args()
    has_gpu = Path("/proc/driver/nvidia/gpus").is_dir()
    configs = [args.config] if args.config else [name for name in DEFAULTS if has_gpu or "gpt2" not in name]
    results = {}
    for config in configs:
        steps = DEFAULTS.get(config) if args.max_steps is None else args.max_steps
        with tempfile.TemporaryDirectory() as folder:
            cache = f"{folder}/cache"
            cold = parts_of(run(config, steps, changes, cache, folder))
            warm = [parts_of(run(config, steps, changes, cache, folder)) for _ in range(args.repeats)]
        names = [*cold, *(name for name in warm[0] if name not in cold)]
        median = {name: statistics.median(one.get(name, 0.0) for one in warm) for name in names}
        results[config] = {"cold": cold, "warm": median}
        print(f"\n{config}{f', {steps} steps' if steps else ''}\n{'':28} {'cold':>8} {'warm':>8}   seconds")
        for name in names:
            print(f"{name:28} {cold.get(name, 0.0):8.2f} {median[name]:8.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(child(sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main())
