"""``python -m peers.keys FOLDER 0 1 2 …``: new key pairs; the door through which `p2pfl keys new` makes them. With
``--check`` it looks whether pairs belong together, before `p2pfl launch` starts anybody.

ZeroMQ's own functions make them, so that they are what its CURVE sockets take.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

import zmq
from zmq.utils import z85

from p2pfl.errors import KeysError
from p2pfl.keys import Keys, private_file, short, write_apart, write_new
from p2pfl.runfolder import PeerId


def new_pair() -> tuple[bytes, bytes]:
    """(public, private), 32 bytes each."""
    public, private = zmq.curve_keypair()
    return z85.decode(public), z85.decode(private)


def read_keys(folder: Path, me: PeerId, peers: int, public: dict[PeerId, str] | None = None) -> Keys:
    """Those of peer ``me``. Raises KeysError, also if its private key does not belong to its public one."""
    keys = Keys.read(folder, me, peers, public)
    if z85.decode(zmq.curve_public(z85.encode(keys.private))) != keys.public[me]:
        raise KeysError(
            f"{private_file(folder, me)}: not the private key that belongs to public key {short(keys.public[me])} "
            f"of peer {me}: the public keys here are older or newer"
        )
    return keys


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m peers.keys")
    parser.add_argument("folder", type=Path)
    parser.add_argument("peers", type=int, nargs="+")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--owner", type=int)
    parser.add_argument("--check", action="store_true", help="private keys against public ones: JSON on stdin")
    given = parser.parse_args(arguments)
    try:
        if given.check:
            public = dict(enumerate(json.load(sys.stdin)))
            for peer in given.peers:
                read_keys(given.folder, peer, len(public), public)
        elif given.apart:
            write_apart(given.folder, given.peers, new_pair, given.owner)
        else:
            write_new(given.folder, {peer: new_pair() for peer in given.peers})
    except KeysError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
