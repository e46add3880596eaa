"""The files of this host that a peer in a container needs, and their paths in the container."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from p2pfl.run_folder.folder import PLUGINS

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

PORT = 5700
"""Peer i listens on PORT + i. The choice is arbitrary: each container has an address."""

CONFIG, RUN, KEYS, FILES, DECODED = "/etc/p2pfl", "/run/p2pfl", "/keys", "/data/files", "/data/decoded"
"""Folders in a container: run file, run folder, keys, dataset files, decoded dataset. In the image, the run folder
and the last two belong to the user that peers run as, and so do new volumes mounted there."""


def environment(file: Path, address: str) -> dict[str, str]:
    """Return the environment variables of every peer of the run ``file``. They override the keys of the run file.

    Args:
        address: template of the peers' addresses.
    """
    return {
        "P2PFL_FILE": f"{CONFIG}/{file.name}",
        "P2PFL_RUN": RUN,
        "P2PFL_HOST": "0.0.0.0",
        "P2PFL_PORT": str(PORT),
        "P2PFL_ADDRESS": address,
        "P2PFL_KEYS": KEYS,
        "P2PFL_DATA": FILES,
        "P2PFL_CACHE": DECODED,
    }


def set_options(run: Run, sets: Iterable[str]) -> list[str]:
    """Return the options of peers that change keys of the run file: ``sets``, and where the dataset's files are."""
    root = [f"data.root={FILES}"] if run.file.data.root else []
    return [f"--set={item}" for item in (*sets, *root)]


def decode_command(file: str, options: Iterable[str]) -> list[str]:
    """Return the command that decodes the dataset of the run ``file`` for all peers."""
    return ["p2pfl", "data", "show", file, *options, "--set=transport={}"]


def reads_dataset_files(run: Run) -> bool:
    """Whether the run's dataset has files below ``data.root``."""
    return any(path.is_relative_to(FILES) for path in run.loader.files(Path(FILES)))


def files_of_run(run: Run, file: Path) -> dict[str, tuple[Path, str]]:
    """Return the files, or folders, that peers read besides the dataset: {name: (path here, path in a container)}.
    Paths here are relative to the same folder as ``file``, the run file.
    """
    found = {"file": (file, f"{CONFIG}/{file.name}")}
    for number, path in enumerate(sorted(set(run.graph.files))):
        found[f"graph{number or ''}"] = (file.parent / path, os.path.normpath(Path(CONFIG) / path))
    copied = sorted({(plugin.root / top, top) for plugin in run.plugins for top in plugin.tops})
    for number, (path, top) in enumerate(copied):
        found[f"plugin{number}"] = (path, f"{CONFIG}/{PLUGINS}/{top}")  # searched like the folder of the run file
    base = file.parent
    for number, path in enumerate(_files_outside_of_root(run)):
        beside = path.is_relative_to(base.resolve())
        source = base / path.relative_to(base.resolve()) if beside else path
        found[f"data{number}"] = (source, _in_container(run, file, path))
    return found


def _files_outside_of_root(run: Run) -> list[Path]:
    """Return the dataset's files outside of ``data.root``, and the files of the partition and the algorithm."""
    root = run.file.data.root or Path(FILES)
    outside = {path for path in run.loader.files(root) if not path.is_relative_to(root)}
    outside |= set(run.partition.files().values())
    outside |= {value for value in vars(run.hyper).values() if isinstance(value, Path)}  # a pretrained encoder
    return sorted(path for path in outside if outside.isdisjoint(path.parents))


def _in_container(run: Run, file: Path, path: Path) -> str:
    """Return where peers look for ``path``: at an absolute path of the run file, or relative to the run file."""
    data, given = run.file.data, run.file.algorithm.given
    written = {os.path.expanduser(text) for text in _texts([data.dataset.given, data.partition.given, given])}
    if any(str(parent) in written for parent in (path, *path.parents)):
        return str(path)
    return os.path.normpath(Path(CONFIG) / os.path.relpath(path, file.parent.resolve()))


def _texts(value: object) -> Iterator[str]:
    """Yield all strings in plain values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
