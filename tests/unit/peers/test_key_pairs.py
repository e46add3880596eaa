"""Key pairs that ZeroMQ accepts, and private keys that do not match."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from p2pfl.errors import KeysError
from p2pfl.run_folder.key_files import write_new
from peers.keys import main, new_pair, read_keys


def test_new_key_pairs_match() -> None:
    public, private = new_pair()
    assert z85.decode(zmq.curve_public(z85.encode(private))) == public
    assert new_pair() != (public, private)


def test_rejects_a_private_key_that_does_not_match(tmp_path: Path) -> None:
    pairs = {peer: new_pair() for peer in range(2)}
    write_new(tmp_path / "keys", pairs)
    assert read_keys(tmp_path / "keys", 1, 2).private == pairs[1][1]
    (tmp_path / "keys" / "01.key").write_text(new_pair()[1].hex())
    begin = pairs[1][0].hex()[:12]
    with pytest.raises(KeysError, match=rf"01\.key: does not match public key {begin}… of peer 1"):
        read_keys(tmp_path / "keys", 1, 2)
    read_keys(tmp_path / "keys", 0, 2)


def test_reports_errors_of_key_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").write_text("")
    assert main([str(tmp_path / "full"), "0"]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/full: cannot write keys: File exists\n"
