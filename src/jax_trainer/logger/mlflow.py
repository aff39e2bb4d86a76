"""Logs to MLflow: a tracking server, or a database in the run folder. Needs the extra `mlflow`."""

import contextlib
import json
import os
import re
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from compoconf import register

from jax_trainer.core import from_extra, require_extra
from jax_trainer.logger.jsonl import file_name_of
from jax_trainer.logger.run_id import run_id
from jax_trainer.logger.values import bins_of, png_of
from jax_trainer.logger.writers import ToolLoggerInterface
from jax_trainer.settings import Settings

MOST_METRICS = 1000  # that MLflow takes at once
_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}
_ODD = re.compile(r"[^\w\-. :/]")  # MLflow refuses names with these characters
_RESTORE_LATEST = """INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
    SELECT key, value, timestamp, MAX(step), is_nan, run_uuid FROM metrics WHERE run_uuid = ?1
    AND key NOT IN (SELECT key FROM latest_metrics WHERE run_uuid = ?1) GROUP BY key"""


@dataclass
class MLflowConfig(Settings):
    """The MLflow run. Credentials of a server are in its environment variables, never in a configuration.

    Args:
        tracking_uri: the server or database, such as http://localhost:5000; null: MLFLOW_TRACKING_URI, else the
            database `mlflow/mlflow.db` in the run folder.
        experiment_name: the experiment that the run belongs to, which is created if needed; null:
            MLFLOW_EXPERIMENT_NAME, else "Default".
        run_name: the name of the run; null: the name of the run folder.
        tags: tags of the run, by name.
    """

    tracking_uri: str | None = None
    experiment_name: str | None = None
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


@register
class MLflowToolLogger(ToolLoggerInterface):
    """Logs to MLflow; figures, texts and histograms are artifacts, named by their step.

    A resumed run continues the same MLflow run. In an SQLite database, the points after the checkpoint are deleted. A
    server keeps what it has: a point that is trained again is sent only if its value differs, and then both are shown.
    Nothing about the machine, the code and the user is logged, and MLflow's telemetry is off. MLflow stores infinity as
    the largest number.
    """

    config: MLflowConfig
    own_process: ClassVar[bool] = True

    def __init__(self, config: MLflowConfig, folder: Path) -> None:
        super().__init__(config, folder)
        os.environ |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        with from_extra("mlflow"):
            import mlflow.entities  # pyright: ignore[reportMissingImports]
        uri, own = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), folder / "mlflow"
        if not uri:
            own.mkdir(exist_ok=True)
            os.chdir(own)  # for the artifacts, which are files below the working directory
            uri = f"sqlite:///{own}/mlflow.db"
        self._database = uri.removeprefix("sqlite:///") if uri.startswith("sqlite:///") else None
        self._client, self._entities = mlflow.MlflowClient(tracking_uri=uri), mlflow.entities
        self._run = run_id(folder, "mlflow", self._create)
        self._client.update_run(self._run, status="RUNNING")
        self._resumed_at: int | None = None  # on a server
        self._earlier: dict[str, set[tuple[int, str]]] = {}  # points that the server has

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if mlflow is missing."""
        require_extra("mlflow", "mlflow")

    def resume_at(self, step: int) -> int:
        if not self._client.get_run(self._run).data.metrics:
            return 0
        if self._database is None:
            self._resumed_at, self._earlier = step, {}
            return step
        with contextlib.closing(sqlite3.connect(self._database, timeout=30)) as database, database:
            for table in ("metrics", "latest_metrics"):
                database.execute(f"DELETE FROM {table} WHERE run_uuid = ? AND step >= ?", (self._run, step))
            database.execute(_RESTORE_LATEST, (self._run,))
        return step

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now, named = round(1000 * time.time()), {_ODD.sub("_", name): value for name, value in values.items()}
        metrics = [
            self._entities.Metric(name, float(value), now, step)
            for name, value in named.items()
            if self._is_new(name, step, float(value))
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics[first : first + MOST_METRICS], synchronous=True)

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        self.figure(step, name, png_of(pixels))

    def figure(self, step: int, name: str, png: bytes) -> None:
        self._artifact("media", f"{file_name_of(name)}_{step}.png", png)

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._artifact(
            "histograms", f"{file_name_of(name)}_{step}.json", json.dumps(bins_of(values)._asdict()).encode()
        )

    def text(self, step: int, name: str, text: str) -> None:
        self._artifact("text", f"{file_name_of(name)}_{step}.txt", text.encode())

    def hparams(self, step: int, params: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Logs parameters, and final metrics as "hparam/…"; a parameter that a resumed run has changed is a tag."""
        known = self._client.get_run(self._run).data.params
        named = {_ODD.sub("_", name): str(value) for name, value in params.items()}
        for name in named.keys() & known.keys():
            if named[name] != known[name]:
                self._client.set_tag(self._run, name, named[name])
        new = [self._entities.Param(name, value) for name, value in named.items() if name not in known]
        for first in range(0, len(new), 100):
            self._client.log_batch(self._run, params=new[first : first + 100], synchronous=True)
        self.write(step, {f"hparam/{name}": value for name, value in metrics.items()})

    def close(self, status: str) -> None:
        self._client.set_terminated(self._run, _STATUS.get(status, "FAILED"))

    def _create(self) -> str:
        name = self.config.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME", "Default")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run_name = self.config.run_name or self.folder.name
        return self._client.create_run(experiment, run_name=run_name, tags=self.config.tags).info.run_id

    def _is_new(self, name: str, step: int, value: float) -> bool:
        if self._resumed_at is None or step < self._resumed_at:
            return True
        if name not in self._earlier:
            points = self._client.get_metric_history(self._run, name)
            self._earlier[name] = {(point.step, str(point.value)) for point in points}
        return (step, str(value)) not in self._earlier[name]

    def _artifact(self, kind: str, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / name
            file.write_bytes(content)
            self._client.log_artifact(self._run, str(file), kind)
