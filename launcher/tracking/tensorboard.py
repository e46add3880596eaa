"""TensorBoard."""

from __future__ import annotations

from typing import Any

from launcher.tracking.tracker import Tracked, Values, now


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
