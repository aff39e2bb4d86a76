"""Seeds small faults, each into a copy of the library, and counts how many of them the tests find.

    python scripts/mutation_sample.py -j 15 --out mutants.json     # continues where an earlier call ended
    python scripts/mutation_sample.py --check                      # do all anchors and tests still exist?
    python scripts/mutation_sample.py --only ema-swapped last-batch-weight

A fault is a piece of text and what replaces it. The text is looked for in the files of a package, with any white space
between its words, and must occur once: when code moves within its package nothing has to be done, and when it is
reworded `--check` names the row of the table to adapt. A fault is found if its tests fail; they must pass without it.
Results of the same sources are kept in the JSON file.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src") / "jax_trainer"
SECONDS = 300  # a fault that makes tests hang is found, too
QUICK = "not slow and not integration and not example and not scorecard"
SLOW = "--slow"  # after the tests of a fault: only slow ones can find it

# packages or files, name, tests below `tests`; - the text that is there; + what replaces it, or nothing. If the first
# text is not there, the next pair is tried.
TABLE = r"""
core no-key-per-step core/test_steps.py
- rng = jax.random.fold_in(stream(state.key, "train"), state.step)
+ rng = stream(state.key, "train")
core streams-share-a-key core/test_rng.py
- return jax.random.fold_in(key, zlib.crc32(name.encode()))
+ return key
core step-not-counted core/test_steps.py core/test_program.py
- state.replace(step=state.step + 1, **changes)
+ state.replace(step=state.step, **changes)
core step-of-several-optimizers-not-counted core/test_alternating.py
- step=state.step + 1, params=params
+ step=state.step, params=params
core no-key-per-micro-batch core/test_accumulate.py
- key = jax.random.fold_in(rng, index)
+ key = rng
core last-micro-batch-weight core/test_accumulate.py
- t + examples * g.astype(t.dtype)
+ t + g.astype(t.dtype)
core last-batch-weight core/test_metric_accumulator.py
- _running(total, values * weights.broadcast_to(values))
+ _running(total, values)
core masked-steps-count core/test_metric_accumulator.py
- np.flatnonzero(weights > 0)
+ np.flatnonzero(weights >= 0)
core accumulated-metrics-forgotten core/test_metric_accumulator.py
- terms[0] += total
+ terms[0] += 0 * total
core merged-metrics-unweighted core/test_metrics.py
- return jnp.where(weights > 0, values * weights, 0).sum(0) / jnp.where(total > 0, total, 1)
+ return values.mean(0)
core ema-swapped core/test_wrappers.py
- (keep * old + (1 - keep) * new)
+ (keep * new + (1 - keep) * old)
core ema-without-warmup core/test_wrappers.py
- jnp.minimum(decay, (1 + step) / (10 + step))
+ jnp.float32(decay)
core skips-never-reset core/test_wrappers.py
- jnp.where(keep, 0, in_a_row + jnp.where(frozen, 0, 1))
+ jnp.where(keep, in_a_row, in_a_row + jnp.where(frozen, 0, 1))
core skipped-step-not-counted core/test_wrappers.py
- selected.replace(step=new.step, frozen=state.frozen)
+ selected.replace(frozen=state.frozen)
core evaluations-draw-alike core/test_compile.py
- key_data(jax.random.fold_in(root, number))
+ key_data(root)

adapters statistics-never-updated adapters/test_linen.py core/test_compile.py
- (mutable or {}).get(name, old) for
+ old for
adapters evaluating-in-training-mode adapters/test_nnx.py
- self.train_graph if train else self.eval_graph
+ self.train_graph
adapters nnx-streams-share-a-key adapters/test_nnx.py adapters/test_nnx_steps.py
- key = stream(rng, leaf_path(path))
+ key = rng

engine schedule-off-by-one engine/test_plan.py engine/test_loop.py
- step % self.steps == 0
+ (step + 1) % self.steps == 0
engine one-step-too-many engine/test_plan.py engine/test_loop.py
- step >= self.max_steps
+ step > self.max_steps
engine epoch-longer-after-resume engine/test_plan.py engine/test_loop_state.py
- None if length is None else length - epoch_step
+ length
engine chunk-not-cut engine/test_plan.py engine/test_loop.py
- self.steps - step % self.steps if self.steps
+ self.steps if self.steps
engine evaluation-repeated-on-resume engine/test_loop_state.py
- progress.evaluated_step,
+ progress.evaluated_step and None,
engine epoch-metrics-not-saved engine/test_loop_state.py
- metrics_state=self._dispatcher.accumulator.state()
+ metrics_state={}

datasets every-epoch-alike datasets/test_order.py
- key=[self.seed, epoch])).permutation
+ key=[self.seed, 1])).permutation
datasets last-batch-too-small datasets/test_order.py datasets/test_arrays.py
- self.examples - index * self.batch_size
+ self.examples - index * self.batch_size - 1
datasets last-batch-lost datasets/test_order.py datasets/test_arrays.py
- full + (rest > 0 and not self.drop_last)
+ full + (rest > 1 and not self.drop_last)
datasets processes-see-the-same-part datasets/test_order.py
- [:, mine].reshape(-1)
+ [:, 0].reshape(-1)
datasets skipped-batches-not-counted trainer/test_rollback.py
- return skipped self.position += 1
+ return skipped self.position += 0
datasets ragged-batch-lost engine/test_loop.py
- self._pushed_back = [(batch, self._state)]
+ self._pushed_back = []
datasets targets-not-shifted datasets/test_examples.py
- for at in (0, 1)))
+ for at in (0, 0)))

checkpoint old-checkpoint-deleted-first checkpoint/test_commit.py --slow
- os.rename(path, old)
+ discard(path)
checkpoint oldest-kept checkpoint/test_retention.py
- *steps[-self.keep_latest :]
+ *steps[: self.keep_latest]
checkpoint best-mode-swapped checkpoint/test_retention.py
- return value if self.mode == "min" else -value
+ return value if self.mode == "max" else -value
- sign = -1 if mode == "max" else 1
+ sign = 1 if mode == "max" else -1
checkpoint tie-goes-to-the-earlier checkpoint/test_retention.py
- (self._cost(saved), saved.step)
+ (self._cost(saved), -saved.step)
- key=lambda row: row[:2]
+ key=lambda row: (row[0], -row[1])
checkpoint nan-is-best checkpoint/test_retention.py
- if not math.isnan(self._cost(saved))
+
- if not math.isnan(row[0])
+
checkpoint digests-not-verified checkpoint/test_choosing.py
- verify_digests(path) stored_in(path, record)
+ pass stored_in(path, record)
checkpoint oldest-is-latest checkpoint/test_choosing.py checkpoint/test_store.py
- list(reversed(listing.found.values()))
+ list(listing.found.values())
- key=lambda one: one.step, reverse=True
+ key=lambda one: one.step
checkpoint position-in-the-epoch-not-saved checkpoint/test_record.py checkpoint/test_store.py
- epoch_step=int(position.epoch_step)
+ epoch_step=0
checkpoint metric-of-the-record-lost checkpoint/test_record.py checkpoint/test_retention.py checkpoint/test_store.py
- metrics={name: _number(name, value) for name, value in metrics.items()}
+ metrics={}

callbacks patience-off-by-one callbacks/test_early_stopping.py
- self.waited < config.patience: return ""
+ self.waited <= config.patience: return ""
callbacks stopping-mode-swapped callbacks/test_early_stopping.py
- (value - other if self.best_mode == "max" else other - value) > by
+ (value - other if self.best_mode == "min" else other - value) > by
callbacks patience-not-saved callbacks/test_early_stopping.py callbacks/test_plateau.py
- "waited": int, "evaluated_step": int
+ "evaluated_step": int
callbacks no-cooldown callbacks/test_plateau.py
- self.waited, self.cooling = 0, self.config.cooldown
+ self.waited, self.cooling = 0, 0
callbacks spikes-in-a-row-kept callbacks/test_spikes.py
- self.in_a_row + 1 if is_spike else 0
+ self.in_a_row + 1 if is_spike else self.in_a_row
callbacks metrics-of-another-step callbacks/test_checkpointing.py
- if step != self.event.step or self._leaves_out(metrics):
+ if self._leaves_out(metrics):

runs,checkpoint best-in-memory-swapped styles/test_weights.py
- new[monitor] < old[monitor] if mode == "min"
+ new[monitor] < old[monitor] if mode == "max"
- return new < old if mode == "min"
+ return new < old if mode == "max"
runs nan-is-best-in-memory styles/test_weights.py
- (by is not None and math.isnan(metrics[by[0]]))
+ False

diagnostics rows-after-the-checkpoint-stay logger/test_logger_rows.py
- opened.truncate(size)
+ opened.truncate(size + 1)
logger/jsonl.py row-of-the-next-step logger/test_jsonl.py
- append({"step": step, **values})
+ append({"step": step + 1, **values})

optimizer warmup-one-step-longer optimizer/test_elementary.py
- optax.join_schedules([up, down], [warmup])
+ optax.join_schedules([up, down], [warmup + 1])
optimizer excluded-parameters-decay optimizer/test_gradient_transforms.py
- included and not is_match(config.parameter_regex_exclude, path)
+ included
optimizer weights-grow optimizer/test_gradient_transforms.py
- update - (rate * self.config.value * param)
+ update + (rate * self.config.value * param)

models rotation-mirrored models/test_attention.py
- first * cos - second * sin
+ first * cos + second * sin
models token-does-not-see-itself models/test_gpt.py models/test_generation.py
- mask = seen <= slots
+ mask = seen < slots
models cache-advances-by-one models/test_gpt.py models/test_generation.py
- self.position + jnp.int32(time)
+ self.position + jnp.int32(1)
models nucleus-too-small models/test_generation.py
- jnp.cumsum(ranked, -1) - ranked < top_p
+ jnp.cumsum(ranked, -1) < top_p

models/generative edm-weight models/generative/test_edm.py
- (sigma**2 + config.sigma_data**2) / (sigma * config.sigma_data) ** 2
+ (sigma**2 + config.sigma_data**2) / (sigma * config.sigma_data)
models/generative sampler-one-step-short models/generative/test_flow_matching.py
- jnp.linspace(0.0, 1.0, steps + 1
+ jnp.linspace(0.0, 1.0, steps
models/generative churn-unlimited models/generative/test_samplers.py
- min(amount / steps, math.sqrt(2) - 1)
+ amount / steps

styles decay-starts-late styles/fitting/test_schedule.py
- down(count - warmup)
+ down(count)
styles ema-hook-swapped styles/functional/test_ema.py
- self._decay * old + (1 - self._decay) * new
+ self._decay * new + (1 - self._decay) * old
styles pause-off-by-one styles/looping/test_loops.py
- (self.step // every + 1) * every
+ (self.step // every + 1) * every + 1

trainer masked-examples-count trainer/test_masks.py
- masked_mean(logits.argmax(-1) == label, mask)
+ (logits.argmax(-1) == label).mean()
trainer nats-for-bits trainer/test_language_model.py
- loss / math.log(2)
+ loss

tools/tuning logarithm-of-zero tools/tuning/test_space.py
- if log and low <= 0:
+ if log and low < 0:

config circle-of-references config/test_references.py
- if target in self._stack:
+ if False:
config dollar-kept config/test_references.py
- return "${"
+ return "$${"

tools/cli ctrl-c-as-success tools/cli/test_processes.py
- CTRL_C if isinstance(end, KeyboardInterrupt) else end.code
+ end.code if isinstance(end, SystemExit) else 0

sharding every-process-is-primary sharding/processes/test_group.py
- return self.index == 0
+ return self.index >= 0

config/settings.py bound-excluded config/test_settings.py
- operator.ge, "of at least"
+ operator.gt, "of at least"

config/redaction.py password-in-address-shown config/test_redaction.py
- _USERINFO.sub(rf"\g<scheme>{HIDDEN}@", text)
+ text
"""


@dataclass(frozen=True)
class Fault:
    """A change that a careless edit might make, in a file of the package `where`.

    `changes` are pairs of texts, the old and the new one; the first whose old text is there is made.
    """

    where: str
    name: str
    tests: str
    changes: tuple[tuple[str, str], ...]


def faults_in(table: str) -> list[Fault]:
    """The rows of the table."""
    rows = re.findall(r"^(\w\S*) (\S+) (.+)\n((?:- .+\n\+.*\n)+)", table, re.MULTILINE)
    return [
        Fault(where, name, tests, tuple(re.findall(r"- (.+)\n\+ ?(.*)", changes)))
        for where, name, tests, changes in rows
    ]


FAULTS = faults_in(TABLE)


class AnchorError(ValueError):
    """The text of a fault does not occur exactly once."""


def pattern_of(text: str) -> re.Pattern[str]:
    """Matches the text with any white space between its words."""
    return re.compile(r"\s+".join(re.escape(word) for word in text.split()))


def mutated(root: Path, fault: Fault) -> tuple[Path, str]:
    """The file of the fault, relative to `root`, and its text with the fault."""
    places = [root / PACKAGE / name for name in fault.where.split(",")]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    texts = {file: file.read_text() for file in files}
    seen: dict[str, list[str]] = {}
    for old, new in fault.changes:
        found = [(file, match) for file, text in texts.items() for match in pattern_of(old).finditer(text)]
        if len(found) == 1:
            file, match = found[0]
            before, after = texts[file][: match.start()], texts[file][match.end() :]
            return file.relative_to(root), f"{before}{_laid_out(match[0], new)}{after}"
        seen[old] = [str(file.relative_to(root)) for file, _ in found]
    raise AnchorError(
        f"{fault.name}: one of these must occur once in {fault.where}, with the files that have it: {seen}."
    )


def _laid_out(found: str, new: str) -> str:
    """The new text, with the white space of the old one if it has as many words."""
    words, gaps = new.split(), [*re.findall(r"\s+", found), ""]
    return "".join(map("".join, zip(words, gaps, strict=True))) if len(words) == len(gaps) else new


def problems(root: Path = ROOT) -> Iterator[str]:
    """What is wrong with the table: anchors that do not occur once, tests that do not exist."""
    for fault in FAULTS:
        try:
            mutated(root, fault)
        except AnchorError as error:
            yield str(error)
        yield from (
            f"{fault.name}: no tests/{one}"
            for one in fault.tests.split()
            if one != SLOW and not (root / "tests" / one).exists()
        )
    names = [fault.name for fault in FAULTS]
    yield from (f"{name}: named twice" for name in sorted({name for name in names if names.count(name) > 1}))


def copy_of_the_tree(root: Path, to: Path) -> None:
    """What tests need, with a configuration of pytest that needs no plugins."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "_build")
    for name in ("src", "tests", "examples", "scripts", "benchmarks"):
        shutil.copytree(root / name, to / name, ignore=ignored)
    options = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    options["markers"].append("timeout: known to pytest-timeout, where it is installed")
    lists = {name: "\n    ".join(["", *options[name]]) for name in ("markers", "filterwarnings")}
    path = " ".join(options["pythonpath"])
    lines = [f"{name} = {text}" for name, text in {**lists, "pythonpath": path}.items()]
    (to / "pytest.ini").write_text("\n".join(["[pytest]", "addopts = --import-mode=importlib", *lines]) + "\n")
    shutil.copy(root / "pyproject.toml", to)


def tested(root: Path, fault: Fault | None, tests: str, cache: Path) -> tuple[str, float, str]:
    """Whether the tests pass on a copy of the tree with the fault: "passed", "failed" or "hung"; seconds; the end."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_of_the_tree(root, tree)
        if fault is not None:
            file, text = mutated(root, fault)
            (tree / file).write_text(text)
        path = os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PLATFORMS": "cpu", "TMPDIR": folder}
        environment |= {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        words = tests.split()
        command += ["-m", "not scorecard" if SLOW in words else QUICK]
        command += [f"tests/{one}" for one in words if one != SLOW]
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "hung", time.monotonic() - started, ""
    outcome = "passed" if done.returncode == 0 else "failed"
    return outcome, time.monotonic() - started, (done.stdout + done.stderr)[-1500:]


def digest_of(root: Path) -> str:
    """Of all sources and tests: results of other ones are not reused."""
    files = sorted(file for name in ("src", "tests") for file in (root / name).rglob("*.py"))
    text = "\n".join(f"{file.relative_to(root)}\n{file.read_text()}" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Result:
    """What became of a fault: found, missed, hung (found, too), or invalid where its tests fail without it."""

    name: str
    outcome: str
    seconds: float
    tests: str
    by: str = ""


def first_failure(end: str) -> str:
    """The test that failed first."""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", end, re.MULTILINE)
    return found[1] if found else ""


def run_all(faults: list[Fault], jobs: int, out: Path | None) -> list[Result]:
    """Runs what the file `out` does not have yet."""
    digest = digest_of(ROOT)
    known: dict[str, Result] = {}
    if out is not None and out.exists():
        content = json.loads(out.read_text())
        if content["digest"] == digest:
            known = {row["name"]: Result(**row) for row in content["results"]}
    todo = [fault for fault in faults if fault.name not in known]

    def keep(result: Result) -> None:
        known[result.name] = result
        say(f"{result.outcome:8} {result.seconds:6.1f} s  {result.name:34} {result.by}")
        if out is not None:
            rows = [asdict(known[fault.name]) for fault in faults if fault.name in known]
            out.write_text(json.dumps({"digest": digest, "results": rows}, indent=1))

    with tempfile.TemporaryDirectory(prefix="mutants-cache-") as folder, ThreadPoolExecutor(jobs) as pool:
        cache = Path(folder)
        selections = sorted({fault.tests for fault in todo})
        outcomes = pool.map(lambda tests: tested(ROOT, None, tests, cache), selections)
        broken = {
            tests: end for tests, (outcome, _, end) in zip(selections, outcomes, strict=True) if outcome != "passed"
        }
        for tests, end in broken.items():
            say(f"These tests fail without any fault: {tests}\n{end}\n")

        def one(fault: Fault) -> Result:
            if fault.tests in broken:
                return Result(fault.name, "invalid", 0.0, fault.tests, first_failure(broken[fault.tests]))
            outcome, seconds, end = tested(ROOT, fault, fault.tests, cache)
            word = {"passed": "missed", "failed": "found", "hung": "hung"}[outcome]
            return Result(fault.name, word, seconds, fault.tests, first_failure(end))

        for result in pool.map(one, todo):
            keep(result)
    return [known[fault.name] for fault in faults]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: every fault was found; 1: some were missed, or could not be tried; 2: the table must be adapted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-j", type=int, default=1, metavar="N", help="number of faults at a time")
    parser.add_argument("--out", type=Path, help="a JSON file with the results, which a second call continues")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these faults")
    parser.add_argument("--check", action="store_true", help="only look for the anchors and the tests")
    chosen = parser.parse_args(arguments)
    wrong = list(problems())
    if wrong or chosen.check:
        say("\n".join([*wrong, f"{len(FAULTS)} faults, {len(wrong)} problems"]))
        return 2 if wrong else 0
    results = run_all(
        [fault for fault in FAULTS if chosen.only is None or fault.name in chosen.only], chosen.j, chosen.out
    )
    counts = Counter(result.outcome for result in results)
    say(f"{len(results)} faults: " + ", ".join(f"{count} {word}" for word, count in counts.items()))
    bad = [result for result in results if result.outcome in ("missed", "invalid")]
    for result in bad:
        say(f"  {result.outcome}: {result.name} ({result.tests})")
    return 1 if bad else 0


def say(text: str) -> None:
    """Shows a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
