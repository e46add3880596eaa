"""Checks before peers start: free ports, and the run file that the run began with."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from launcher.backends.checks import check_ports, check_unchanged
from launcher.errors import LaunchError
from p2pfl.errors import RunFileError
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.run_folder.new_run import write_run
from p2pfl.run_folder.run_info import describe_run


def test_a_port_in_use_is_named_before_any_peer_starts(make_run: Any) -> None:
    host = "127.3.2.1"  # no other test's sockets have the ports beside this one
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        run = make_run(transport={"host": host, "port": port - 2})
        expected = rf"transport\.port: port {port} of peer 2 is in use; stop the process that listens"
        with pytest.raises(RunFileError, match=expected):
            check_ports(run, range(run.peers))
        check_ports(run, [0, 1, 3])
    check_ports(make_run(), range(4))


def test_a_port_that_needs_a_privilege_is_not_called_in_use(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: object, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", deny)
    with pytest.raises(RunFileError, match=r"transport\.port: port 80 of peer 0 needs a privilege .* choose 1024 or"):
        check_ports(make_run(transport={"port": 80}), range(4))


@pytest.mark.parametrize("port", [None, 40000])
def test_a_host_of_another_computer_is_named_before_any_peer_starts(make_run: Any, port: int | None) -> None:
    run = make_run(transport={"host": "192.0.2.1", "port": port, "insecure": True})
    with pytest.raises(RunFileError, match=r"transport\.host: 192\.0\.2\.1 is not an address of this host; give one"):
        check_ports(run, range(4))


@pytest.mark.parametrize("host", ["lo", "*"])
def test_an_interface_is_not_checked(make_run: Any, host: str) -> None:
    check_ports(make_run(transport={"host": host, "insecure": True}), range(4))


def test_a_run_file_that_was_changed_is_not_resumed(make_run: Any, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", range(4))
    run = make_run()
    write_run(folder, run)
    folder.write_info(describe_run(run, "0" * 16))
    check_unchanged(load(folder.run_file), folder)
    text = folder.run_file.read_text()
    assert "batch: 16" in text
    folder.run_file.write_text(text.replace("batch: 16", "batch: 8"))
    changed = r"run\.yaml: changed since the run began{}, .*; undo the changes, or"
    with pytest.raises(LaunchError, match=changed.format(r" \(algorithm\.batch was 16, is 8\)")):
        check_unchanged(load(folder.run_file), folder)
    folder.write_info({key: value for key, value in folder.info.items() if key != "settings"})  # earlier versions
    with pytest.raises(LaunchError, match=changed.format("")):
        check_unchanged(load(folder.run_file), folder)
    folder.write_info({**folder.info, "versions": {"p2pfl-mesh": "0.0"}})  # whose run file had other keys
    check_unchanged(load(folder.run_file), folder)
