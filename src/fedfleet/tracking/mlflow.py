"""MLflow: a run of its experiment for each of ours, parameters, metrics by step, tags."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from fedfleet.files.writing import write_text
from fedfleet.simulator.registry import Options
from fedfleet.tracking.base import Tracker, concluded, noted, parameters
from fedfleet.tracking.callback import Begun

FLUSH_S = 5.0
MOST = 1000  # metrics in a request, as MLflow has it
PARAMETERS, LONGEST = 100, 500  # in a request; characters of one
STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long a server that does not answer may hold a run up, unless the environment says so; MLflow's own takes many minutes."""


class MlflowOptions(Options):
    """MLflow, a server or a store of files."""

    uri: str | None = None
    """Where runs are entered, such as http://host:5000 or sqlite:///mlflow.db; $MLFLOW_TRACKING_URI, else MLflow's own default,
    if not given."""
    experiment: str = Field(default="fedfleet", min_length=1)
    """Name of the experiment, which is made if need be."""
    tags: dict[str, str] = Field(default={})
    """Tags of the run."""


class Mlflow(Tracker):
    """Enters numbers every few seconds. After a resume it asks what is there, and enters what is not."""

    def __init__(self, options: MlflowOptions):
        self._options = options

    def open(self, run: Begun) -> None:
        """Go on with the run that the run folder has noted, or begin one."""
        for key, value in PATIENCE.items():
            os.environ.setdefault(key, value)
        from mlflow.entities import Param, RunTag  # here: it takes a second
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient(self._options.uri)
        self._waiting: list[Any] = []
        self._flushed = time.monotonic()
        note, uri = run.folder / "mlflow.json", self._client.tracking_uri
        before = noted(note)
        self._run = before["run"] if before.get("uri") == uri else None
        if self._run is None:
            self._run = self._client.create_run(self._experiment(), run_name=run.name).info.run_id
            write_text(note, json.dumps({"uri": uri, "run": self._run}) + "\n")
        else:
            self._client.update_run(self._run, status="RUNNING")
        there = self._client.get_run(self._run).data
        self._last = {k: max(m.step for m in self._client.get_metric_history(self._run, k)) for k in there.metrics}
        wanted = {_name(k): str(v)[:LONGEST] for k, v in parameters(run.config).items()}
        new = [Param(k, v) for k, v in wanted.items() if k not in there.params]
        for i in range(0, len(new), PARAMETERS):
            self._client.log_batch(self._run, params=new[i : i + PARAMETERS])
        changed = {
            f"resumed.{k}": v for k, v in wanted.items() if there.params.get(k, v) != v
        }  # parameters never change
        tags = {"fedfleet.folder": str(run.folder.absolute()), **self._options.tags, **changed}
        self._client.log_batch(self._run, tags=[RunTag(k, v) for k, v in tags.items()])
        self.where = f"run {self._run} at {uri}"

    def _experiment(self) -> str:
        result = self._client.get_experiment_by_name(self._options.experiment)
        if result is not None:
            return result.experiment_id
        try:
            return self._client.create_experiment(self._options.experiment)
        except Exception:  # another run of a study may have made it meanwhile
            result = self._client.get_experiment_by_name(self._options.experiment)
            if result is None:
                raise
            return result.experiment_id

    def log(self, step: int, result: Mapping[str, float]) -> None:
        """Keep what is not there yet for the next request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for key, value in result.items():
            if step > self._last.get(name := _name(key), -1):
                self._waiting.append(Metric(name, value, now, step))
        if len(self._waiting) >= MOST or time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what waits."""
        self._flushed = time.monotonic()
        while self._waiting:
            self._client.log_batch(self._run, metrics=self._waiting[:MOST])
            del self._waiting[:MOST]

    def close(self, summary: Mapping[str, Any]) -> None:
        """Enter what is in the summary, and say how the run ended."""
        said = {k: v for k, v in concluded(summary).items() if k.startswith(("final/", "best/", "selected/"))}
        self._last |= {_name(k): -1 for k in said if self._last.get(_name(k), -1) != self._step}
        self.log(self._step, said)
        self.flush()
        for key in ("status", "error", "stopped"):
            if summary.get(key) is not None:
                self._client.set_tag(self._run, f"fedfleet.{key}", str(summary[key])[:LONGEST])
        self._client.set_terminated(self._run, STATUS.get(summary.get("status", ""), "FAILED"))


def _name(key: str) -> str:
    """Return a key with the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", key)
