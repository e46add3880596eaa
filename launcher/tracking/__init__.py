"""Trackers: follow the records of a run and pass them on to TensorBoard, W&B or MLflow, as ``track`` asks.

    processes.py  in the launcher: starts a process per tracker, and ends it in bounded time
    __main__.py   that process: `python -m launcher.tracking RUN ENTRY`
    follow.py     the records as they are written, and their means over the peers
    tracker.py    what a tracker is; tensorboard.py, wandb.py and mlflow.py: three of them
    prometheus.py the endpoint for scrapers

A tracker takes no part in the run: one that fails, hangs or is slow delays neither peers nor launcher by more than
``processes.TIMEOUT`` at the end. What it has logged is in RUN/tracking/NAME.json, so that a resumed run continues.
"""

from __future__ import annotations
