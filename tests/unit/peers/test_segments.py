"""Files of a journal: crashes, damage, and what is not a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from p2pfl.messaging import wire
from p2pfl.messaging.journal import Journal
from peers.journal_files import SEGMENT, FileStore, NeighborJournals
from tests.bodies import Block


def test_a_segment_written_after_two_crashes_is_not_taken_for_one_of_the_checkpoint(tmp_path: Path) -> None:
    body = wire.encode(Block(torch.zeros(SEGMENT // 4)))

    def restart() -> Journal:
        return Journal([1], FileStore(tmp_path / "journal"))

    journal = restart()
    journal.begin(0)
    in_checkpoint = journal.append(body, [1]).place
    checkpoint = journal.state_dict(before=1)
    journal.begin(1)
    journal.append(body, [1])
    journal.drop(1, before=1)  # the neighbor has round 0 in its checkpoints: its segment is deleted
    for _ in range(2):  # crashes before anything else is written
        journal = restart()
        journal.load_state_dict(checkpoint)
    journal.begin(1)
    assert in_checkpoint is not None
    place = journal.append(body, [1]).place
    assert place is not None
    assert place.segment != in_checkpoint.segment


def test_a_checkpoint_fails_if_a_sent_message_cannot_be_read(tmp_path: Path) -> None:
    journal = Journal([1], FileStore(tmp_path))
    place = journal.append(wire.encode(Block(torch.zeros(SEGMENT // 4))), [1]).place
    assert place is not None
    os.truncate(tmp_path / str(place.segment), 100)
    with pytest.raises(OSError, match="truncated"):
        journal.state_dict(before=1)


def test_a_checkpoint_omits_messages_that_were_released_while_it_is_written(tmp_path: Path) -> None:
    journal = Journal([1])
    place = journal.append(wire.encode(Block(torch.zeros(10))), [1]).place
    assert place is not None
    journal.store.release(place.segment)
    assert journal.state_dict(before=1)["entries"] == []


def test_a_named_pipe_is_no_body(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1")
    with pytest.raises(OSError, match="not as large"):
        NeighborJournals("", lambda peer: tmp_path).open_body(1, 1, 0, 100)
