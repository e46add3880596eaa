"""The order file: which bodies the rounds of a peer take that do not wait for one another (messaging/newest.py).

    {"boot": "3f0c…"}                                   boot id of the host, at each start of the peer
    {"t": 12, "kind": "Parameters", "rounds": {"3": [11], "5": [13], "8": []}}  of peers 3 and 5; peer 8 had sent none

A line is written before anything that depends on it is sent, but not synchronized with the disk: it survives the end
of the process, however it ends, but perhaps not a power cut.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from p2pfl import PeerId
from p2pfl.errors import RunFolderError
from p2pfl.messaging.mailbox import Mailbox
from p2pfl.messaging.newest import NewestMailbox, Take
from p2pfl.run_folder.files import append_line, read_lines
from p2pfl.run_folder.folder import PeerFolder
from p2pfl.run_folder.replay import order_of
from p2pfl.session.body_files import boot_id


def make_mailbox(
    senders: Iterable[PeerId],
    staleness: float | None,
    once: Collection[str],
    folder: PeerFolder | None,
    log: logging.Logger,
) -> Mailbox:
    """Return the mailbox of a peer, which records its order in the folder.

    Args:
        staleness: as in ``NewestMailbox``; None if rounds wait for one another.
        once: the kinds whose bodies count once.
    """
    if staleness is None:
        return Mailbox(senders)

    def record(take: Take) -> None:
        if folder is not None:
            rounds = {sender: list(each) for sender, each in take.rounds.items()}
            line = {"t": take.t, "kind": take.kind, "rounds": rounds}
            append_line(order_of(folder), json.dumps(line))

    def on_lost(take: Take, sender: PeerId) -> None:
        text = "order not repeated t=%d kind=%s peer=%d taken=%s: the neighbor has deleted what was taken before"
        log.warning(text, take.t, take.kind, sender, list(take.rounds[sender]))

    return NewestMailbox(senders, staleness, once, record, on_lost)


def repeat_order(mailbox: Mailbox, folder: PeerFolder, begin: int, log: logging.Logger) -> None:
    """Have the rounds from ``begin`` on take what the order file says. Raises RunFolderError, WriteError."""
    if not isinstance(mailbox, NewestMailbox):
        return
    lines = read_lines(order_of(folder))
    mailbox.repeat(take for take in takes(lines) if take.t >= begin)
    boots = [line["boot"] for line in lines if "boot" in line]
    if boots and boots[-1] != boot_id():
        log.warning("host restarted: the order of the last rounds may be lost, and their results may differ")
    append_line(order_of(folder), json.dumps({"boot": boot_id()}))


def takes(lines: Iterable[Mapping[str, Any]]) -> Iterator[Take]:
    """Yield the takes in an order file. Raises RunFolderError."""
    for line in lines:
        if "t" in line:
            if not all(isinstance(rounds, list) for rounds in line["rounds"].values()):
                raise RunFolderError("order.jsonl is of an earlier version of p2pfl: use that one for this run")
            yield Take(line["t"], line["kind"], {int(peer): t for peer, t in line["rounds"].items()})
