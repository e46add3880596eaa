"""Delivery between the peers of one process."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2pfl.messaging.conversation import Conversation
from p2pfl.messaging.endpoint import Endpoint
from p2pfl.messaging.journal import Journal, JournalEntry
from p2pfl.messaging.neighborhood import Neighborhood
from p2pfl.messaging.schema import Body, Layout
from p2pfl.session.body_files import FileStore
from p2pfl.simulation.local_link import MAPPED, LocalHub
from p2pfl.simulation.replaying_hub import ReplayingHub
from tests.bodies import RUN_ID, complete


@dataclass(frozen=True)
class Numbers(Body):
    values: Tensor


def joined(hub: LocalHub, size: int, files: ExitStack, folder: Path | None) -> list[Endpoint]:
    """Return three endpoints that have begun round 0; their journals are in files if there is a folder."""
    for me in range(3):
        store = files.enter_context(closing(FileStore(folder / f"journal-{me}"))) if folder else None
        conversation = Conversation([Layout.of(Numbers(torch.zeros(size)))])
        hub.join(Endpoint(Neighborhood(me, complete(3)), RUN_ID, conversation, store=store))
    for endpoint in hub.endpoints.values():
        endpoint.open(0)
        endpoint.begin(0)
    return list(hub.endpoints.values())


@pytest.mark.parametrize("size", [3, MAPPED // 4], ids=["small", "large"])
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_a_receiver_may_modify_its_body_alone(size: int, in_files: bool, tmp_path: Path) -> None:
    sent = torch.arange(size, dtype=torch.float32)

    async def exchange(sender: Endpoint, *receivers: Endpoint) -> list[Tensor]:
        await sender.send([receiver.me for receiver in receivers], Numbers(sent))
        taken = [(await receiver.take("Numbers", [sender.me], 0))[sender.me].body for receiver in receivers]
        return [body.values for body in taken if isinstance(body, Numbers)]

    with ExitStack() as files:
        hub = ReplayingHub() if in_files else LocalHub()
        endpoints = joined(hub, size, files, tmp_path if in_files else None)
        one, other = asyncio.run(exchange(*endpoints))
        one.fill_(-1.0)
        assert torch.equal(other, sent)
        assert torch.equal(sent, torch.arange(size, dtype=torch.float32))
        assert (one.data_ptr() % 64, other.data_ptr() % 64) == (0, 0)


@pytest.mark.parametrize("value", [float("nan"), 1e9])
def test_every_receiver_drops_a_body_that_has_diverged(value: float) -> None:
    async def exchange(sender: Endpoint, *receivers: Endpoint) -> list[list[int]]:
        await sender.send([receiver.me for receiver in receivers], Numbers(torch.tensor([0.0, value, 0.0])))
        return [list(await receiver.take("Numbers", [sender.me], 0)) for receiver in receivers]

    with ExitStack() as files:
        endpoints = joined(LocalHub(), 3, files, None)
        assert asyncio.run(exchange(*endpoints)) == [[], []]
        assert [endpoint.missing for endpoint in endpoints] == [{}, {"Numbers": [0]}, {"Numbers": [0]}]


def test_without_descriptors_left_a_receiver_gets_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, mapped = torch.arange(MAPPED // 4, dtype=torch.float32), Journal.map

    def fail_after_the_first(journal: Journal, entry: JournalEntry) -> Tensor | None:
        monkeypatch.setattr(Journal, "map", out_of_descriptors)
        return mapped(journal, entry)

    def out_of_descriptors(journal: Journal, entry: JournalEntry) -> Tensor | None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def exchange(sender: Endpoint, *receivers: Endpoint) -> list[Body]:
        monkeypatch.setattr(Journal, "map", fail_after_the_first)
        await sender.send([receiver.me for receiver in receivers], Numbers(sent))
        return [(await receiver.take("Numbers", [sender.me], 0))[sender.me].body for receiver in receivers]

    with ExitStack() as files:
        endpoints = joined(LocalHub(), MAPPED // 4, files, None)
        for body in asyncio.run(exchange(*endpoints)):
            assert isinstance(body, Numbers)
            assert torch.equal(body.values, sent)
