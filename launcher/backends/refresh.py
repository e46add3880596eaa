"""Connect to the hosts of a run without starting peers, e.g. because its launcher has ended."""

from __future__ import annotations

from launcher.backends import hosts as backends
from launcher.backends.host_connection import Files, this_version
from launcher.backends.host_files import token
from launcher.backends.host_group import HostGroup
from launcher.errors import HostsGone
from launcher.facts.host_state import HostState
from p2pfl import PeerId
from p2pfl.run_folder.folder import RunFolder


def refresh(folder: RunFolder) -> None:
    """Fetch the files of a run whose launcher has ended, and what runs on its hosts. Raises LaunchError, WriteError.

    Does nothing if a launcher follows the run: then the files are up to date.
    """
    state = HostState.read(folder.root)
    if state is None or not state.running or state.answers(folder.root):
        return
    try:
        with look(folder) as group:
            replace_state(folder, state, group)
    except HostsGone:
        replace_state(folder, state)


def look(folder: RunFolder) -> HostGroup:
    """Connect to the hosts of a run, with what they report written into the folder."""
    backend, hosts = backends.restore(folder.info["hosts"]), backends.hosts_from(folder)
    neighbors: list[tuple[PeerId, ...]] = [()] * len(list(folder.peers()))
    files = Files(folder, token(folder), {}, {}, lambda *given: [], lambda host: 0, neighbors, copied=True)
    group = HostGroup(backend, hosts, this_version())
    try:
        group.connect()
        group.open(hosts, files, probe=False, load=False)
        group.sync()
    except BaseException:
        group.close()
        raise
    return group


def replace_state(folder: RunFolder, seen: HostState, group: HostGroup | None = None) -> None:
    """Write down what runs on the hosts, unless another launcher has begun since the state ``seen``."""
    if HostState.read(folder.root) == seen:
        running = {} if group is None else {peer: group.host_of(peer) for peer in group.running}
        HostState(running=running).write(folder.root)
