"""How much a location may deliver. Another host or container may send anything, and without end."""

from __future__ import annotations

from pathlib import PurePosixPath

from launcher.errors import CollectError
from launcher.formatting import size

DEFAULT_MAX_BYTES = 10**10
"""Most bytes to read from one location, unless the user allows more."""
MAX_FILES = 100_000
"""Most files of one location: about 10 per peer."""
MAX_PEERS = 10_000
"""Most peers of a run: a collection has a folder for each."""
MAX_RECORD = 1 << 26
"""Most bytes of a file that is later read into memory as a whole: 67 MB, twenty times those of the largest runs."""
RECORDS = (".json", ".yaml")


class Limit:
    """What one location may still deliver.

    Args:
        most: bytes in all.
    """

    def __init__(self, most: int = DEFAULT_MAX_BYTES) -> None:
        self.most = most
        self._bytes = 0
        self._files = 0

    def count_bytes(self, count: int) -> None:
        """Count bytes that have been read. Raises CollectError if they are too many in all."""
        self._bytes += count
        if self._bytes > self.most:
            raise CollectError(
                f"more than {size(self.most)}, which is the most that may be read: see `p2pfl collect --max-gb`"
            )

    def count_file(self) -> None:
        """Count a file, copied or not. Raises CollectError if there are too many."""
        self._files += 1
        if self._files > MAX_FILES:
            raise CollectError(f"more than {MAX_FILES} files; give a run folder instead of a folder that contains it")

    def check_size(self, name: str, count: int) -> None:
        """Raise CollectError if a file may not have ``count`` bytes."""
        if PurePosixPath(name).suffix in RECORDS and count > MAX_RECORD:
            raise CollectError(
                f"{name} has {size(count)}, more than such a file can have ({size(MAX_RECORD)}); remove it there"
            )
        if count > self.most:
            raise CollectError(
                f"{name} has {size(count)}; at most {size(self.most)} may be read: see `p2pfl collect --max-gb`"
            )
