"""Logs to MLflow: a tracking server, or a database in the run folder. Needs the extra `mlflow`."""

import contextlib
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from compoconf import register

from jax_trainer.config.settings import Settings
from jax_trainer.diagnostics.optional_import import from_extra, require_extra
from jax_trainer.logger.jsonl import file_name_of, run_id
from jax_trainer.logger.values import bins_of
from jax_trainer.logger.writers import ToolLoggerInterface

MOST_METRICS = 1000  # that MLflow takes at once
_STATUS = {"completed": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}
_ODD = re.compile(r"[^\w\-. :/]")  # MLflow refuses names with these characters
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",  # it is drawn from `random`, which the training data may use, too
}
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
    Nothing about the machine, the code and the user is logged. MLflow's telemetry and messages are off, unless its
    environment variables say otherwise. MLflow stores infinity as the largest number.
    """

    config: MLflowConfig

    def __init__(self, config: MLflowConfig, folder: Path) -> None:
        super().__init__(config, folder)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        with from_extra("mlflow"):
            import mlflow.entities  # pyright: ignore[reportMissingImports]
            from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it reports every new database
        uri, self._artifacts = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            own = folder.absolute() / "mlflow"
            uri, self._artifacts = f"sqlite:///{own}/mlflow.db", f"{own}/mlruns"
            _create_database(own, self._artifacts)
        self._database = uri.removeprefix("sqlite:///") if uri.startswith("sqlite:///") else None
        self._client, self._entities = MlflowClient(tracking_uri=uri), mlflow.entities
        self._run = run_id(folder, "mlflow", self._create)
        self._client.update_run(self._run, status="RUNNING")
        self._known: dict[str, set[tuple[int, str]]] = {}  # points that a server has of an earlier start

    @classmethod
    def require(cls) -> None:
        """Raises `ImportError` if mlflow is missing."""
        require_extra("mlflow", "mlflow")

    def resume_at(self, step: int) -> int:
        """Returns the last step that MLflow has, if a kill has lost entries before the checkpoint."""
        histories = {
            name: self._client.get_metric_history(self._run, name)
            for name in self._client.get_run(self._run).data.metrics
        }
        first = min(step, max((point.step for points in histories.values() for point in points), default=0))
        if self._database is None:
            self._known = {name: {(point.step, str(point.value)) for point in histories[name]} for name in histories}
            return first
        with contextlib.closing(sqlite3.connect(self._database, timeout=30)) as database, database:
            for table in ("metrics", "latest_metrics"):
                database.execute(f"DELETE FROM {table} WHERE run_uuid = ? AND step >= ?", (self._run, first))
            database.execute(_RESTORE_LATEST, (self._run,))
        return first

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now, named = round(1000 * time.time()), {_ODD.sub("_", name): value for name, value in values.items()}
        metrics = [
            self._entities.Metric(name, float(value), now, step)
            for name, value in named.items()
            if (step, str(float(value))) not in self._known.get(name, ())
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics[first : first + MOST_METRICS], synchronous=True)

    def figure(self, step: int, name: str, png: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{file_name_of(name)}_{step}.png"
            file.write_bytes(png)
            self._client.log_artifact(self._run, str(file), "media")

    def histogram(self, step: int, name: str, values: np.ndarray) -> None:
        self._client.log_dict(self._run, bins_of(values)._asdict(), f"histograms/{file_name_of(name)}_{step}.json")

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run, text, f"text/{file_name_of(name)}_{step}.txt")

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
        experiment = (
            known.experiment_id
            if known
            else self._client.create_experiment(
                name, artifact_location=self._artifacts and f"{self._artifacts}/{file_name_of(name)}"
            )
        )
        run_name = self.config.run_name or self.folder.name
        return self._client.create_run(experiment, run_name=run_name, tags=self.config.tags).info.run_id


def _create_database(own: Path, artifacts: str) -> None:
    """Creates the database of MLflow in the folder `own`, as a whole: it opens none whose creation was killed."""
    if own.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # pyright: ignore[reportMissingImports]

    partial = own.with_name(".mlflow.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    SqlAlchemyStore(f"sqlite:///{partial}/mlflow.db", artifacts).engine.dispose()
    partial.rename(own)
