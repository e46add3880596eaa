"""MLflow."""

from __future__ import annotations

import os
import re
from typing import Any

from launcher.tracking.tracker import MAIN, Tracked, Values, now


class MLflow:
    """Runs in an experiment, peers below the run of the means; by default in the folder mlruns beside RUN."""

    BATCH = 1000
    """Most numbers in one request."""

    def __init__(self, run: Tracked) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            os.environ["MLFLOW_TRACKING_URI"] = (run.root.parent / "mlruns").as_uri()
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._run = Metric, Param, run
        self._client = MlflowClient()
        self._experiment = self._find_experiment(run.project)
        self._ids: dict[str, str] = run.state.setdefault("runs", {})
        self._pending: dict[str, list[Any]] = {}

    def _find_experiment(self, project: str) -> str:
        found = self._client.get_experiment_by_name(project)
        if found is None:
            try:
                return str(self._client.create_experiment(project))
            except Exception:  # another run of a sweep has created it meanwhile
                found = self._client.get_experiment_by_name(project)
                if found is None:
                    raise
        return str(found.experiment_id)

    def write(self, stream: str, t: int, values: Values) -> None:
        at = int(1000 * now())
        pending = self._pending.setdefault(stream, [])
        pending += [
            self._metric(_mlflow_name(name, pooled=stream == "all"), value, at, t) for name, value in values.items()
        ]
        if len(pending) >= self.BATCH:
            self._send(stream)

    def _send(self, stream: str) -> None:
        run, pending = self._open(stream), self._pending.pop(stream)
        for start in range(0, len(pending), self.BATCH):
            self._client.log_batch(run, metrics=pending[start : start + self.BATCH])

    def _open(self, stream: str) -> str:
        if stream not in self._ids:
            tags = {"p2pfl.run": self._run.name, "p2pfl.id": self._run.id, "p2pfl.stream": stream}
            if stream not in MAIN:
                tags["mlflow.parentRunId"] = self._open("mean")
            opened = self._client.create_run(self._experiment, tags=tags, run_name=f"{self._run.name} {stream}")
            self._ids[stream] = opened.info.run_id
            if stream in MAIN:
                params = [self._param(key, str(value)[:500]) for key, value in self._run.settings.items()]
                for start in range(0, len(params), 100):
                    self._client.log_batch(opened.info.run_id, params=params[start : start + 100])
        return self._ids[stream]

    def flush(self) -> None:
        for stream in list(self._pending):
            self._send(stream)

    def close(self, finished: bool) -> None:
        self.flush()
        for run in self._ids.values():
            self._client.set_terminated(run, "FINISHED" if finished else "FAILED")


def _mlflow_name(name: str, *, pooled: bool = False) -> str:
    """Replace what MLflow does not allow, and slashes, which make folders, so that different names stay different.

    Args:
        pooled: what follows the last slash is the peer, which gets a folder.
    """
    metric, slash, peer = name.rpartition("/") if pooled else (name, "", "")
    return re.sub(r"[^\w. -]", lambda found: f"_{ord(found[0]):x}_", metric) + slash + peer
