"""Key files: permissions, damage, and folders per peer."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pfl.errors import KeysError
from p2pfl.run_folder.key_files import (
    Keys,
    check,
    peer_key_folder,
    private_file,
    public_keys,
    write_new,
    write_per_peer,
)

PAIRS = {peer: (bytes([peer + 1]) * 32, bytes([peer + 101]) * 32) for peer in range(3)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_new(tmp_path / "keys", PAIRS)
    return tmp_path / "keys"


def test_reads_the_keys_that_were_written(folder: Path) -> None:
    assert Keys.read(folder, 1, 3) == Keys(tuple(public for public, _ in PAIRS.values()), PAIRS[1][1])
    check(folder, 3, range(3))


def test_private_keys_are_accessible_to_their_owner_only(folder: Path) -> None:
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "public.yaml": 0o644 & ~_umask(),
        **{f"0{peer}.key": 0o600 for peer in range(3)},
    }
    assert folder.stat().st_mode & 0o777 == 0o700


def test_private_key_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
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


def test_private_key_is_not_printed(folder: Path) -> None:
    keys = Keys.read(folder, 1, 3)
    for text in (repr(keys), str(keys), f"{keys}"):
        assert PAIRS[1][1].hex() not in text
        assert repr(PAIRS[1][1]) not in text


def test_never_overwrites_keys(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeysError, match=r"keys: not empty; keys are never overwritten: choose a new folder"):
        write_new(folder, PAIRS)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_does_not_follow_a_symlink_in_place_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it was created after the check that the folder is empty."""
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "01.key").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    with pytest.raises(KeysError, match="cannot write keys: File exists"):
        write_new(tmp_path / "keys", PAIRS)
    assert not (tmp_path / "elsewhere").exists()


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeysError, match=r"file/keys: cannot write keys: Not a directory"):
        write_new(tmp_path / "file" / "keys", PAIRS)


def test_host_needs_only_the_private_keys_of_its_peers(folder: Path) -> None:
    private_file(folder, 1).unlink()
    check(folder, 3, [0, 2])
    with pytest.raises(
        KeysError, match=r"01\.key: not found; copy it to the host where peer 1 runs, or create one with `p2"
    ):
        check(folder, 3, [0, 1])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o660, 0o611])
def test_rejects_a_private_key_accessible_to_others(folder: Path, mode: int) -> None:
    path = private_file(folder, 2)
    path.chmod(mode)
    with pytest.raises(
        KeysError, match=rf"02\.key: mode {mode:04o} gives others access to this private key: chmod 600 {path}"
    ):
        Keys.read(folder, 2, 3)
    path.chmod(0o400)
    Keys.read(folder, 2, 3)


@pytest.mark.parametrize("content", ["", "secret", "ab" * 31, "ab" * 33, "AB" * 32, "ab" * 32 + "\n\n", "gg" * 32])
def test_damaged_private_key_error_does_not_quote_it(folder: Path, content: str) -> None:
    private_file(folder, 0).write_text(content)
    with pytest.raises(KeysError, match=r"00\.key: damaged: not a private key of 64 hex digits$") as caught:
        Keys.read(folder, 0, 3)
    assert not content or content not in str(caught.value)


def test_missing_and_unreadable_files_are_errors(folder: Path) -> None:
    private_file(folder, 0).unlink()
    private_file(folder, 0).mkdir(0o700)
    with pytest.raises(KeysError, match=r"00\.key: cannot be read: Is a directory"):
        Keys.read(folder, 0, 3)
    (folder / "public.yaml").write_bytes(b"\xff")
    with pytest.raises(KeysError, match=r"public\.yaml: damaged: not text"):
        public_keys(folder, 3)
    (folder / "public.yaml").unlink()
    with pytest.raises(KeysError, match=r"public\.yaml: not found; create it with `p2pfl keys new`"):
        public_keys(folder, 3)


def test_reads_public_keys_in_any_order_with_comments(folder: Path) -> None:
    first, second, third = (folder / "public.yaml").read_text().splitlines()
    quoted = f'{first[:3]}"{first[3:]}"'
    text = f"# host b\n{third}  # the fast host\n\n{quoted}\n{second}\n{first}\n"
    (folder / "public.yaml").write_text(text)
    assert public_keys(folder, 3) == tuple(public for public, _ in PAIRS.values())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0: abc", r"public\.yaml:1: should be `peer: 64 hex digits`"),
        ("one: " + "ab" * 32, r"public\.yaml:1: should be `peer: 64 hex digits`"),
        (f"0: {'ab' * 32}\n0: {'cd' * 32}", r"public\.yaml:2: peer 0 already has another key in a line above"),
        (f"0: {'ab' * 32}", r"public\.yaml: no key of peer 1, 2"),
        (f"0: {'ab' * 32}\n1: {'cd' * 32}\n2: {'AB' * 32}", r"public\.yaml: peers 0 and 2 have the same key; each"),
    ],
)
def test_rejects_invalid_public_keys(folder: Path, text: str, problem: str) -> None:
    (folder / "public.yaml").write_text(text)
    with pytest.raises(KeysError, match=problem):
        public_keys(folder, 3)


def test_public_keys_of_the_run_file_replace_those_in_the_folder(folder: Path) -> None:
    (folder / "public.yaml").unlink()
    given = {peer: public.hex() for peer, (public, _) in PAIRS.items()}
    assert Keys.read(folder, 1, 3, given).public == public_keys(folder, 3, given)
    with pytest.raises(KeysError, match=r"transport\.public_keys: no key of peer 3"):
        public_keys(folder, 4, given)


# ---- one folder per peer


def pairs() -> Iterator[tuple[bytes, bytes]]:
    return ((bytes([number]) * 32, bytes([number + 100]) * 32) for number in range(1, 100))


def test_peer_folders_have_one_private_key_and_all_public_keys(tmp_path: Path) -> None:
    write_per_peer(tmp_path, range(3), pairs().__next__)
    for peer in range(3):
        folder = peer_key_folder(tmp_path, peer)
        assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
            "public.yaml": 0o666 & ~_umask(),
            f"0{peer}.key": 0o600,
        }
        found = Keys.read(folder, peer, 3)
        assert found.public == tuple(bytes([number]) * 32 for number in (1, 2, 3))
        assert found.private == bytes([peer + 101]) * 32


def test_second_call_creates_only_missing_pairs(tmp_path: Path) -> None:
    source = pairs()
    write_per_peer(tmp_path, range(3), source.__next__)
    shutil.rmtree(peer_key_folder(tmp_path, 1))
    write_per_peer(tmp_path, range(3), source.__next__)
    found = [Keys.read(peer_key_folder(tmp_path, peer), peer, 3) for peer in range(3)]
    assert {keys.public for keys in found} == {tuple(bytes([number]) * 32 for number in (1, 4, 3))}
    assert [keys.private[0] for keys in found] == [101, 104, 103]


@pytest.mark.exhaustive
def test_next_call_completes_after_a_crash_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash anywhere, an existing private key still has its public key."""

    class Crash(BaseException):
        pass

    for steps in itertools.count():
        folder, source, left = tmp_path / str(steps), pairs(), iter(range(steps))
        with monkeypatch.context() as patch:
            for module, name in ((os, "fsync"), (os, "rename"), (os, "replace")):
                patch.setattr(module, name, crashing(getattr(module, name), left, Crash))
            try:
                write_per_peer(folder, range(2), source.__next__)
                finished = True
            except Crash:
                finished = False
        before = {path: path.read_bytes() for path in folder.glob("*/*.key")}
        write_per_peer(folder, range(2), source.__next__)
        found = [Keys.read(peer_key_folder(folder, peer), peer, 2) for peer in range(2)]
        assert len({keys.public for keys in found}) == 1
        for keys, public in zip(found, found[0].public, strict=True):
            assert keys.private[0] == public[0] + 100
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


def test_does_not_replace_a_private_key_without_its_public_key(tmp_path: Path) -> None:
    write_per_peer(tmp_path, range(2), pairs().__next__)
    (peer_key_folder(tmp_path, 1) / "public.yaml").write_text("")
    with pytest.raises(
        KeysError, match=r"01/01\.key: its public key is not in .*/01/public\.yaml; remove it for a new"
    ):
        write_per_peer(tmp_path, range(2), pairs().__next__)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_private_keys_belong_to_the_given_owner(tmp_path: Path) -> None:
    write_per_peer(tmp_path, range(2), pairs().__next__, owner=1234)
    assert {path.stat().st_uid for path in tmp_path.glob("*/*.key")} == {1234}
    assert {path.stat().st_uid for path in tmp_path.glob("*/public.yaml")} == {0}


def test_uncreatable_peer_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KeysError, match=r"file: cannot write keys: Not a directory"):
        write_per_peer(tmp_path / "file", range(2), pairs().__next__)
