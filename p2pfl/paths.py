"""Paths in a run file: they start from its folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, PlainSerializer, SerializationInfo, ValidationInfo

FILES = "files"
"""The subfolder of a run folder with copies of files that run.yaml names, besides the files of plug-ins."""


def base_of(info: ValidationInfo) -> Path | None:
    """Return the folder of the run file that is being read; None if options are not read from one."""
    base: Path | None = (info.context or {}).get("base")
    return base


def expanded(path: Path) -> Path:
    """Replace a leading ``~`` by the home folder. Raises ValueError: there is none."""
    try:
        return path.expanduser()
    except RuntimeError:
        name = path.parts[0]
        reason = (
            "this user has no home folder; write the path in full, or set HOME"
            if name == "~"
            else f"{name} is not the home folder of a user (a path in yours begins with ~/)"
        )
        raise ValueError(f"{str(path)!r}: {reason}") from None


def _from_base(path: Path, info: ValidationInfo) -> Path:
    return (base_of(info) or Path()).resolve() / expanded(path)


def _storage(value: str, info: ValidationInfo) -> str:
    if "://" not in value:
        return str(_from_base(Path(value), info))
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(value.partition("://")[0])
    except (ImportError, ValueError) as error:
        raise ValueError(f"{value!r}: {error}") from None
    return value


def _from_base_if_there(path: Path, info: ValidationInfo) -> Path:
    base, path = base_of(info), expanded(path)
    if base is None or not os.path.exists(base / path):
        return path
    # The paths in a run folder were parsed before: only copies that were made for other hosts are in it.
    if (base / "run.json").is_file() and path.parts[:1] != (FILES,):
        return path
    return base.resolve() / path


def _path_text(path: Path, info: SerializationInfo) -> str:
    return path.name or "." if (info.context or {}).get("portable") else str(path)


ExpandedPath = Annotated[Path, AfterValidator(expanded)]
"""A path whose leading ``~`` is the home folder."""
_AS_TEXT = PlainSerializer(_path_text, return_type=str)

LocalPath = Annotated[Path, AfterValidator(_from_base), _AS_TEXT]
"""A path relative to the folder of the run file; absolute after parsing."""
Storage = Annotated[str, AfterValidator(_storage)]
"""A URL that fsspec supports, or a path as a LocalPath; absolute after parsing."""
DataPath = Annotated[Path, AfterValidator(_from_base_if_there), _AS_TEXT]
"""A path relative to the folder of the run file; if nothing is there, it stays relative to ``data.root``."""
