"""Launch, resume and stop runs on several hosts, with any backend (launcher/backends/hosts.py)."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from launcher import formatting
from launcher.backends import hosts as backends
from launcher.backends.checks import check_start, check_unchanged
from launcher.backends.follow import Restart, follow
from launcher.backends.host_connection import Files
from launcher.backends.host_group import HostGroup
from launcher.backends.hosts import Backend, BackendOptions, Host
from launcher.backends.named_files import copy_named_files
from launcher.backends.remote_processes import Remote
from launcher.child import in_child
from launcher.errors import HostsGone, LaunchError
from launcher.facts.host_state import POLL_INTERVAL, HostState, ask, starting
from launcher.facts.processes import outcome
from launcher.facts.registration import Requests, launcher_title
from launcher.facts.summary import Summary, measured_seconds, summarize
from launcher.prepare import LaunchRequest
from launcher.tracking.processes import tracking
from launcher.views.progress import print_run_path
from launcher.watching import Watching
from p2pfl import PeerId
from p2pfl.errors import KeysError, RunFolderError
from p2pfl.process_title import set_title
from p2pfl.run_file.addresses import is_ipv6, is_loopback, join
from p2pfl.run_folder.files import read_json, write_errors, write_json
from p2pfl.run_folder.folder import PLUGINS, RunFolder
from p2pfl.run_folder.key_files import PUBLIC, private_file

if TYPE_CHECKING:
    from p2pfl.run_file.run import Run

TOKEN = ".launcher"
"""A file that tells a host process whether it has the launcher's run folder; see peers/host.py."""
KEYS = "keys"
"""Folder in the run folder for keys that the launcher makes, and for those handed out to a host."""


@dataclass(frozen=True)
class Settings:
    """What this process keeps of a Run, which refers to torch."""

    peers: int
    rounds: int
    neighbors: tuple[tuple[PeerId, ...], ...]
    bind: str
    port: int | None
    has_addresses: bool
    keys: str | None
    insecure: bool
    copied: bool
    slots: int | None
    threads: int

    @classmethod
    def of(cls, run: Run) -> Settings:
        transport = run.file.transport
        return cls(
            peers=run.peers,
            rounds=run.rounds,
            neighbors=run.topology.neighbors,
            bind=transport.host,
            port=transport.port,
            has_addresses=bool(transport.address or transport.hosts),
            keys=None if transport.keys is None else str(Path(transport.keys).absolute()),
            insecure=transport.insecure,
            copied=run.file.checkpoint_copies is not None,
            slots=run.file.slots,
            threads=run.file.threads,
        )


def launch(
    name: str,
    options: BackendOptions,
    request: LaunchRequest,
    console: Console,
    restart: Restart = "on-failure",
    watching: Watching = Watching(),
    host_dir: str | None = None,
) -> tuple[RunFolder, Summary]:
    """Create a run and run it on the hosts of a backend."""

    def prepare() -> tuple[RunFolder, Settings, list[str]]:
        run = request.load()
        check_start(run, range(run.peers), here=False)
        folder = request.prepare(run, here=False)
        return folder, Settings.of(run), copy_named_files(folder, run)

    if unknown := [field for field in re.findall(r"{.*?}", host_dir or "") if field != "{host}"]:
        raise LaunchError(f"--host-dir {host_dir}: unknown {unknown[0]}; {{host}} is replaced by the host's name")
    backend = backends.make(name, options)
    with HostGroup(backend, backend.hosts(), _this_version(), keep_trying=restart == "always") as group:
        found = group.connect()  # before there is a folder, since most problems appear here
        folder, settings, left_out = in_child(prepare)
        for line in left_out:
            console.print(line, soft_wrap=True)
        with starting(folder.root) as requests:
            placed = backends.place(settings.peers, found, group.cores)
            if host_dir is not None:
                placed = [replace(host, folder=_folder_on(host, host_dir, folder)) for host in placed]
            backends.save(folder, backend, placed)
            for host in placed:
                console.print(f"host {host.name}: peers {formatting.ids(host.peers, most=6)}", soft_wrap=True)
            group.open(placed, _files(folder, settings, placed, group.addresses))
        return folder, _follow(group, folder, settings, range(settings.peers), console, restart, watching, requests)


def resume(
    folder: RunFolder,
    peers: Sequence[PeerId],
    console: Console,
    restart: Restart = "on-failure",
    watching: Watching = Watching(),
) -> tuple[RunFolder, Summary]:
    """Resume a run on its hosts: follow the peers that run, and start the others of ``peers``, by default all.

    Raises:
        LaunchError: another launcher follows the run, or no peer is left to start.
    """
    state = HostState.read(folder.root)
    if state is not None and state.answers(folder.root):
        raise LaunchError(
            f"{folder.root}: followed by another launcher (process {state.launcher} on host {state.host}), which "
            f"restarts its peers; stop them with `p2pfl stop {folder.root}`"
        )

    def prepare() -> Settings:
        from p2pfl.run_file import load as run_files

        run = run_files.load(folder.run_file)
        check_unchanged(run, folder)
        check_start(run, range(run.peers), here=False)
        return Settings.of(run)

    backend, hosts = _restored(folder)
    settings = in_child(prepare)
    if absent := sorted(set(peers) - set(range(settings.peers))):
        raise LaunchError(f"{folder.root} has no peer {formatting.ids(absent)}; it has 0 to {settings.peers - 1}")
    again = backend.hosts() or hosts
    with HostGroup(backend, again, _this_version(), keep_trying=restart == "always") as group:
        with starting(folder.root) as requests:
            found = group.connect()
            moved = {host.name for host in found} != {host.name for host in hosts}
            if moved:  # another allocation
                hosts = backends.place(settings.peers, found, group.cores)
            group.open(hosts, _files(folder, settings, hosts, group.addresses))
            if moved and not (group.shared or settings.copied):
                raise LaunchError(
                    f"{folder.root}: its checkpoints are on other hosts than those of now; resume it there, or keep "
                    "run folders on a file system that all hosts share"
                )
            if moved:  # after the check: a refused resume must not change where the run is
                backends.save(folder, backend, hosts)
            ended = [peer for peer in sorted(set(peers)) or range(settings.peers) if peer not in group.running]
            if not group.running and all(outcome(folder.peer(peer)) == "finished" for peer in ended):
                raise LaunchError(f"{folder.root}: nothing to resume: every peer is finished")
            seconds_before = 0.0
            with suppress(RunFolderError):
                seconds_before = measured_seconds(folder) or 0.0
        return folder, _follow(group, folder, settings, ended, console, restart, watching, requests, seconds_before)


def refresh(folder: RunFolder) -> None:
    """Fetch the files of a run whose launcher has ended, and what runs on its hosts. Raises LaunchError, WriteError.

    Does nothing if a launcher follows the run: then the files are up to date.
    """
    state = HostState.read(folder.root)
    if state is None or not state.running or state.answers(folder.root):
        return
    try:
        with _look(folder) as group:
            _replace_state(folder, state, group)
    except HostsGone:
        _replace_state(folder, state)


def stop(folder: RunFolder, *, kill: bool, timeout: float) -> list[tuple[PeerId, str | None]]:
    """Stop the running peers of a run on hosts. Return how each ended; None if it still runs.

    Raises LaunchError if its launcher, on another host, does not answer and no peer runs yet.
    """
    state = HostState.read(folder.root) or HostState()
    if state.answered < 0 and (launcher := state.process(folder.root)) is not None:
        launcher.send_signal(signal.SIGINT)  # it follows no peer yet, or has just begun to
        _wait_until(lambda: state.process(folder.root) is None, timeout)  # also if its parent does not reap it
        state = HostState.read(folder.root) or HostState()
        if state.followed(folder.root) and not kill:  # it stops the peers; a second signal would kill them
            return [(peer, None) for peer in sorted(state.running)]
    if state.followed(folder.root) and ask(folder.root, "kill" if kill else "stop"):
        stopped = [files.peer for files in folder.peers()] if state.answered < 0 else sorted(state.running)
        _wait_until(lambda: not (HostState.read(folder.root) or HostState()).followed(folder.root), timeout)
        running = (HostState.read(folder.root) or HostState()).running
        return [(peer, None if peer in running else outcome(folder.peer(peer))) for peer in stopped]
    state = HostState.read(folder.root) or HostState()
    if not state.running:
        if state.answered < 0 and state.followed(folder.root):
            raise LaunchError(
                f"{folder.root}: its launcher (process {state.launcher} on host {state.host}) does not answer; if it "
                "is still starting, it stops the peers once it has connected to all hosts"
            )
        return []
    try:
        look = _look(folder)
    except HostsGone:
        _replace_state(folder, state)
        return []
    with look as group:
        asked = sorted(group.running)
        group.signal(asked, signal.SIGKILL if kill else signal.SIGTERM)
        end = time.monotonic() + timeout
        while group.running and time.monotonic() < end:
            group.events(0.5)
        _replace_state(folder, state, group)
        return [
            (peer, None if peer in group.running else outcome(folder.peer(peer), -9 if kill else None))
            for peer in asked
        ]


def _wait_until(condition: Callable[[], bool], timeout: float) -> None:
    """Return when ``condition`` holds, or after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)


def _look(folder: RunFolder) -> HostGroup:
    """Connect to the hosts of a run, with what they report written into the folder."""
    backend, hosts = _restored(folder)
    neighbors: list[tuple[PeerId, ...]] = [()] * len(list(folder.peers()))
    files = Files(folder, _token(folder), {}, {}, lambda *given: [], lambda host: 0, neighbors, copied=True)
    group = HostGroup(backend, hosts, _this_version())
    try:
        group.connect()
        group.open(hosts, files, probe=False, load=False)
        group.sync()
    except BaseException:
        group.close()
        raise
    return group


def _restored(folder: RunFolder) -> tuple[Backend, list[Host]]:
    saved: dict[str, Any] = folder.info["hosts"]
    return backends.restore(saved), backends.hosts_from(folder)


def _follow(
    group: HostGroup,
    folder: RunFolder,
    settings: Settings,
    peers: Iterable[PeerId],
    console: Console,
    restart: Restart,
    watching: Watching,
    requests: Requests,
    seconds_before: float = 0.0,
) -> Summary:
    set_title(launcher_title(folder.root))
    print_run_path(folder, console)
    watching.serve(folder, console)
    remote = Remote(group, folder, requests)
    try:
        with tracking(folder, console.print) as trackers:

            def notices() -> list[str]:
                return [*group.notices(), *remote.failures(), *trackers.failures()]

            todo = list(peers)
            followed = remote.processes(todo)
            processes = follow(folder, todo, settings.rounds, remote, console, restart, watching, notices, followed)
    finally:
        remote.write_state(0)
        for line in remote.failures():
            console.print(line)
    from p2pfl.messaging.topology import Topology

    seconds = seconds_before + processes.seconds
    return summarize(folder, processes.exit_codes, seconds, Topology(settings.neighbors), processes.errors)


def _folder_on(host: Host, host_dir: str, folder: RunFolder) -> str:
    """Return the run folder on a host; ``host_dir`` may contain ``{host}``."""
    return f"{host_dir.replace('{host}', host.name).rstrip('/')}/{folder.root.name}"


def _replace_state(folder: RunFolder, seen: HostState, group: HostGroup | None = None) -> None:
    """Write down what runs on the hosts, unless another launcher has begun since the state ``seen``."""
    if HostState.read(folder.root) == seen:
        running = {} if group is None else {peer: group.host_of(peer) for peer in group.running}
        HostState(running=running).write(folder.root)


# ---- files for the hosts -----------------------------------------------------------------------------------------


def _token(folder: RunFolder) -> str:
    """Return the token of a run folder, by which a host process recognizes it."""
    found: str | None = (read_json(folder.root / TOKEN) or {}).get("token")
    if found is None:
        found = secrets.token_hex(16)
        write_json(folder.root / TOKEN, {"token": found})
    return found


def _files(folder: RunFolder, settings: Settings, hosts: Sequence[Host], addresses: Mapping[str, str]) -> Files:
    """Collect what the hosts need of a run."""
    keys = settings.keys or (None if settings.insecure else _make_keys(folder, settings.peers))
    from p2pfl.paths import FILES

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
        for peer in range(settings.peers):
            path = private_file(Path(keys), peer)
            private[peer] = {f"{KEYS}/{path.name}": (path.read_bytes(), 0o600)}

    def sets(host: Host, address: str, root: str, shared: bool) -> list[str]:
        changes: dict[str, Any] = {}
        if is_loopback(settings.bind):
            changes["transport.host"] = "::" if is_ipv6(address) else "0.0.0.0"
        if not settings.has_addresses and settings.port is None:
            changes["transport.address"] = join(address, "{port}")
        elif not settings.has_addresses:  # then every peer's address is known before it starts
            changes["transport.hosts"] = {str(peer): addresses[other.name] for other in hosts for peer in other.peers}
        if keys is not None:
            changes["transport.keys"] = keys if shared else f"{root}/{KEYS}"
        if host.slots is not None:
            changes["slots"] = host.slots
        elif host.cores is not None and settings.slots is None:
            changes["slots"] = max(1, host.cores // settings.threads)
        return [f"{key}={json.dumps(value)}" for key, value in changes.items()]

    def port(host: Host) -> int:
        return 0 if settings.port is None else settings.port + min(host.peers)

    return Files(folder, _token(folder), common, private, sets, port, settings.neighbors, settings.copied)


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


def _this_version() -> dict[str, Any]:
    """Return the versions and the code that the hosts must have too, from a process like theirs."""
    command = [sys.executable, "-P", "-c", "import json; from peers.host import hello; print(json.dumps(hello()))"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise LaunchError(f"this Python cannot start peers: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
