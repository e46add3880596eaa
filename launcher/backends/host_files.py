"""What hosts get of a run: its files, the keys of their peers, and changes to the run file."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.backends.group import Plan
from launcher.backends.host_connection import Files
from launcher.backends.hosts import Host
from p2pfl import PeerId
from p2pfl.errors import KeysError
from p2pfl.run_file.addresses import is_ipv6, is_loopback, join
from p2pfl.run_folder.files import read_json, write_errors, write_json
from p2pfl.run_folder.folder import PLUGINS, RunFolder
from p2pfl.run_folder.key_files import PUBLIC, private_file

TOKEN = ".launcher"
"""A file that tells a host process whether it has the launcher's run folder; see peers/host.py."""
KEYS = "keys"
"""Folder in the run folder for keys that the launcher makes, and for the keys that a host gets."""


def token(folder: RunFolder) -> str:
    """Return the token of a run folder, by which a host process recognizes it."""
    found: str | None = (read_json(folder.root / TOKEN) or {}).get("token")
    if found is None:
        found = secrets.token_hex(16)
        write_json(folder.root / TOKEN, {"token": found})
    return found


def files_of(folder: RunFolder, plan: Plan, hosts: Sequence[Host], addresses: Mapping[str, str]) -> Files:
    """Collect what the hosts need of a run."""
    from p2pfl.paths import FILES  # imports pydantic

    keys = plan.keys or (None if plan.insecure else _make_keys(folder, plan.peers))
    common = {
        str(path.relative_to(folder.root)): (path.read_bytes(), 0o644)
        for entry in (folder.run_file, folder.root / "run.json", folder.root / PLUGINS, folder.root / FILES)
        for path in ([entry] if entry.is_file() else sorted(entry.rglob("*")))
        if path.is_file()
    }
    private: dict[PeerId, dict[str, tuple[bytes, int]]] = {}
    if keys is not None:
        if (Path(keys) / PUBLIC).is_file():
            common[f"{KEYS}/{PUBLIC}"] = (Path(keys) / PUBLIC).read_bytes(), 0o644
        for peer in range(plan.peers):
            path = private_file(Path(keys), peer)
            private[peer] = {f"{KEYS}/{path.name}": (path.read_bytes(), 0o600)}

    def sets(host: Host, address: str, root: str, shared: bool) -> list[str]:
        changes: dict[str, Any] = {}
        if is_loopback(plan.bind):
            changes["transport.host"] = "::" if is_ipv6(address) else "0.0.0.0"
        if not plan.has_addresses and plan.port is None:
            changes["transport.address"] = join(address, "{port}")
        elif not plan.has_addresses:  # then every peer's address is known before it starts
            changes["transport.hosts"] = {str(peer): addresses[other.name] for other in hosts for peer in other.peers}
        if keys is not None:
            changes["transport.keys"] = keys if shared else f"{root}/{KEYS}"
        if host.slots is not None:
            changes["slots"] = host.slots
        elif host.cores is not None and plan.slots is None:
            changes["slots"] = max(1, host.cores // plan.threads)
        return [f"{key}={json.dumps(value)}" for key, value in changes.items()]

    def port(host: Host) -> int:
        return 0 if plan.port is None else plan.port + min(host.peers)

    return Files(folder, token(folder), common, private, sets, port, plan.neighbors, plan.copied)


def _make_keys(folder: RunFolder, peers: int) -> str:
    """Make keys for all peers, unless that was done before: other hosts can reach the peers."""
    target = folder.root / KEYS
    if not target.is_dir():
        new = target.with_name(f".{KEYS}.new")  # complete, or not there
        with write_errors(target):
            if new.is_dir():
                shutil.rmtree(new)
        command = [sys.executable, "-P", "-m", "peers.keys", str(new), *map(str, range(peers))]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise KeysError(done.stderr.strip().removeprefix("error: "))
        with write_errors(target):
            new.rename(target)
    return str(target)
