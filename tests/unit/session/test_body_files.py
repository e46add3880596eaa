"""Bodies in files: what is written is never changed, and a reader maps it in place."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pfl.errors import WriteError
from p2pfl.messaging import wire
from p2pfl.messaging.journal import Journal, Place
from p2pfl.session.body_files import MAX_PARTS, SEGMENT, FileStore, NeighborJournals
from tests.bodies import Block, Named


def encoded(number: float, length: int = 40) -> wire.Encoded:
    return wire.encode(Block(torch.full((length,), float(number))))


def raw(body: wire.Encoded) -> bytes:
    return b"".join(map(bytes, body.parts()))


def segments(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def readers(folder: Path) -> NeighborJournals:
    """Reads any neighbor's journal in ``folder``."""
    return NeighborJournals("token-own", lambda peer: folder)


# ---- FileStore


def test_small_bodies_share_a_segment_and_large_ones_end_it(folder: Path) -> None:
    store = FileStore(folder)
    bodies = [encoded(1), encoded(2, 3), encoded(3, SEGMENT // 4), encoded(4)]
    places = [store.write(body) for body in bodies]
    first = places[0].segment
    assert places == [Place(first, 0), Place(first, 192), Place(first, 256), Place(first + 1, 0)]
    assert segments(folder) == {first, first + 1}
    for place, body in zip(places, bodies, strict=True):
        assert bytes(store.read(place, 0, body.size)) == raw(body)
        assert bytes(store.read(place, 5, 3)) == raw(body)[5:8]


def test_a_body_with_more_tensors_than_one_system_call_takes(folder: Path) -> None:
    body = wire.encode(Named({f"{n}": torch.full((n % 7 + 1,), float(n)) for n in range(2 * MAX_PARTS + 3)}))
    store = FileStore(folder)
    assert bytes(store.read(store.write(body), 0, body.size)) == raw(body)


def test_a_partial_write_is_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, [parts[0][:7]], at))
    store, body = FileStore(folder), wire.encode(Named({"a": torch.ones(9), "b": torch.zeros(3)}))
    assert bytes(store.read(store.write(body), 0, body.size)) == raw(body)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, None])
def test_a_large_body_is_written_where_space_cannot_be_allocated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """None: in builds of Python without the function."""

    def refuse(file: int, at: int, size: int) -> None:
        assert number is not None
        raise OSError(number, os.strerror(number))

    if number is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    store, body = FileStore(folder), encoded(3, SEGMENT // 4)
    assert bytes(store.read(store.write(body), 0, body.size)) == raw(body)


def test_a_restart_deletes_orphans_and_uses_no_number_again(folder: Path) -> None:
    """R11."""
    used: set[int] = set()
    for _ in range(3):
        store = FileStore(folder)
        assert store.restore(()) == segments(folder) == set()
        kept, orphan, gone = (store.write(encoded(n, SEGMENT // 4)).segment for n in range(3))
        assert not used & {kept, orphan, gone}
        used |= {kept, orphan, gone}
        store.release(gone)
        assert FileStore(folder).restore([kept, gone]) == segments(folder) == {kept}


def test_a_truncated_and_a_missing_segment_raise_os_error(folder: Path, readers: NeighborJournals) -> None:
    """R10."""
    journal = Journal([1], store := FileStore(folder))
    place = journal.append(encoded(1), [1]).place
    assert place is not None
    state = journal.state_dict(before=1)
    path = folder / str(place.segment)
    os.truncate(path, 100)
    assert "entry 0 of round 0 in the journal: " in Journal([1], FileStore(folder)).damaged(state)
    with pytest.raises(OSError, match="truncated"):
        store.read(place, 0, 160)
    with pytest.raises(OSError, match="not as large as announced"):
        readers.open_body(1, place.segment, 0, 160)
    path.unlink()
    for read in (lambda: store.read(place, 0, 160), lambda: readers.open_body(1, place.segment, 0, 160)):
        with pytest.raises(FileNotFoundError):
            read()
    store.release(place.segment)  # without an error
    store.sync([place.segment])


def test_a_full_disk_raises_a_write_error_that_names_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    store = FileStore(folder)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(WriteError, match=f"{folder}/{store.current}.*No space left on device"):
        store.write(encoded(1))
    monkeypatch.undo()
    place = store.write(encoded(2))  # nothing of the failed body is in the way
    assert bytes(store.read(place, 0, 160)) == raw(encoded(2))
    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(WriteError, match="No space left"):
        store.sync([place.segment])


# ---- NeighborJournals


def test_only_a_token_in_the_neighbors_folder_of_this_host_opens_it(folder: Path, readers: NeighborJournals) -> None:
    old, token, boot = FileStore(folder).token, FileStore(folder).token, readers.own[0]
    (folder / "other").touch()
    (folder.parent / "token-outside").touch()
    assert readers.can_open(1, boot, token)
    for claimed, name in (
        (f"{boot}x", token),
        ("", token),
        (boot, old),
        (boot, "other"),
        (boot, "token-/../../token-outside"),
        (boot, f"token-\0{token}"),
        (boot, str(folder / token)),
        (boot, ""),
    ):
        assert not readers.can_open(1, claimed, name), name


@pytest.mark.exhaustive
def test_a_mapping_is_private_to_its_reader_and_lives_as_long_as_its_last_tensor(
    folder: Path, readers: NeighborJournals
) -> None:
    """R12."""
    store = FileStore(folder)
    store.write(encoded(0, 3))
    place = store.write(encoded(1))
    path = folder / str(place.segment)

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    before = path.read_bytes()
    ours, others = (readers.open_body(1, place.segment, place.at, 160).view(torch.float32) for _ in range(2))
    assert ours.data_ptr() % 64 == 0
    ours.add_(1.0)
    assert (ours.tolist(), others.tolist()) == ([2.0] * 40, [1.0] * 40)
    assert path.read_bytes() == before
    row = ours[3:5]
    del ours, others
    store.release(place.segment)
    gc.collect()
    assert mapped()
    assert row.tolist() == [2.0, 2.0]  # though the file was deleted
    del row
    gc.collect()
    assert not mapped()


@pytest.mark.parametrize(("at", "size"), [(0, 4097), (64, 160), (1, 8), (0, 1 << 50), (1 << 50, 64)])
def test_a_reference_that_does_not_fit_the_file_is_an_os_error(
    folder: Path, readers: NeighborJournals, at: int, size: int
) -> None:
    place = FileStore(folder).write(encoded(1))
    with pytest.raises(OSError, match="not as large as announced"):
        readers.open_body(1, place.segment, at, size)


def test_a_named_pipe_is_no_body(folder: Path, readers: NeighborJournals) -> None:
    folder.mkdir()
    os.mkfifo(folder / "1")
    with pytest.raises(OSError, match="not as large"):
        readers.open_body(1, 1, 0, 100)
