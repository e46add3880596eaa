"""Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from launcher.tracking.tracker import MAIN, Tracked, Values


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
