"""``python -m peers.keys FOLDER 0 1 2 …``: generate key pairs, for `p2pfl keys new`.

With ``--check``, check that private keys match public ones, for `p2pfl launch`. This is a separate process,
because generating and checking keys needs ZeroMQ, which the launcher does not import.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

import zmq
from zmq.utils import z85

from p2pfl import PeerId
from p2pfl.errors import KeysError
from p2pfl.public_keys import short
from p2pfl.run_folder.key_files import Keys, private_file, write_new, write_per_peer


def new_pair() -> tuple[bytes, bytes]:
    """Return (public, private), 32 bytes each."""
    public, private = zmq.curve_keypair()
    return z85.decode(public), z85.decode(private)


def read_keys(folder: Path, me: PeerId, peers: int, public: dict[PeerId, str] | None = None) -> Keys:
    """Read the keys of peer ``me``. Raises KeysError, also if its private key does not match its public one."""
    keys = Keys.read(folder, me, peers, public)
    if z85.decode(zmq.curve_public(z85.encode(keys.private))) != keys.public[me]:
        raise KeysError(
            f"{private_file(folder, me)}: does not match public key {short(keys.public[me])} of peer {me}; "
            f"use the public keys that were generated with it"
        )
    return keys


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m peers.keys")
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", type=int, nargs="+")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--owner", type=int)
    parser.add_argument(
        "--check", action="store_true", help="check private keys against a JSON list of public keys on stdin"
    )
    given = parser.parse_args(arguments)
    try:
        if given.check:
            public = dict(enumerate(json.load(sys.stdin)))
            for peer in given.peers:
                read_keys(given.folder, peer, len(public), public)
        elif given.apart:
            write_per_peer(given.folder, given.peers, new_pair, given.owner)
        else:
            write_new(given.folder, {peer: new_pair() for peer in given.peers})
    except KeysError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
