"""What the tests of reports share: a run folder written by hand, small enough to know all of it."""

import base64
import json
from pathlib import Path
from typing import Any

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CONFIG = """\
trainer:
  train_epochs: 2
  callbacks:
    ModelCheckpoint: {class_name: ModelCheckpoint, monitor: val/acc, mode: auto}
model: {class_name: MLP, hidden: [16, 8]}
optimizer: {class_name: SGD, learning_rate: 0.1, api_key: sk-1234567890}
dataset: {class_name: DigitsDataset, global_batch_size: 32}
"""
ROWS: list[dict[str, Any]] = [
    {"step": 0, "param/num_model_params": 1234},
    {"step": 2, "epoch": 1, "train/loss_step": 2.0},
    {"step": 4, "epoch": 1, "train/loss_step": 1.5},
    {"step": 4, "epoch": 1, "train/loss_epoch": 1.75, "train/time_epoch": 3.0},
    {"step": 4, "epoch": 1, "val/loss": 1.4, "val/acc": 0.5, "val/time": 1.0},
    {"step": 6, "epoch": 2, "train/loss_step": "nan"},
    {"step": 8, "epoch": 2, "train/loss_step": 1.0},
    {"step": 8, "epoch": 2, "train/loss_epoch": 1.25, "train/time_epoch": 2.0},
    {"step": 8, "epoch": 2, "arrays": {"val/conf_matrix": [[9, 1], [2, 8]], "val/other": [1, 2]}},
    {"step": 8, "epoch": 2, "val/loss": 1.1, "val/acc": 0.85, "val/time": 1.0},
    {"step": 8, "epoch": 2, "edit": {"by": "ReduceLROnPlateau", "learning_rate": 0.05}},
    {"step": 8, "media": {"samples/images": "media/samples_8.png"}},
    {"step": 8, "text": {"samples/text": "To be, or not"}},
    {"step": 8, "histograms": {"params/w": {"counts": [1, 3], "edges": [-1, 0, 1], "left_out": 0}}},
    {"step": 4, "histograms": {"grads/w": {"counts": [2, 2], "edges": [-1, 0, 1], "left_out": 0}}},
    {"step": 8, "histograms": {"grads/w": {"counts": [0, 4], "edges": [0, 1, 2], "left_out": 0}}},
    {"step": 8, "epoch": 2, "param_norm/out_epoch": 2.0, "grad_norm/out_epoch": 0.5, "update_norm/out_epoch": 0.004},
    {"step": 8, "hparams": {"optimizer.learning_rate": 0.1}, "metrics": {"val/acc": 0.85}},
]
TIMES = [
    {"start": 1, "status": "running", "from": 0, "step": 0, "wall": 4.0, "seconds": {"compile": 3.0, "data": 1.0}},
    {"start": 1, "status": "running", "from": 0, "step": 6, "wall": 6.0, "seconds": {"compile": 3.0, "steps": 3.0}},
    {"start": 2, "status": "completed", "from": 4, "step": 8, "wall": 5.0, "seconds": {"compile": 1.0, "steps": 4.0}},
]
ONE_START = [
    {"start": 1, "status": "running", "from": 0, "step": 0, "wall": 0.0},
    {"start": 1, "status": "running", "from": 0, "step": 4, "wall": 4.0},
    {"start": 1, "status": "completed", "from": 0, "step": 8, "wall": 7.0},
]
LOG = """\
2026-11-17 10:00:00,001 WARNING A batch was skipped.
  its second line
2026-11-17 10:00:05,001 INFO `train_step` was compiled again on batch 3 of epoch 1 (1.5 s, compilation 2): batch.x \
changed from float32[32,8] to float32[5,8]. The last batch of an epoch is often smaller: drop it.
2026-11-17 10:00:09,001 INFO Run completed. Metrics: {folder}/metrics.jsonl.
"""


def write_run(folder: Path, rows: list[dict[str, Any]] | None = None, config: str = CONFIG, **files: str) -> Path:
    """A run folder; `files` are further ones by their stem, as JSON text."""
    (folder / "metrics").mkdir(parents=True)
    (folder / "media").mkdir()
    (folder / "media" / "samples_8.png").write_bytes(PIXEL)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (ROWS if rows is None else rows)))
    (folder / "metrics" / "val.json").write_text(json.dumps({"step": 8, "epoch": 2, "val/loss": 1.1, "val/acc": 0.85}))
    (folder / "run.log").write_text(LOG.replace("{folder}", str(folder)))
    for step, accuracy in ((4, 0.5), (8, 0.85)):
        saved = folder / "checkpoints" / f"step_{step:08d}"
        saved.mkdir(parents=True)
        record = {"step": step, "epoch": step // 4, "metrics": {"val/acc": accuracy}, "versions": {"jax": "0.10.2"}}
        (saved / "checkpoint.json").write_text(json.dumps({**record, "run": {"loop": {"batch_size": 32}}}))
    write_times(folder, ONE_START)
    for name, text in {"run": json.dumps({"starts": [{"status": "completed"}]}), **files}.items():
        (folder / f"{name}.json").write_text(text)
    return folder


def write_times(folder: Path, rows: list[dict[str, Any]] = TIMES) -> None:
    (folder / "time.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
