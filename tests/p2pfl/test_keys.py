"""Keys on disk: whom a folder is good for, and everything that may be wrong with one."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import KeysError
from p2pfl.keys import Keys, apart, check, is_loopback, private_file, public_keys, write_apart, write_new

PAIRS = {peer: (bytes([peer + 1]) * 32, bytes([peer + 101]) * 32) for peer in range(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_new(tmp_path / "keys", PAIRS)
    return tmp_path / "keys"


def test_what_was_written_is_read(folder: Path) -> None:
    assert Keys.read(folder, 1, 3) == Keys(tuple(public for public, _ in PAIRS.values()), PAIRS[1][1])
    check(folder, 3, range(3))


def test_only_their_owner_may_read_private_keys(folder: Path) -> None:
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "public.yaml": 0o644 & ~_umask(),
        **{f"0{peer}.key": 0o600 for peer in range(3)},
    }
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_umask_that_is_wide_open_changes_nothing(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_new(tmp_path / "keys", PAIRS)
    finally:
        os.umask(before)
    assert private_file(tmp_path / "keys", 0).stat().st_mode & 0o777 == 0o600


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_private_key_does_not_show(folder: Path) -> None:
    keys = Keys.read(folder, 1, 3)
    for text in (repr(keys), str(keys), f"{keys}"):
        assert PAIRS[1][1].hex() not in text
        assert repr(PAIRS[1][1]) not in text


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeysError, match=r"keys: not empty; keys are not overwritten: give a new folder"):
        write_new(folder, PAIRS)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_link_that_waits_where_a_key_goes_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it was laid there after the look whether the folder is empty."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "01.key").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    with pytest.raises(KeysError, match="keys cannot be written there: File exists"):
        write_new(tmp_path / "keys", PAIRS)
    assert not (tmp_path / "elsewhere").exists()


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeysError, match=r"file/keys: keys cannot be written there: Not a directory"):
        write_new(tmp_path / "file" / "keys", PAIRS)


def test_a_host_needs_the_private_keys_of_its_own_peers_only(folder: Path) -> None:
    private_file(folder, 1).unlink()
    check(folder, 3, [0, 2])
    with pytest.raises(
        KeysError, match=r"01\.key: not there; copy it to the host where peer 1 runs, or make one: `p2"
    ):
        check(folder, 3, [0, 1])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o660, 0o611])
def test_a_private_key_that_others_can_reach_is_refused(folder: Path, mode: int) -> None:
    path = private_file(folder, 2)
    path.chmod(mode)
    with pytest.raises(
        KeysError, match=rf"02\.key: mode {mode:04o} lets others at this private key: chmod 600 {path}"
    ):
        Keys.read(folder, 2, 3)
    path.chmod(0o400)
    Keys.read(folder, 2, 3)


@pytest.mark.parametrize("content", ["", "secret", "ab" * 31, "ab" * 33, "AB" * 32, "ab" * 32 + "\n\n", "gg" * 32])
def test_a_damaged_private_key_is_named_and_not_shown(folder: Path, content: str) -> None:
    private_file(folder, 0).write_text(content)
    with pytest.raises(KeysError, match=r"00\.key: damaged: no private key of 64 hex digits$") as caught:
        Keys.read(folder, 0, 3)
    assert not content or content not in str(caught.value)


def test_files_that_are_none(folder: Path) -> None:
    private_file(folder, 0).unlink()
    private_file(folder, 0).mkdir(0o700)
    with pytest.raises(KeysError, match=r"00\.key: cannot be read: Is a directory"):
        Keys.read(folder, 0, 3)
    (folder / "public.yaml").write_bytes(b"\xff")
    with pytest.raises(KeysError, match=r"public\.yaml: damaged: not text"):
        public_keys(folder, 3)
    (folder / "public.yaml").unlink()
    with pytest.raises(KeysError, match=r"public\.yaml: not there; `p2pfl keys new` makes it"):
        public_keys(folder, 3)


def test_lines_of_several_hosts_in_any_order_with_remarks(folder: Path) -> None:
    first, second, third = (folder / "public.yaml").read_text().splitlines()
    quoted = f'{first[:3]}"{first[3:]}"'
    text = f"# host b\n{third}  # the fast one\n\n{quoted}\n{second}\n{first}\n"
    (folder / "public.yaml").write_text(text)
    assert public_keys(folder, 3) == tuple(public for public, _ in PAIRS.values())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0: abc", r"public\.yaml:1: should be `peer: 64 hex digits`"),
        ("one: " + "ab" * 32, r"public\.yaml:1: should be `peer: 64 hex digits`"),
        (f"0: {'ab' * 32}\n0: {'cd' * 32}", r"public\.yaml:2: another key of peer 0 stands above"),
        (f"0: {'ab' * 32}", r"public\.yaml: no key of peer 1, 2"),
        (f"0: {'ab' * 32}\n1: {'cd' * 32}\n2: {'AB' * 32}", r"public\.yaml: peers 0 and 2 have the same key; either"),
    ],
)
def test_public_keys_that_will_not_do(folder: Path, text: str, problem: str) -> None:
    (folder / "public.yaml").write_text(text)
    with pytest.raises(KeysError, match=problem):
        public_keys(folder, 3)


def test_public_keys_of_a_run_file_stand_for_those_in_the_folder(folder: Path) -> None:
    (folder / "public.yaml").unlink()
    given = {peer: public.hex() for peer, (public, _) in PAIRS.items()}
    assert Keys.read(folder, 1, 3, given).public == public_keys(folder, 3, given)
    with pytest.raises(KeysError, match=r"transport\.public_keys: no key of peer 3"):
        public_keys(folder, 4, given)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]", "lo"])
def test_hosts_that_are_heard_here_only(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "10.0.0.1", "::", "eth0", "localhost.example.org", "", "127.0.0.1.x"]
)
def test_hosts_that_may_be_heard_elsewhere(host: str) -> None:
    assert not is_loopback(host)


# ---- a folder for each peer


def pairs() -> Iterator[tuple[bytes, bytes]]:
    return ((bytes([number]) * 32, bytes([number + 100]) * 32) for number in range(1, 100))


def test_each_in_a_folder_of_its_own_knows_all(tmp_path: Path) -> None:
    write_apart(tmp_path, range(3), pairs().__next__)
    for peer in range(3):
        place = apart(tmp_path, peer)
        assert {path.name: path.stat().st_mode & 0o777 for path in place.iterdir()} == {
            "public.yaml": 0o666 & ~_umask(),
            f"0{peer}.key": 0o600,
        }
        found = Keys.read(place, peer, 3)
        assert found.public == tuple(bytes([number]) * 32 for number in (1, 2, 3))
        assert found.private == bytes([peer + 101]) * 32


def test_made_again_only_what_is_missing_is_made_and_told_to_all(tmp_path: Path) -> None:
    source = pairs()
    write_apart(tmp_path, range(3), source.__next__)
    shutil.rmtree(apart(tmp_path, 1))
    write_apart(tmp_path, range(3), source.__next__)
    found = [Keys.read(apart(tmp_path, peer), peer, 3) for peer in range(3)]
    assert {one.public for one in found} == {tuple(bytes([number]) * 32 for number in (1, 4, 3))}
    assert [one.private[0] for one in found] == [101, 104, 103]


def test_a_crash_at_any_point_leaves_what_the_next_run_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it stops, a private key that is there keeps its public one."""

    class Crash(BaseException):
        pass

    for steps in itertools.count():
        folder, source, left = tmp_path / str(steps), pairs(), iter(range(steps))
        with monkeypatch.context() as patch:
            for module, name in ((os, "fsync"), (os, "rename"), (os, "replace")):
                patch.setattr(module, name, crashing(getattr(module, name), left, Crash))
            try:
                write_apart(folder, range(2), source.__next__)
                finished = True
            except Crash:
                finished = False
        before = {path: path.read_bytes() for path in folder.glob("*/*.key")}
        write_apart(folder, range(2), source.__next__)
        found = [Keys.read(apart(folder, peer), peer, 2) for peer in range(2)]
        assert len({one.public for one in found}) == 1
        for one, public in zip(found, found[0].public, strict=True):
            assert one.private[0] == public[0] + 100
        assert {path: path.read_bytes() for path in before} == before
        if finished:
            break
    assert steps > 8


def crashing(function: Any, left: Iterator[int], crash: type[BaseException]) -> Any:
    def call(*arguments: Any, **named: Any) -> Any:
        if next(left, None) is None:
            raise crash
        return function(*arguments, **named)

    return call


def test_a_private_key_that_lost_its_public_one_is_not_replaced(tmp_path: Path) -> None:
    write_apart(tmp_path, range(2), pairs().__next__)
    (apart(tmp_path, 1) / "public.yaml").write_text("")
    with pytest.raises(
        KeysError, match=r"01/01\.key: its public key is not in .*/01/public\.yaml; remove it for a new"
    ):
        write_apart(tmp_path, range(2), pairs().__next__)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_private_keys_go_to_who_shall_own_them(tmp_path: Path) -> None:
    write_apart(tmp_path, range(2), pairs().__next__, owner=1234)
    assert {path.stat().st_uid for path in tmp_path.glob("*/*.key")} == {1234}
    assert {path.stat().st_uid for path in tmp_path.glob("*/public.yaml")} == {0}


def test_a_place_where_no_folder_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeysError, match=r"file: keys cannot be written there: Not a directory"):
        write_apart(tmp_path / "file", range(2), pairs().__next__)
