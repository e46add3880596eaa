"""What tells that files of a dataset have changed, without reading them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from stat import S_ISREG
from typing import Any

from p2pfl.data.loaders.file_tree import files_below
from p2pfl.data.loaders.image_lists import PERHAPS, is_readable


def fingerprint(path: Path) -> list[Any]:
    """Return what differs if a file, or any file below a folder, was changed, added, removed, renamed or replaced.

    The time of the last change of the status (ctime) tells what leaves size and time of modification as they were.

    Raises:
        OSError: the file does not exist.
        DataError: a folder cannot be read.
    """
    if not path.is_dir():
        status = path.stat()
        return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    content, start, types = hashlib.sha256(), len(os.fspath(path)), set()
    for found, below in files_below(path):
        numbers: tuple[int, ...] = ()
        if below is not None and S_ISREG(below.st_mode):
            numbers = below.st_size, below.st_mtime_ns, below.st_ctime_ns
        content.update(os.fsencode(f"{found[start:]}\0{numbers}\0"))
        types.add(os.path.splitext(found)[1].lower())
    # Pillow may read more types than when the files were read first.
    return [str(path.resolve()), content.hexdigest(), *filter(is_readable, sorted(types & PERHAPS))]


def unedited(path: Path) -> list[Any]:
    """As ``fingerprint``, of files that users do not edit: of a folder, only its direct entries count."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
