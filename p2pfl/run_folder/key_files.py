"""Files with the peers' CURVE keys: one key pair per peer.

    keys/
        public.yaml     `3: 9f2c…`, one line per peer: all public keys, on every host
        03.key          the private key of peer 3: only on the host where peer 3 runs, mode 0600

or, where no peer may see another's private key (one volume per container, say), one folder per peer:

    keys/03/            03.key, and public.yaml with all public keys

Lines of ``public.yaml`` may be concatenated from several hosts, or be given in the run file as
``transport.public_keys``. A private key appears in no log or message; only its peer reads it, at start. It is in a
run folder only for a launch on several hosts: the launcher hands it out to the host of its peer (launcher/backends).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2pfl import PeerId
from p2pfl.errors import KeysError, WriteError
from p2pfl.public_keys import decode, format_lines, parse
from p2pfl.run_folder.files import write_atomically

PUBLIC = "public.yaml"


@dataclass(frozen=True)
class Keys:
    """The keys that a peer holds: all public keys by peer, and its private key."""

    public: tuple[bytes, ...]
    private: bytes = field(repr=False)

    @classmethod
    def read(cls, folder: Path, me: PeerId, peers: int, public: Mapping[PeerId, str] | None = None) -> Keys:
        """Read the keys of peer ``me`` in a run of ``peers`` peers. Raises KeysError.

        Args:
            public: hex digits by peer, instead of the keys in the folder.
        """
        return cls(public_keys(folder, peers, public), private_key(folder, me))


def check(
    folder: Path, peers: int, local: Iterable[PeerId], public: Mapping[PeerId, str] | None = None
) -> tuple[bytes, ...]:
    """All public keys. Raises KeysError if a key is missing that the ``local`` peers need to start on this host."""
    keys = public_keys(folder, peers, public)
    for peer in local:
        private_key(folder, peer)
    return keys


def public_keys(folder: Path, peers: int, given: Mapping[PeerId, str] | None = None) -> tuple[bytes, ...]:
    """Return the public keys of peers 0 to ``peers`` - 1: ``given``, or the keys in the folder. Raises KeysError."""
    if given is not None:
        return decode(given, peers, "transport.public_keys")
    return decode(_read_public(folder / PUBLIC), peers, str(folder / PUBLIC))


def _read_public(path: Path) -> dict[PeerId, str]:
    return parse(_read(path, "create it with `p2pfl keys new`"), str(path))


def private_file(folder: Path, peer: PeerId) -> Path:
    return folder / f"{peer:02d}.key"


def private_key(folder: Path, peer: PeerId) -> bytes:
    """Read a private key. Raises KeysError, which never quotes it; also if other users can access the file."""
    path = private_file(folder, peer)
    text = _read(
        path, f"copy it to the host where peer {peer} runs, or create one with `p2pfl keys new`", private=True
    )
    if not re.fullmatch(r"[0-9a-f]{64}\n?", text):
        raise KeysError(f"{path}: damaged: not a private key of 64 hex digits")
    return bytes.fromhex(text)


def _read(path: Path, remedy: str, *, private: bool = False) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)  # of the open file, as the path may be replaced
            if private and mode & 0o077:
                raise KeysError(f"{path}: mode {mode:04o} gives others access to this private key: chmod 600 {path}")
            return file.read(1 << 20).decode("ascii")
    except FileNotFoundError:
        raise KeysError(f"{path}: not found; {remedy}") from None
    except OSError as error:
        raise KeysError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"{path}: damaged: not text") from None


def write_new(folder: Path, pairs: Mapping[PeerId, tuple[bytes, bytes]]) -> None:
    """Write (public, private) pairs into a new or empty folder. Raises KeysError; nothing is ever overwritten."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise KeysError(f"{folder}: not empty; keys are never overwritten: choose a new folder")
        for peer, (_, private) in pairs.items():
            _write(private_file(folder, peer), private.hex() + "\n", 0o600)
        _write(folder / PUBLIC, format_lines({peer: public for peer, (public, _) in pairs.items()}), 0o644)
    except OSError as error:
        raise KeysError(f"{folder}: cannot write keys: {error.strerror}") from None


def write_per_peer(
    folder: Path, peers: Iterable[PeerId], new_pair: Callable[[], tuple[bytes, bytes]], owner: int | None = None
) -> None:
    """Write one folder per peer in ``folder``, with its private key and all public keys. Keeps existing pairs.

    Args:
        new_pair: makes (public, private).
        owner: user id that will own the private keys; default: the current user.

    Raises:
        KeysError: a file cannot be written, or a private key has lost its public one.
    """
    public: dict[PeerId, bytes] = {}
    try:
        for peer in peers:
            peer_folder = peer_key_folder(folder, peer)
            peer_folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            target = private_file(peer_folder, peer)
            if target.exists():
                known = _read_public(peer_folder / PUBLIC)
                if peer not in known:
                    raise KeysError(
                        f"{target}: its public key is not in {peer_folder / PUBLIC}; remove it for a new pair"
                    )
                public[peer] = bytes.fromhex(known[peer])
                continue
            public[peer], private = new_pair()
            # First, so that after a crash an existing private key always has a public key.
            write_atomically(peer_folder / PUBLIC, format_lines({peer: public[peer]}).encode(), durable=True)
            temporary = peer_folder / f".{target.name}.tmp"
            temporary.unlink(missing_ok=True)
            _write(temporary, private.hex() + "\n", 0o600)
            if owner is not None:
                os.chown(temporary, owner, -1)
            temporary.rename(target)
        for peer in public:
            write_atomically(peer_key_folder(folder, peer) / PUBLIC, format_lines(public).encode(), durable=True)
    except WriteError as error:
        raise KeysError(str(error)) from None
    except OSError as error:
        raise KeysError(f"{folder}: cannot write keys: {error.strerror}") from None


def peer_key_folder(folder: Path, peer: PeerId) -> Path:
    """Return the folder with one peer's keys that ``write_per_peer`` writes."""
    return folder / f"{peer:02d}"


def _write(path: Path, text: str, mode: int) -> None:
    # The mode applies from creation on; a umask can only remove bits from it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
