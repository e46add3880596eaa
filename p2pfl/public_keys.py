"""The peers' public keys, in the run file (``transport.public_keys``) or in the lines of ``public.yaml``.

A key is 32 bytes, written as 64 hex digits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from p2pfl import PeerId
from p2pfl.errors import KeysError


def problem_with(keys: Mapping[PeerId, str], peers: int) -> str | None:
    """Return why these cannot be the public keys of peers 0 to ``peers`` - 1; None if they can."""
    missing = [peer for peer in range(peers) if peer not in keys]
    if missing:
        return f"no key of peer {', '.join(map(str, missing))}"
    owners: dict[bytes, PeerId] = {}
    for peer in range(peers):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", keys[peer]):
            return f"the key of peer {peer} should be 64 hex digits"
        other = owners.setdefault(bytes.fromhex(keys[peer]), peer)
        if other != peer:
            return f"peers {other} and {peer} have the same key; each could impersonate the other"
    return None


def decode(keys: Mapping[PeerId, str], peers: int, where: str) -> tuple[bytes, ...]:
    """Return the keys of peers 0 to ``peers`` - 1. Raises KeysError, which names ``where`` they come from."""
    if problem := problem_with(keys, peers):
        raise KeysError(f"{where}: {problem}")
    return tuple(bytes.fromhex(keys[peer]) for peer in range(peers))


def parse(text: str, where: str) -> dict[PeerId, str]:
    """Return the keys in lines of ``peer: 64 hex digits``; # starts a comment. Raises KeysError."""
    keys: dict[PeerId, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(r"(\d{1,9}): *['\"]?([0-9a-fA-F]{64})['\"]?", content)
        if match is None:
            raise KeysError(f"{where}:{number}: should be `peer: 64 hex digits`")
        peer, key = int(match[1]), match[2]
        if keys.setdefault(peer, key) != key:
            raise KeysError(f"{where}:{number}: peer {peer} already has another key in a line above")
    return keys


def format_lines(keys: Mapping[PeerId, bytes]) -> str:
    """Return the contents of ``public.yaml``, which ``parse`` reads."""
    return "".join(f"{peer}: {key.hex()}\n" for peer, key in keys.items())


def short(key: bytes) -> str:
    """Return the first digits of a public key, for logs."""
    return f"{key.hex()[:12]}…"
