"""Checks before peers are started, for all backends. They find most problems before there is a run folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from launcher.backends.limits import check_limits
from launcher.backends.this_host import remote_peers
from launcher.errors import LaunchError
from launcher.tracking.processes import check_trackers
from p2pfl import PeerId
from p2pfl.errors import KeysError

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run


def check_start(run: Run, peers: Sequence[PeerId], *, here: bool) -> None:
    """Check what starting ``peers`` needs. Raises RunFileError, LaunchError.

    Args:
        here: all of them run on this host, which must have the resources.
    """
    check_keys(run, peers)
    check_trackers(run)
    if here:
        check_limits(run, peers)
        check_gpu(run)


def check_addresses(run: Run, peers: Iterable[PeerId]) -> None:
    """Raise RunFileError if the run file assigns an address of another host to one of these peers."""
    transport = run.file.transport
    for peer, address in remote_peers(transport.book(run.peers), peers):
        problem = (
            f"peer {peer} has the address {address}, which is not on this host; start each peer on its own host "
            "with `p2pfl peer`, or run all of them here: --set transport.hosts={} --set transport.address=null"
        )
        raise run.error_at("transport.hosts" if transport.hosts else "transport.address", LaunchError(problem))


def check_keys(run: Run, peers: Iterable[PeerId]) -> None:
    """Raise RunFileError if the keys that these peers need are missing or do not match."""
    from p2pfl.session import key_files

    transport = run.file.transport
    if transport.keys is not None:
        try:
            public = key_files.check(transport.keys, run.peers, peers, transport.public_keys)
            # libzmq checks whether private and public keys match; the launcher does not import it.
            command = [sys.executable, "-P", "-m", "peers.keys", "--check", str(transport.keys), *map(str, peers)]
            stdin = json.dumps([key.hex() for key in public])
            done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
            if done.returncode:
                raise KeysError(done.stderr.strip().removeprefix("error: "))
        except KeysError as error:
            raise run.error_at("transport.keys", error) from None


def check_gpu(run: Run) -> None:
    """Raise RunFileError if the run file requires a GPU and this host has none."""
    from p2pfl.session.gpus import require_gpu

    require_gpu(run)
