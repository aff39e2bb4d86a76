"""`compare_runs`: what differs between two runs, from their configuration to their metrics."""

import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jax_trainer.checkpoint.folder import CONFIG, METRICS, RECORD
from jax_trainer.config.redaction import redact
from jax_trainer.tools.reports.listing import find_runs
from jax_trainer.tools.reports.record import HPARAMS, allowed_changes, flat, metric_rows, part, read_settings

SIDES = ("a", "b")
_SECTIONS = {"code": "git", "packages": "packages", "model": "parameters"}  # keys of `run.json`
_PARTS = ("step", "program", "optimizer", "callbacks", "start", "data")  # of the fingerprint
_ENVIRONMENT = ("python", "system", "host", "devices", "processes")
_NOT_COMPARED = ("hparams", "metrics", "media")  # of a row: the configuration, the last values, and names of files
Sides = dict[str, Any]  # the values of both runs, under "a" and "b"; a run without a value has no key


@dataclass(frozen=True)
class RunDiff:
    """What differs between two runs.

    Attributes:
        config: the keys that differ, with the values of both runs.
        computed: the facts of the fingerprints that differ, by dotted key; equations as their number and a digest.
        unread: why the "configuration", "computation" or "metrics" cannot be compared, if a run lacks them or its file
            is damaged.
        record: other facts of `run.json` that differ, by section: code, packages, environment, model, changes.
        first_row: the first row of `metrics.jsonl` that differs: its number from 1, step and epoch of both, and the
            metrics that differ; None if all are equal. Measured times are not compared.
        last: the last value of every metric in both runs, with the difference b - a.
    """

    config: dict[str, Sides]
    computed: dict[str, Sides]
    unread: dict[str, str]
    record: dict[str, dict[str, Sides]]
    first_row: dict[str, Any] | None
    last: dict[str, Sides]

    @property
    def is_equal(self) -> bool:
        """Whether they compute the same, with the same configuration and metrics; code and machine may differ."""
        return not (self.unread or self.config or self.computed) and self.first_row is None

    def data(self) -> dict[str, Any]:
        """The difference as JSON-serializable data."""
        metrics = {"first_row": self.first_row, "last": self.last}
        computed = {"known": "computation" not in self.unread, **self.computed}
        compared = {"config": self.config, "computed": computed, **self.record, "metrics": metrics}
        return {"equal": self.is_equal, "unread": self.unread, **compared}


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Compares two run folders; a `ValueError` if one is none."""
    runs = []
    for path in (a, b):
        found = find_runs(path) if path.is_dir() else []
        if [run.path for run in found] != [path.absolute()]:
            problem = f"has {len(found)} runs below it" if found else "is not one"
            raise ValueError(
                f"Expected the folder of a run, and {path} {problem if path.exists() else 'does not exist'}."
            )
        runs.append(found[0])
    configs = [{key: redact(value, key) for key, value in run.config.items()} for run in runs]
    unread: dict[str, str] = {}
    facts, computed = [], []
    for path in (a, b):
        record = _record(path, unread)
        fact = {name: record.get(key) for name, key in _SECTIONS.items()}
        fact["environment"] = {key: record[key] for key in _ENVIRONMENT if key in record}
        fact["changes"] = {f"{name} at step {step}": text for step, name, text in allowed_changes(record)}
        facts.append(fact)
        computed.append(dict(flat(_computed(record))))
    sections = {name: _differing(*(dict(flat(fact[name])) for fact in facts)) for name in facts[0]}
    config = {} if "configuration" in unread else _differing(*configs)
    first_row = None
    try:
        for number, rows in enumerate(zip_longest(_rows(a), _rows(b), fillvalue={}), 1):
            if rows[0] != rows[1]:
                values = _differing(*rows)
                at = {name: values.pop(name, _sides(name, *rows)) for name in ("step", "epoch")}
                first_row = {"row": number, **at, "metrics": values}
                break
    except ValueError as error:
        unread["metrics"] = f"{error}."
    last = {name: _sides(name, *(run.curves for run in runs)) for name in {**runs[0].curves, **runs[1].curves}}
    last = {name: {side: one.last for side, one in last[name].items()} for name in last if not _is_timing(name)}
    for sides in last.values():
        sides |= {"difference": sides["b"] - sides["a"]} if len(sides) == 2 else {}
    return RunDiff(config, _differing(*computed), unread, sections, first_row, last)


def _record(folder: Path, unread: dict[str, str]) -> dict[str, Any]:
    """The content of `run.json`; adds to `unread` why parts of the run cannot be compared, but for its metrics."""
    record: dict[str, Any] = {}
    for name, what in ((HPARAMS, "configuration"), (CONFIG, "configuration"), (RECORD, "computation")):
        file = folder / name
        try:
            data = read_settings(file) if os.path.lexists(file) else {}
        except ValueError as error:
            unread.setdefault(what, f"{file} cannot be read: {error}.")
            continue
        record = redact(data) if name == RECORD else {}
        if name == RECORD and not _computed(record):
            unread.setdefault(what, f"{file} has no fingerprint, which tells what the run computes.")
    return record


def _computed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a fingerprint, with short texts in place of all equations."""
    found = part(record, "fingerprint", dict)
    parts = {name: found[name] for name in _PARTS if name in found}
    for name, fact in parts.items():
        if text := part(fact, "equations", str):
            parts[name] = {**fact, "equations": f"{len(text) // 4}, {zlib.crc32(text.encode()):08x}"}
    return parts


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Sides]:
    pairs = {name: _sides(name, a, b) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if len(pair) < 2 or pair["a"] != pair["b"]}


def _sides(name: str, *runs: Mapping[str, Any]) -> Sides:
    return {side: run[name] for side, run in zip(SIDES, runs, strict=True) if name in run}


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics, without measured times, and without rows that have nothing else."""
    rows = metric_rows(folder) if os.path.lexists(folder / METRICS) else iter(())
    for number, row in enumerate(rows, 1):
        if row is None:
            raise ValueError(f"{folder / METRICS}, line {number} is damaged")
        kept = {name: value for name, value in row.items() if not _is_timing(name) and name not in _NOT_COMPARED}
        if kept.keys() - {"step", "epoch"}:
            yield kept


def _is_timing(metric: str) -> bool:
    """Whether a metric is a measured time or rate, which differs between equal runs."""
    last = metric.rpartition("/")[2]
    return last == "time" or last.startswith("time_") or metric.startswith("throughput/") or metric == "seconds"
