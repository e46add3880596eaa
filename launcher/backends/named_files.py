"""Files that a run file names by path and run folders do not keep: of datasets, weights of models, ….

Hosts that do not share the run folder may lack them. Small files are copied into ``files`` of the run folder, whose
run file names the copies. So they are sent with everything else (host_files.py), and a resumed run has them.
Files below ``data.root``, but not beside the run file, belong to the dataset, which each host has or downloads.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from launcher.formatting import size
from p2pfl.run_folder.files import write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from p2pfl.models.import_path import ImportPath
    from p2pfl.options import Loc, Options
    from p2pfl.run_file.run import Run

MAX_SENT = 64 << 20
"""Bytes of all copies: they pass through the launcher's memory, once for each host."""
RUN_FILES = ("run.yaml", "run.json")


def copy_named_files(folder: RunFolder, run: Run) -> list[str]:
    """Copy what the run file names by path into the folder of a new run. Raises WriteError.

    Returns:
        Lines about what is too large.
    """
    from p2pfl.data.cache_folder import data_root
    from p2pfl.models.import_path import parse
    from p2pfl.paths import FILES
    from p2pfl.run_file.yaml_source import to_text

    plain = yaml.safe_load(folder.run_file.read_text(encoding="utf-8"))
    room = MAX_SENT
    left_out: list[str] = []
    copied = False
    models = plain["models"]
    specs = [parse(text) for text in models.get("members", [models.get("name", "")])]
    root = Path(os.path.abspath(data_root(run.file.data.root)))
    for where, values, key, path in (*_named(plain, run, root), *_named_by_models(specs, run, root)):
        if key is None:
            left_out.append(f"{where}: {path} is not declared as a path, so it is not sent: each host needs it there")
            continue
        parts: list[Path] = []
        total = 0
        for part in _parts(path):
            parts.append(part)
            total += part.stat().st_size
            if total > room:
                break
        if total > room:
            text = f"{where}: {path} has more than {size(room)}, too much to send: each host needs it at that path"
            left_out.append(text)
            continue
        room -= total
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


def _named(plain: dict[str, Any], run: Run, root: Path) -> Iterator[tuple[str, Any, Any, Path]]:
    """Yield the parameters of dataset and algorithm that name what hosts need: where, a container, its key, the path.

    The key is None if a copy of the run file on another host cannot name a copy of the path.

    Args:
        root: ``data.root``; absolute.
    """
    for where, section, options in (
        ("data.dataset", plain["data"]["dataset"], run.loader),
        ("algorithm", plain["algorithm"], run.hyper),
    ):
        for loc, text in list(_texts(section)):
            path = Path(os.path.abspath(root / text))
            if _is_below(path, run, root) or not os.path.exists(path):
                continue
            key = loc[-1] if _starts_from_run_file(options, loc, path) else None
            if key is not None or os.path.isabs(text):
                values = section
                for part in loc[:-1]:
                    values = values[part]
                yield ".".join((where, *map(str, loc))), values, key, path


def _named_by_models(
    specs: Sequence[ImportPath | None], run: Run, root: Path
) -> Iterator[tuple[str, Any, Any, Path]]:
    """Yield the arguments of models that are existing paths, as ``_named`` does."""
    for member, spec in enumerate(specs):
        for loc, text in list(_texts(spec.arguments if spec else {})):
            if os.path.isabs(text) and os.path.exists(text) and not _is_below(Path(text), run, root):
                values: Any = spec and spec.arguments
                for part in loc[:-1]:
                    values = values[part]
                yield ".".join(("models", str(member), *map(str, loc))), values, loc[-1], Path(text)


def _is_below(path: Path, run: Run, root: Path) -> bool:
    """Whether a path is of a dataset that each host has or downloads."""
    return path.is_relative_to(root) and not path.is_relative_to(os.path.abspath(run.base or Path()))


def _texts(values: Any, above: Loc = ()) -> Iterator[tuple[Loc, str]]:
    """Yield all texts in plain values, and where they are."""
    if isinstance(values, str):
        yield above, values
    elif isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _texts(value, (*above, key))


def _starts_from_run_file(options: Options, loc: Loc, path: Path) -> bool:
    """Whether a parameter is a path that may start from the folder of the run file, as the copies will."""
    from p2pfl.options import OptionErrors

    tree: Any = options.to_dict()
    *above, last = loc
    try:
        values = tree
        for part in above:
            values = values[part]
        values[last] = path.name
        found: Any = vars(type(options).parse(tree, path.parent))
        for part in loc:
            found = found[part]
    except (OptionErrors, LookupError, TypeError):
        return False
    return isinstance(found, Path) and found.is_absolute()


def _parts(path: Path) -> Iterator[Path]:
    """Yield the files to copy: of a run, from which an algorithm takes pretrained parts, the first checkpoint."""
    if path.is_file():
        yield path
    elif (path / RUN_FILES[0]).is_file():
        yield from (path / name for name in RUN_FILES if (path / name).is_file())
        checkpoints = (files.checkpoint for files in RunFolder.open(path).peers())
        yield from islice(filter(Path.is_file, checkpoints), 1)
    else:
        yield from _below(path)


def _below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, behind links too, except links that lead back to it."""
    if (real := os.path.realpath(folder)) in above:
        return
    for part in sorted(folder.iterdir()):
        if part.is_dir():
            yield from _below(part, (*above, real))
        elif part.is_file():
            yield part


def _unused(folder: Path, name: str) -> Path:
    """Return a path that ends with ``name``, by which peers compare their run files."""
    return next(
        target
        for number in count(1)
        if not (target := folder / name if number == 1 else folder / str(number) / name).exists()
    )
