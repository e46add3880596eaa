"""``p2pfl launch FILE --backend ssh --hosts hosts.yaml``: hosts without a scheduler, one ssh connection each.

Keys must let ssh in without a password (BatchMode).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Self

from launcher.backends.hosts import BackendOptions, Host, HostStream, stream_of
from launcher.backends.ssh.hosts_file import read_hosts
from launcher.errors import LaunchError

SSH = (
    "ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15",
    "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""A host that does not answer for a minute counts as lost. These precede, and override, the user's configuration."""


class Ssh:
    """Starts a host process by ssh. ``options``: further options of ssh by host."""

    reads = ("--hosts",)

    def __init__(self, hosts: Sequence[Host], options: Mapping[str, Sequence[str]]) -> None:
        self._hosts = list(hosts)
        self._options = {name: list(given) for name, given in options.items()}

    @classmethod
    def make(cls, options: BackendOptions) -> Self:
        """Read the hosts file. Raises LaunchError."""
        if options.hosts is None:
            raise LaunchError("--backend ssh needs --hosts FILE, a YAML list of hosts")
        return cls(*read_hosts(options.hosts))

    @classmethod
    def restore(cls, saved: Mapping[str, Any]) -> Self:
        return cls([], saved["ssh"])

    def hosts(self) -> list[Host]:
        return self._hosts

    def start(self, host: Host, command: Sequence[str]) -> HostStream:
        options = self._options.get(host.name, [])
        return stream_of([*SSH, *options, "--", host.name, f"exec {shlex.join(command)}"])

    def saved(self) -> dict[str, Any]:
        return {"ssh": self._options}

    def close(self) -> None:
        """Nothing: the connections end with their streams."""
