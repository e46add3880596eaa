"""The neighbors' addresses, from the run file or from files in the run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from p2pfl import PeerId
from p2pfl.run_file.addresses import AddressBook
from p2pfl.run_folder.files import write_atomically
from peers.resolver import Resolver

FEW = 32
"""Peers up to which files are looked for one by one."""
SETTLED = 2.0
"""Seconds after which two changes of the folder have different timestamps: no file system's clock is coarser."""


class AddressFiles:
    """One file per running peer that contains its address.

    Args:
        me: this peer.
        folder: folder of the files.
        book: addresses from the run file.
        neighbors: peers to look up.
        resolver: resolves host names to numeric addresses.
        now: the clock.
    """

    def __init__(
        self,
        me: PeerId,
        folder: Path,
        book: AddressBook,
        neighbors: tuple[PeerId, ...],
        resolver: Resolver,
        now: Callable[[], float],
    ) -> None:
        self.folder = folder
        self._me = me
        self._book = book
        self._resolver = resolver
        self._now = now
        self._fixed = frozenset(filter(self.is_fixed, neighbors))
        """Neighbors whose numeric address may change without a change in the folder."""
        self._modified = 0
        self._modified_seen_at = 0.0

    def publish(self, bound: str) -> str:
        """Publish this peer's address, which neighbors connect to, and return it: the peer is not dead.

        Args:
            bound: the address that it has bound.
        """
        with suppress(OSError):
            self._death_notice(self._me).unlink()
        address = self._book.advertised(self._me, bound)
        write_atomically(self._file(self._me), address.encode())
        return address

    def withdraw(self, address: str) -> None:
        """Withdraw this peer's published address."""
        if self._read(self._me) == address:  # otherwise another process of this peer has taken over
            with suppress(OSError):
                self._file(self._me).unlink()

    def address_of(self, peer: PeerId) -> str | None:
        """Return a peer's address, or None if it is currently unknown. Call it until there is a connection."""
        address = self.given(peer)
        try:
            return None if address is None else self._resolver.numeric(address)
        except ValueError:
            return None  # damaged file; its peer will rewrite it

    def given(self, peer: PeerId) -> str | None:
        """Return a peer's address as the run file or the peer itself gives it, perhaps with a host name."""
        return self._book.address_of(peer) or self._read(peer)

    def look(self, among: Collection[PeerId]) -> tuple[Collection[PeerId], Collection[PeerId]]:
        """Return the peers that may have an address now, and the peers that the launcher has declared dead.

        Only peers in ``among`` matter. Listing the folder is cheaper than looking for many of them. Looking for a few
        is cheaper in a large run: the folder changes all the time while peers start, and each would read all names.
        """
        if len(among) <= FEW:
            return among, [peer for peer in among if self._death_notice(peer).exists()]
        try:
            names = os.listdir(self.folder)
        except OSError:
            names = []
        dead = [int(name.removesuffix(".dead")) for name in names if re.fullmatch(r"\d+\.dead", name)]
        return self._fixed.union(int(name) for name in names if name.isdigit()), dead

    def is_fixed(self, peer: PeerId) -> bool:
        """Return whether the run file determines the address."""
        return self._book.address_of(peer) is not None

    def is_withdrawn(self, peer: PeerId) -> bool:
        """Return whether a peer that publishes its address has withdrawn it.

        It has not started, has finished or has failed; a killed or stopped peer leaves its address.
        """
        if self.is_fixed(peer):
            return False
        try:
            self._file(peer).stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)  # otherwise unknown
        return False

    def version(self) -> int:
        """Return a number that changes whenever an address may have changed; 0 if a change cannot be detected."""
        if self._fixed:
            return 0
        try:
            modified = self.folder.stat().st_mtime_ns
        except OSError:
            return 0
        # Two changes within one tick of the file system's clock have the same timestamp, so keep reading for a while.
        # That clock may jump: its timestamps may be compared for equality only.
        if modified != self._modified:
            self._modified, self._modified_seen_at = modified, self._now()
        return modified if self._now() - self._modified_seen_at > SETTLED else 0

    def _read(self, peer: PeerId) -> str | None:
        try:
            return self._file(peer).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None  # the peer has not started or has just closed, or the folder was deleted

    def _file(self, peer: PeerId) -> Path:
        return self.folder / f"{peer:02d}"

    def _death_notice(self, peer: PeerId) -> Path:
        return self.folder / f"{peer:02d}.dead"
