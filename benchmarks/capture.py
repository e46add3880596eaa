"""Record the traffic of a run, with keys and without, and search it for plaintext.

    sudo python -m benchmarks.capture

Searches for message kinds (in every header), the run id, the hash of the run file, and the first 64 bytes of each
tensor that a peer sent. Needs root for a raw socket.
"""

from __future__ import annotations

import multiprocessing  # noqa: TID251  # forks or communicates with its children
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

from p2pfl.messaging import wire
from p2pfl.messaging.schema import Body
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import PeerFolder, RunFolder
from p2pfl.run_folder.key_files import write_new
from p2pfl.session.build import load_data
from peers.keys import new_pair
from peers.runtime import run_peer

RUN_ID = "5eac0de5eac0de55"
PIECE = 64
RUN: dict[str, Any] = {
    "name": "captured",
    "seed": 3,
    "rounds": 3,
    "peers": 3,
    "data": {
        "dataset": "digits",
        "partition": {"name": "clusters", "clusters": 2, "per_class": 8, "test_per_class": 5},
    },
    "models": "tiny-mixer",
    "algorithm": {"name": "mapl", "batch": 16, "warmup": 1},
    "transport": {"deadline": 60, "same_host": False},
    "device": "cpu",
}


@contextmanager
def recorded(record: list[bytes]) -> Iterator[None]:
    """Record every packet on the loopback device. Raises PermissionError unless run as root."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as tap:
        tap.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE; tests beside this one send too
        tap.bind(("lo", 0))
        tap.settimeout(0.1)
        stopping = threading.Event()

        def listen() -> None:
            while True:
                if stopping.is_set():
                    tap.setblocking(False)
                try:
                    packet, address = tap.recvfrom(1 << 17)
                except TimeoutError:
                    continue
                except BlockingIOError:  # stopping, and everything is read
                    return
                if address[2] == socket.PACKET_OUTGOING:  # each packet comes twice
                    record.append(packet)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            dropped = struct.unpack("II", tap.getsockopt(263, 6, 8))[1]  # SOL_PACKET, PACKET_STATISTICS
            if dropped:
                raise RuntimeError(f"{dropped} packets were dropped while recording")


@dataclass
class Capture:
    """What was recorded of one run.

    Attributes:
        size: bytes recorded.
        sent: bytes that the peers counted as sent.
        kinds: occurrences of message kinds; ``run_id``, ``digest`` likewise.
        tensors: beginnings of tensors that were found, of ``tensors_sent``.
    """

    size: int
    sent: int
    kinds: int
    run_id: int
    digest: int
    tensors: int
    tensors_sent: int


def capture(root: Path, keyed: bool) -> Capture:
    """Run three peers and record their traffic. Raises PermissionError unless run as root."""
    tree = {**RUN, "transport": {**RUN["transport"]}}
    if keyed:
        write_new(root / "keys", {peer: new_pair() for peer in range(RUN["peers"])})
        tree["transport"]["keys"] = str(root / "keys")
    run = from_dict(tree)
    folder = RunFolder.create(root / "run", range(run.peers))
    folder.write_info({"id": RUN_ID})
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
    record = streams_of(packets, {_port_of(files) for files in folder.peers()})
    pieces = [
        content[at : at + PIECE]
        for path in root.glob("pieces*")
        for content in [path.read_bytes()]
        for at in range(0, len(content), PIECE)
    ]
    out = [entry for files in folder.peers() for kinds in files.result().sent.values() for entry in kinds.values()]  # type: ignore[union-attr]
    kinds = {kind for files in folder.peers() for sent in files.result().sent.values() for kind in sent}  # type: ignore[union-attr]
    return Capture(
        size=len(record),
        sent=sum(body + header for _, body, header in out),
        kinds=sum(record.count(kind.encode()) for kind in kinds),
        run_id=record.count(RUN_ID.encode()),
        digest=record.count(run.config_hash().encode()),
        tensors=sum(piece in record for piece in pieces),
        tensors_sent=len(pieces),
    )


def streams_of(packets: list[bytes], ports: set[int]) -> bytes:
    """Reassemble each direction of all TCP connections to these ports, and join them."""
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


def _port_of(files: PeerFolder) -> int:
    (port,) = re.findall(r"listens at tcp://127\.0\.0\.1:(\d+)", files.log.read_text(encoding="utf-8"))
    return int(port)


def _be_peer(folder: RunFolder, me: int, run: Run, data: Any, root: Path) -> None:
    """Run a peer and write down the beginning of each long tensor that it sends."""
    encode = wire.encode
    pieces = (root / f"pieces{me}").open("wb", buffering=0)

    def encode_and_note(body: Body, count: int = 1) -> wire.Encoded:
        encoded = encode(body, count)
        for _, tensor in encoded.tensors:
            piece = tensor[:PIECE].numpy().tobytes()
            if len(set(piece)) > PIECE // 4:  # not zeros, which occur everywhere
                pieces.write(piece)
        return encoded

    wire.encode = encode_and_note
    os._exit(run_peer(folder, me, run, data))


@click.command(help=__doc__)
def main() -> None:
    click.echo("| | bytes recorded | bytes sent | kinds | run id | digest | tensors |")
    click.echo("|---|---|---|---|---|---|---|")
    captures = {}
    for keyed in (False, True):
        with tempfile.TemporaryDirectory() as root:
            try:
                found = captures[keyed] = capture(Path(root), keyed)
            except PermissionError:
                raise click.ClickException("only root may record the loopback device") from None
        numbers = [
            found.size,
            found.sent,
            found.kinds,
            found.run_id,
            found.digest,
            f"{found.tensors} of {found.tensors_sent}",
        ]
        click.echo(f"| {'with' if keyed else 'without'} keys | " + " | ".join(map(str, numbers)) + " |")
    with_keys, without = captures[True], captures[False]
    if not (without.tensors == without.tensors_sent > 0 and without.kinds and without.run_id and without.digest):
        raise click.ClickException("not all traffic of the run without keys was recorded: nothing is shown")
    if with_keys.kinds or with_keys.run_id or with_keys.digest or with_keys.tensors:
        raise click.ClickException("the traffic of the run with keys is readable")


if __name__ == "__main__":
    main()
