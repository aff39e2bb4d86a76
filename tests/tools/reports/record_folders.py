"""Run folders as runs leave them, written by hand."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def start_of(status: str = "completed", start: str = "2026-11-17T10:00:00.000+00:00", **more: Any) -> dict[str, Any]:
    end = None if status == "running" else "2026-11-17T10:02:00.000+00:00"
    return {"start": start, "end": end, "status": status, "step": 20, **more}


FINGERPRINT = {"step": "31c8", "program": {"equations": "31c8" * 20}, "data": {"train": {"digests": {"1": "labels"}}}}


def make_run(
    folder: Path,
    *,
    config: Mapping[str, Any] | None = None,
    rows: Iterable[Mapping[str, Any]] = (
        {"step": 10, "epoch": 1, "val/loss": 0.5},
        {"step": 20, "epoch": 2, "val/loss": 0.75},
    ),
    starts: Iterable[Mapping[str, Any]] = (start_of(),),
    **record: Any,
) -> Path:
    folder.mkdir(parents=True)
    starts = list(starts)
    (folder / "config.yaml").write_text("model: {class_name: CNN}\n")
    (folder / "hparams.json").write_text(json.dumps({"model.class_name": "CNN", **(config or {})}))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    created = starts[0]["start"] if starts else "2026-11-17T10:00:00.000+00:00"
    record = {"fingerprint": FINGERPRINT, **record}
    (folder / "run.json").write_text(json.dumps({"format": 2, "created": created, "starts": starts, **record}))
    return folder
