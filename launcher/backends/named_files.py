"""Files that a run file names by path, besides those that every run folder keeps: of datasets, weights of models, ….

Hosts that do not share the run folder may lack them. Small ones are copied into ``files`` of the run folder, whose
run file names the copies, so that they are sent with everything else (multi_host.py) and are there after a resume.
Files below ``data.root`` are the dataset's, which each host has, or downloads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from launcher.views.formatting import size
from p2pfl.session.files import write_atomically, write_errors
from p2pfl.session.run_folder import RunFolder

MAX_SENT = 64 << 20
"""Bytes of all copies: they pass through the launcher's memory, once for each host."""
RUN_FILES = ("run.yaml", "run.json")


def copy_named_files(folder: RunFolder, data_root: Path) -> list[str]:
    """Copy what the run file names by path into the folder of a new run. Raises WriteError.

    Args:
        data_root: folder of the dataset's files.

    Returns:
        Lines about what is too large.
    """
    from p2pfl.models.import_path import parse
    from p2pfl.run_file.plugin_sources import FILES
    from p2pfl.run_file.yaml_source import to_text

    plain = yaml.safe_load(folder.run_file.read_text(encoding="utf-8"))
    room = MAX_SENT
    left_out: list[str] = []
    copied = False
    models = plain["models"]
    specs = [parse(text) for text in models.get("members", [models.get("name", "")])]
    for where, values, key in _named({**plain, "models": [spec.arguments if spec else {} for spec in specs]}):
        path = Path(values[key])
        if path.is_relative_to(data_root.absolute()):
            continue
        parts = {part: part.stat().st_size for part in _parts(path)}
        if sum(parts.values()) > room:
            left_out.append(
                f"{where}: {path} has {size(sum(parts.values()))}, too much to send: each host needs it at that path"
            )
            continue
        room -= sum(parts.values())
        target = _unused(folder.root / FILES, path.name)
        for part in parts:
            to = target / part.relative_to(path) if part != path else target
            with write_errors(to):
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(part, to)
        values[key] = str(target.relative_to(folder.root))
        copied = True
    names = [spec.name if spec else "" for spec in specs]
    if "members" in models:
        models["members"] = [name or text for name, text in zip(names, models["members"], strict=True)]
    elif names[0]:
        models["name"] = names[0]
    if copied:
        write_atomically(folder.run_file, to_text(plain).encode(), durable=True)
    return left_out


def _named(plain: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parameters of dataset, models and algorithm that are existing paths: where, a container, its key."""

    def within(where: str, values: Any) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(values, dict | list):
            for key, value in list(values.items() if isinstance(values, dict) else enumerate(values)):
                if isinstance(value, str) and os.path.isabs(value) and os.path.exists(value):
                    yield f"{where}.{key}", values, key
                yield from within(f"{where}.{key}", value)

    yield from within("data.dataset", plain["data"]["dataset"])
    yield from within("models", plain["models"])
    yield from within("algorithm", plain["algorithm"])


def _parts(path: Path) -> list[Path]:
    """Return the files to copy: of a run, from which an algorithm takes pretrained parts, the first checkpoint."""
    if path.is_file():
        return [path]
    if (path / RUN_FILES[0]).is_file():
        checkpoints = (files.checkpoint for files in RunFolder.open(path).peers())
        first = next((checkpoint for checkpoint in checkpoints if checkpoint.is_file()), None)
        return [*(path / name for name in RUN_FILES if (path / name).is_file()), *([first] if first else [])]
    return [part for part in sorted(path.rglob("*")) if part.is_file()]


def _unused(folder: Path, name: str) -> Path:
    """Return a path that ends with ``name``, by which peers compare their run files."""
    return next(
        target
        for number in count(1)
        if not (target := folder / name if number == 1 else folder / str(number) / name).exists()
    )
