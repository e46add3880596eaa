"""Keys: who may speak. One CURVE key pair per peer, and who needs which part of it.

    keys/
        public.yaml     `3: 9f2c…`, a line per peer: everybody's public key, on every host
        03.key          the private key of peer 3: on the host where peer 3 runs, mode 0600, and nowhere else

or, where no peer may see another's (a volume for each, say), a folder for each:

    keys/03/            03.key, and public.yaml with everybody's public key

A key is 32 bytes, written as 64 hex digits. Lines of ``public.yaml`` may be gathered from several hosts with ``cat``,
or stand in the run file, as ``transport.public_keys``. A private key is in no log, no run folder and no message; it
is read by its peer when that starts, and by nobody else.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from p2pfl.errors import KeysError, Unwritable
from p2pfl.runfolder import PeerId, write_atomically

PUBLIC = "public.yaml"
SIZE = 32
"""Bytes of a key."""


@dataclass(frozen=True)
class Keys:
    """What one peer knows: the public keys of all, by id, and its own private key."""

    public: tuple[bytes, ...]
    private: bytes = field(repr=False)

    @classmethod
    def read(cls, folder: Path, me: PeerId, peers: int, public: Mapping[PeerId, str] | None = None) -> Keys:
        """Those of peer ``me`` in a run of ``peers``. Raises KeysError.

        Args:
            public: hex digits by peer, instead of those in the folder.
        """
        return cls(public_keys(folder, peers, public), private_key(folder, me))


def check(
    folder: Path, peers: int, here: Iterable[PeerId], public: Mapping[PeerId, str] | None = None
) -> tuple[bytes, ...]:
    """The public keys of all. Raises KeysError if a key is lacking for peers ``here`` to start on this host."""
    everybody = public_keys(folder, peers, public)
    for peer in here:
        private_key(folder, peer)
    return everybody


def is_loopback(host: str) -> bool:
    """Whether whoever binds ``host`` is heard on this host only. A name other than localhost may mean anything."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in ("localhost", "lo")


def short(key: bytes) -> str:
    """As much of a public key as a log needs."""
    return f"{key.hex()[:12]}…"


# ---- public keys ---------------------------------------------------------------------------------------------


def public_keys(folder: Path, peers: int, given: Mapping[PeerId, str] | None = None) -> tuple[bytes, ...]:
    """The public keys of peers 0 to ``peers`` - 1: ``given``, or those in the folder. Raises KeysError."""
    where = "transport.public_keys" if given is not None else str(folder / PUBLIC)
    keys = _read_public(folder / PUBLIC) if given is None else dict(given)
    if problem := problem_with(keys, peers):
        raise KeysError(f"{where}: {problem}")
    return tuple(bytes.fromhex(keys[peer]) for peer in range(peers))


def problem_with(keys: Mapping[PeerId, str], peers: int) -> str | None:
    """Why these cannot be the public keys of peers 0 to ``peers`` - 1."""
    lacking = [peer for peer in range(peers) if peer not in keys]
    if lacking:
        return f"no key of peer {', '.join(map(str, lacking))}"
    owners: dict[bytes, PeerId] = {}
    for peer in range(peers):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", keys[peer]):
            return f"the key of peer {peer} should be 64 hex digits"
        other = owners.setdefault(bytes.fromhex(keys[peer]), peer)
        if other != peer:
            return f"peers {other} and {peer} have the same key; either could pose as the other"
    return None


def _read_public(path: Path) -> dict[PeerId, str]:
    keys: dict[PeerId, str] = {}
    for number, line in enumerate(_read(path, "`p2pfl keys new` makes it").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\d{1,9}): *['\"]?([0-9a-fA-F]{64})['\"]?", text)
        if match is None:
            raise KeysError(f"{path}:{number}: should be `peer: 64 hex digits`")
        peer, key = int(match[1]), match[2]
        if keys.setdefault(peer, key) != key:
            raise KeysError(f"{path}:{number}: another key of peer {peer} stands above")
    return keys


# ---- private keys --------------------------------------------------------------------------------------------


def private_file(folder: Path, peer: PeerId) -> Path:
    return folder / f"{peer:02d}.key"


def private_key(folder: Path, peer: PeerId) -> bytes:
    """Raises KeysError, without a word of what it has read: also if others than its owner may read or write it."""
    path = private_file(folder, peer)
    text = _read(path, f"copy it to the host where peer {peer} runs, or make one: `p2pfl keys new`", private=True)
    if not re.fullmatch(r"[0-9a-f]{64}\n?", text):
        raise KeysError(f"{path}: damaged: no private key of 64 hex digits")
    return bytes.fromhex(text)


def _read(path: Path, remedy: str, *, private: bool = False) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)  # of what is read, whatever becomes of the name
            if private and mode & 0o077:
                raise KeysError(f"{path}: mode {mode:04o} lets others at this private key: chmod 600 {path}")
            return file.read(1 << 20).decode("ascii")
    except FileNotFoundError:
        raise KeysError(f"{path}: not there; {remedy}") from None
    except OSError as error:
        raise KeysError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"{path}: damaged: not text") from None


# ---- new ones ------------------------------------------------------------------------------------------------


def write_new(folder: Path, pairs: Mapping[PeerId, tuple[bytes, bytes]]) -> None:
    """Write (public, private) pairs into a new or an empty folder. Raises KeysError; nothing is ever overwritten."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise KeysError(f"{folder}: not empty; keys are not overwritten: give a new folder")
        for peer, (_, private) in pairs.items():
            _write(private_file(folder, peer), private.hex() + "\n", 0o600)
        _write(folder / PUBLIC, _lines({peer: public for peer, (public, _) in pairs.items()}), 0o644)
    except OSError as error:
        raise KeysError(f"{folder}: keys cannot be written there: {error.strerror}") from None


def write_apart(
    folder: Path, peers: Iterable[PeerId], new_pair: Callable[[], tuple[bytes, bytes]], owner: int | None = None
) -> None:
    """A folder in ``folder`` for each peer, with its own private key and the public ones of all. Raises KeysError.

    Pairs that are there are kept.

    Args:
        new_pair: makes (public, private).
        owner: user id that the private keys are given to; None: who runs this.
    """
    public: dict[PeerId, bytes] = {}
    try:
        for peer in peers:
            place = apart(folder, peer)
            place.mkdir(mode=0o755, parents=True, exist_ok=True)
            mine = private_file(place, peer)
            if mine.exists():
                known = _read_public(place / PUBLIC)
                if peer not in known:
                    raise KeysError(f"{mine}: its public key is not in {place / PUBLIC}; remove it for a new pair")
                public[peer] = bytes.fromhex(known[peer])
                continue
            public[peer], private = new_pair()
            # First: a private key that is there has its public one beside it, wherever a crash falls.
            write_atomically(place / PUBLIC, _lines({peer: public[peer]}).encode(), durable=True)
            hidden = place / f".{mine.name}.tmp"
            hidden.unlink(missing_ok=True)
            _write(hidden, private.hex() + "\n", 0o600)
            if owner is not None:
                os.chown(hidden, owner, -1)
            hidden.rename(mine)
        for peer in public:
            write_atomically(apart(folder, peer) / PUBLIC, _lines(public).encode(), durable=True)
    except Unwritable as error:
        raise KeysError(str(error)) from None
    except OSError as error:
        raise KeysError(f"{folder}: keys cannot be written there: {error.strerror}") from None


def apart(folder: Path, peer: PeerId) -> Path:
    """Where ``write_apart`` keeps what one peer needs."""
    return folder / f"{peer:02d}"


def _lines(public: Mapping[PeerId, bytes]) -> str:
    return "".join(f"{peer}: {key.hex()}\n" for peer, key in public.items())


def _write(path: Path, text: str, mode: int) -> None:
    # The mode counts from the first moment on; a umask may take from it, and cannot add.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)


__all__ = ["PUBLIC", "SIZE", "Keys", "apart", "check", "is_loopback", "private_file", "problem_with", "public_keys",
           "short", "write_apart", "write_new"]  # fmt: skip
