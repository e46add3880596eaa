"""Runs with keys, and what their logs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2pfl.run_folder.key_files import Keys, write_new
from p2pfl.simulation.simulate import simulate
from peers.keys import new_pair
from tests.sockets.raw_peer import REFUSED


def test_keys_do_not_change_the_result(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    write_new(tmp_path / "keys", {peer: new_pair() for peer in range(4)})
    run = make_run(transport={"keys": str(tmp_path / "keys")}, chaos={"link": {"jitter": 0.02}})
    folder = prepare(tmp_path / "run", run)
    assert set(warm.run(folder).values()) == {0}
    for files, expected in zip(folder.peers(), simulate(make_run()), strict=True):
        result = files.result()
        assert (result.digest, result.sent, result.received) == (expected.digest, expected.sent, expected.received)
        # On a busy host handshakes may time out; the connections are made again.
        messages = [line for line in files.log.read_text().splitlines() if not REFUSED.search(line)]
        assert not any("refused" in line for line in messages)
        assert "encrypted (CURVE)" in files.log.read_text()
        assert "insecure" not in files.log.read_text()
    secrets = [(tmp_path / "keys" / f"0{peer}.key").read_text().strip() for peer in range(4)]
    for path in (path for path in folder.root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in content, path
            assert bytes.fromhex(secret) not in content, path


def test_peer_fails_if_its_private_key_is_readable_by_others(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    write_new(tmp_path / "keys", {peer: new_pair() for peer in range(2)})
    (tmp_path / "keys" / "01.key").chmod(0o644)
    folder = prepare(tmp_path / "run", make_run(peers=2, transport={"keys": str(tmp_path / "keys"), "give_up": 1}))
    pids = warm.start(folder, [1])
    assert warm.wait(pids) == {1: 1}
    assert folder.peer(1).status().phase == "failed"
    assert "01.key: mode 0644 gives others access to this private key" in folder.peer(1).log.read_text()


def test_logs_that_a_run_is_insecure(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    run = make_run(peers=2, rounds=1, transport={"host": "0.0.0.0", "insecure": True})
    folder = prepare(tmp_path / "run", run)
    assert set(warm.run(folder).values()) == {0}
    for files in folder.peers():
        assert "insecure address=tcp://0.0.0.0:" in files.log.read_text()
        assert "encrypted" not in files.log.read_text()


def test_private_key_is_not_in_its_repr() -> None:
    """So that it ends up in no log by mistake."""
    keys = Keys((b"\x02" * 32,), b"\x01" * 32)
    for text in (repr(keys), f"{keys}", f"{keys!r:>10}"):
        assert "01" * 32 not in text
        assert "\\x01" not in text
