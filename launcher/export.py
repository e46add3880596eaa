"""Write the records of runs for other programs: TensorBoard, spreadsheets, data frames.

    exported/mesh20-20261122-093000.csv            --format csv
    exported/mesh20-20261122-093000.parquet        --format parquet
    exported/quick4-20261122-093000/mapl-seed=0.csv    of a sweep
    exported/mesh20-20261122-093000/peer-03/events.out.tfevents.…     --format tensorboard; `mean`: of honest peers

The columns are as in ``RecordedRun.metrics()``. Each file is complete or absent.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from launcher.facts.sweep_folder import is_sweep
from p2pfl.attackers import attacks
from p2pfl.errors import MissingExtra, RunFolderError
from p2pfl.run_folder import records
from p2pfl.run_folder.files import write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.records import Record

ExportFormat = Literal["tensorboard", "csv", "parquet"]
Records = Sequence[Record]


def export(folders: Sequence[RunFolder], form: ExportFormat, out: Path) -> list[Path]:
    """Write the records of runs into a folder. Return the written files.

    Raises:
        MissingExtra: the format needs a package that is not installed.
        RunFolderError: a run has no records yet, or two runs would have the same file.
        WriteError: a file cannot be written.
    """
    writers: dict[ExportFormat, Callable[[RunFolder, Records, Path], list[Path]]] = {
        "csv": _csv,
        "parquet": _parquet,
        "tensorboard": _tensorboard,
    }
    names = [_name(folder.root) for folder in folders]
    for folder, name in zip(folders, names, strict=True):
        if names.count(name) > 1:
            raise RunFolderError(f"{folder.root}: another run is called {name} too; export them into two folders")
    with write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    written, empty = [], []
    for folder, name in zip(folders, names, strict=True):
        found = list(records.read(folder))
        if not found:
            empty.append(folder.root)
            continue
        with write_errors(out / name):
            (out / name).parent.mkdir(exist_ok=True)
        written += writers[form](folder, found, out / name)
    if empty:
        others = f"; {len(folders) - len(empty)} of {len(folders)} runs are in {out}" if written else ""
        runs = ", ".join(map(str, empty))
        raise RunFolderError(f"{runs}: no records: no peer has completed a round{others}")
    return written


def _name(run: Path) -> Path:
    """Name a run's file or folder; a sweep has a folder, since its runs are called alike in every sweep."""
    root = run.resolve()
    sweep = root.parent.parent
    return Path(sweep.name) / root.name if is_sweep(sweep) else Path(root.name)


def _table(folder: RunFolder, found: Records) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns of all rows, in the order of their first occurrence, and the rows."""
    rows = list(records.rows(found, attacks(folder.settings)))
    return list(dict.fromkeys(name for row in rows for name in row)), rows


def _csv(folder: RunFolder, found: Records, path: Path) -> list[Path]:
    text = io.StringIO()
    columns, rows = _table(folder, found)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return [_write(path, ".csv", text.getvalue().encode())]


def _parquet(folder: RunFolder, found: Records, path: Path) -> list[Path]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra("pyarrow", "parquet", "p2pfl export --format parquet") from None
    columns, rows = _table(folder, found)
    content = io.BytesIO()
    parquet.write_table(pyarrow.table({name: [row.get(name) for row in rows] for name in columns}), content)
    return [_write(path, ".parquet", content.getvalue())]


def _write(path: Path, suffix: str, content: bytes) -> Path:
    file = path.with_name(path.name + suffix)  # not with_suffix: names have dots
    write_atomically(file, content)
    return file


def _tensorboard(folder: RunFolder, found: Records, path: Path) -> list[Path]:
    """Write a file of events for each peer, and one of means over the honest peers."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        raise MissingExtra("tensorboard", "tensorboard", "p2pfl export --format tensorboard") from None
    began = datetime.fromisoformat(folder.info["started"]).timestamp()

    def write(name: str, steps: Iterable[tuple[int, float, Mapping[str, float]]]) -> Path:
        content = io.BytesIO()
        writer = RecordWriter(content)
        writer.write(Event(wall_time=began, file_version="brain.Event:2").SerializeToString())
        for t, elapsed, values in steps:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            writer.write(Event(wall_time=began + elapsed, step=t, summary=summary).SerializeToString())
        file = path / name / f"events.out.tfevents.{int(began)}.p2pfl"
        with write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, content.getvalue())
        return file

    steps = _steps(found)
    by_round: dict[int, list[tuple[float, Mapping[str, float]]]] = defaultdict(list)
    dishonest = attacks(folder.settings)
    for rounds in (steps[peer] for peer in steps if peer not in dishonest):
        for t, elapsed, values in rounds:
            by_round[t].append((elapsed, values))
    means = [
        (t, max(elapsed for elapsed, _ in by_round[t]), _mean([v for _, v in by_round[t]])) for t in sorted(by_round)
    ]
    return [*(write(f"peer-{peer:02d}", steps[peer]) for peer in sorted(steps)), write("mean", means)]


def _steps(records: Records) -> dict[int, list[tuple[int, float, dict[str, float]]]]:
    """Return each peer's rounds: number, seconds since its start, and values by tag (``loss/ce``)."""
    found: dict[int, list[tuple[int, float, dict[str, float]]]] = defaultdict(list)
    for record in records:
        values = {name.replace(".", "/", 1): float(value) for name, value in record.scalars().items()}
        found[record.peer].append((record.t, record.elapsed, values))
    return found


def _mean(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each tag over the peers that have it."""
    tags = dict.fromkeys(tag for found in values for tag in found)
    return {tag: fmean(found[tag] for found in values if tag in found) for tag in tags}
