"""What goes over the network in a run, with keys and without: all that its peers send is recorded, and
searched for what nobody else should read. Needs to be root, for a raw socket.

    sudo python -m benchmarks.capture

Searches for kinds (words of every header), the run's id, the digest of its run file, and pieces of tensors: the first
64 bytes of each that a peer has sent.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import struct
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from p2pfl import wire
from p2pfl.config import Run, from_dict
from p2pfl.keys import write_new
from p2pfl.runfolder import PeerFolder, RunFolder
from p2pfl.session import load_data
from peers.keys import new_pair
from peers.runtime import run_peer

RUN_ID = "5eac0de5eac0de55"
PIECE = 64
RUN: dict[str, Any] = {
    "name": "overheard",
    "seed": 3,
    "rounds": 3,
    "peers": 3,
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5},
    },
    "models": "tiny-mixer",
    "algorithm": {"name": "mapl", "batch": 16, "warmup": 1},
    "transport": {"deadline": 60},
    "device": "cpu",
}


@contextmanager
def recorded(record: list[bytes]) -> Iterator[None]:
    """Every packet on the loopback device, while inside. Raises PermissionError."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
        tap.bind(("lo", 0))
        tap.settimeout(0.1)
        over = threading.Event()

        def listen() -> None:
            while True:
                if over.is_set():
                    tap.setblocking(False)
                try:
                    packet, address = tap.recvfrom(1 << 17)
                except TimeoutError:
                    continue
                except BlockingIOError:  # it is over, and all is read
                    return
                if address[2] == socket.PACKET_OUTGOING:  # each comes twice
                    record.append(packet)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            dropped = struct.unpack("II", tap.getsockopt(263, 6, 8))[1]  # SOL_PACKET, PACKET_STATISTICS
            if dropped:
                raise RuntimeError(f"{dropped} packets were too many to record")


@dataclass
class Heard:
    """Of one run: how much was recorded, and how often each secret stands in it."""

    size: int
    said: int
    """Bytes that the peers say that they have sent."""
    kinds: int
    run_id: int
    digest: int
    tensors: int
    """Pieces of tensors that were found."""
    of: int
    """Pieces that were looked for."""


def overhear(root: Path, keyed: bool) -> Heard:
    """One run, recorded. Raises PermissionError."""
    tree = {**RUN, "transport": {**RUN["transport"]}}
    if keyed:
        write_new(root / "keys", {peer: new_pair() for peer in range(RUN["peers"])})
        tree["transport"]["keys"] = str(root / "keys")
    run = from_dict(tree)
    folder = RunFolder.create(root / "run", range(run.peers))
    folder.write_about({"id": RUN_ID})
    folder.run_file.write_text(run.to_yaml())
    data = load_data(run)
    packets: list[bytes] = []
    fork = multiprocessing.get_context("fork")
    peers = [fork.Process(target=_be_peer, args=(folder, me, run, data, root)) for me in range(run.peers)]
    with recorded(packets):
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join()
    assert [peer.exitcode for peer in peers] == [0] * run.peers
    record = said_on(packets, {_port_of(place) for place in folder.peers()})
    pieces = [
        content[at : at + PIECE]
        for path in root.glob("pieces*")
        for content in [path.read_bytes()]
        for at in range(0, len(content), PIECE)
    ]
    out = [entry for place in folder.peers() for kinds in place.result().out.values() for entry in kinds.values()]  # type: ignore[union-attr]
    kinds = {kind for place in folder.peers() for sent in place.result().out.values() for kind in sent}  # type: ignore[union-attr]
    return Heard(
        size=len(record),
        said=sum(body + header for _, body, header in out),
        kinds=sum(record.count(kind.encode()) for kind in kinds),
        run_id=record.count(RUN_ID.encode()),
        digest=record.count(run.digest().encode()),
        tensors=sum(piece in record for piece in pieces),
        of=len(pieces),
    )


def said_on(packets: list[bytes], ports: set[int]) -> bytes:
    """What went over connections to these ports, each direction of each of them in one piece."""
    flows: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
    for packet in packets:
        ethernet, protocol = 14, 9
        if packet[12:14] != b"\x08\x00" or packet[ethernet + protocol] != socket.IPPROTO_TCP:
            continue
        tcp = ethernet + 4 * (packet[ethernet] & 15)
        source, target = struct.unpack_from(">HH", packet, tcp)
        (length,) = struct.unpack_from(">H", packet, ethernet + 2)
        if ports & {source, target}:
            end = ethernet + length if length else len(packet)
            flows[source, target] += packet[tcp + 4 * (packet[tcp + 12] >> 4) : end]
    return b"\n".join(bytes(flow) for flow in flows.values())


def _port_of(place: PeerFolder) -> int:
    (port,) = re.findall(r"listens at tcp://127\.0\.0\.1:(\d+)", place.log.read_text(encoding="utf-8"))
    return int(port)


def _be_peer(folder: RunFolder, me: int, run: Run, data: Any, root: Path) -> None:
    """Run it, and note the beginning of each long tensor that is sent."""
    encode = wire.encode
    notes = (root / f"pieces{me}").open("wb", buffering=0)

    def noting(body: wire.Body) -> wire.Encoded:
        encoded = encode(body)
        for frame in encoded.frames:
            piece = bytes(frame[:PIECE])
            if len(set(piece)) > PIECE // 4:  # no zeros, which stand everywhere
                notes.write(piece)
        return encoded

    wire.encode = noting
    os._exit(run_peer(folder, me, run, data))


@click.command(help=__doc__)
def main() -> None:
    click.echo("| | bytes recorded | bytes said | words of headers | run id | digest | pieces of tensors |")
    click.echo("|---|---|---|---|---|---|---|")
    heard = {}
    for keyed in (False, True):
        with tempfile.TemporaryDirectory() as root:
            try:
                found = heard[keyed] = overhear(Path(root), keyed)
            except PermissionError:
                raise click.ClickException("only root may record what goes over the loopback device") from None
        numbers = [found.size, found.said, found.kinds, found.run_id, found.digest, f"{found.tensors} of {found.of}"]
        click.echo(f"| {'with' if keyed else 'without'} keys | " + " | ".join(map(str, numbers)) + " |")
    with_keys = heard[True]
    if with_keys.kinds or with_keys.run_id or with_keys.digest or with_keys.tensors:
        raise click.ClickException("the run with keys can be read")


if __name__ == "__main__":
    main()
