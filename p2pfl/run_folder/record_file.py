"""Read the records of a peer while it writes them. Without torch: the launcher's views import it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from p2pfl.run_folder.files import json_object


class RecordFile:
    """Read the records of a peer while it appends to them.

    A peer that resumes replaces the file by one that ends earlier; then the records are read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the records since the last call; leave an incomplete last line for the next one."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:
                    self._inode, self._offset = found.st_ino, 0
                file.seek(self._offset)
                new = file.read()
        except OSError:
            return []
        new = new[: new.rfind(b"\n") + 1]
        self._offset += len(new)
        records = map(json_object, new.splitlines())
        return [record for record in records if record is not None and type(record.get("t")) is int]
