"""Where trackers write: one class per library, each imported by the process of its tracker only.

A *stream* is what the library calls a run: ``peer-03`` for a peer, ``mean`` for the means over all peers, or ``all``
for both together, if they are pooled. What belongs to one run of p2pfl is a group (W&B), a folder (TensorBoard) or
a parent run (MLflow).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from p2pfl.errors import MissingExtra

Values = Mapping[str, float]
LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""The module that each tracker imports."""
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
MAIN = ("mean", "all")
"""Streams of the run as a whole."""


@dataclass
class Tracked:
    """The run that is tracked.

    Attributes:
        root: the run folder.
        id: 16 hex digits.
        project: W&B project, MLflow experiment.
        settings: the run file as flat keys and plain values.
        state: what the tracker remembers for a resumed run, as JSON.
    """

    root: Path
    id: str
    project: str
    settings: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.root.name


class Backend(Protocol):
    """A library that keeps numbers by stream, round and name."""

    def __init__(self, run: Tracked) -> None: ...

    def write(self, stream: str, t: int, values: Values) -> None:
        """Keep the numbers of round ``t``."""

    def flush(self) -> None:
        """Called when nothing else is to be written for a while."""

    def close(self, finished: bool) -> None: ...


def require(name: str) -> None:
    """Raise MissingExtra unless the library of a tracker is installed."""
    if find_spec(LIBRARIES[name]) is None:
        raise MissingExtra(PACKAGES[name], name, f"the tracker {name}")


def now() -> float:
    return time.time()  # noqa: TID251  # for people: the time axis of the tracker


class TensorBoard:
    """Event files in RUN/tensorboard, one folder per stream."""

    def __init__(self, run: Tracked) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary, self._writer = Event, Summary, EventFileWriter
        self._folder = run.root / "tensorboard"
        self._files: dict[str, Any] = {}

    def write(self, stream: str, t: int, values: Values) -> None:
        file = self._files.get(stream)
        if file is None:
            folder = self._folder if stream == "all" else self._folder / stream
            file = self._files[stream] = self._writer(str(folder))
        numbers = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        file.add_event(self._event(wall_time=now(), step=t, summary=self._summary(value=numbers)))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, finished: bool) -> None:
        for file in self._files.values():
            file.close()


class WandB:
    """Runs of one group in Weights & Biases; WANDB_MODE=offline keeps them in RUN/tracking."""

    def __init__(self, run: Tracked) -> None:
        import wandb

        self._wandb, self._run = wandb, run
        self._streams: dict[str, Any] = {}

    def write(self, stream: str, t: int, values: Values) -> None:
        opened = self._streams.get(stream)
        if opened is None:
            opened = self._streams[stream] = self._open(stream)
        # Not step=t: W&B drops steps that are not ascending, and pooled peers take turns.
        opened.log({**values, "round": t})

    def _open(self, stream: str) -> Any:
        opened = self._wandb.init(
            project=self._run.project,
            group=self._run.name,
            name=f"{self._run.name} {stream}",
            job_type="run" if stream in MAIN else "peer",
            id=f"{self._run.id}-{stream}",
            config={**self._run.settings, "stream": stream},
            dir=os.environ.get("WANDB_DIR") or str(self._run.root / "tracking"),
            resume=None if _offline() else "allow",
            reinit="create_new",
        )
        opened.define_metric("round")
        opened.define_metric("*", step_metric="round")
        return opened

    def flush(self) -> None:
        pass  # a separate process sends what is logged

    def close(self, finished: bool) -> None:
        for opened in self._streams.values():
            opened.finish(exit_code=0 if finished else 1)


def _offline() -> bool:
    return os.environ.get("WANDB_MODE", "online") != "online"


class MLflow:
    """Runs in an experiment, those of peers below that of the means; by default in the folder mlruns beside RUN."""

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


BACKENDS: dict[str, type[Backend]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
