"""The host process: one on each host of a run on several hosts. It forks the peers there, like the warm process.

It takes no part in training. However it was started, the launcher reaches it by a pair of byte streams: lines of
JSON on stdin and stdout. Before "load" it imports no torch, so that problems are reported at once.

    ← {"event": "hello", "protocol": 1, "versions": {…}, "code": "<hash>", "address": "10.0.0.2" | null,
       "hostname": "beta", "cores": 8}
    → {"do": "open", "folder": "<path>", "run": "<id>", "token": "<text>", "peers": [3], "have": {"peers/03/…": 9}}
    ← {"event": "opened", "shared": false, "folder": "<path>", "running": {"3": 4711}, "new": [4]}
                                                            which peers run, and which have no files
    → {"do": "file", "path": "run.yaml", "mode": 420, "data": "<base64>"}
    → {"do": "listen", "port": 0}                           to find out which ports a firewall blocks
    ← {"event": "listening", "port": 40123}
    → {"do": "probe", "hosts": {"beta": ["10.0.0.2", 40123]}}
    ← {"event": "probed", "failures": {"beta": "timed out"}}
    → {"do": "load", "sets": ["transport.host=0.0.0.0"]}    changes to the run file that hold on this host
    ← {"event": "ready"}                                    torch, run and data are loaded
    → {"do": "fork", "peers": [3, 4]}
    ← {"event": "started", "peer": 3, "pid": 4711}
    ← {"event": "address", "peer": 3, "address": "tcp://10.0.0.2:40777"}    null: withdrawn
    → {"do": "address", "peer": 7, "address": "tcp://10.0.0.3:41200"}       of a neighbor on another host
    ← {"event": "file", "path": "peers/03/peer.log", "at": 0, "data": "<base64>", "clock": 812.5}   data null: deleted
    → {"do": "signal", "peers": [3, 4], "signal": 15}
    ← {"event": "beat"}                                     if nothing else was sent for BEAT seconds, once "ready"
    ← {"event": "loading"}                                  no beat until the next event: torch is being imported
    → {"do": "sync"}
    ← {"event": "synced"}                                   all changes of files so far have been sent
    ← {"event": "exited", "peer": 3, "code": 0, "error": ""}                code null: unknown
    ← {"event": "failed", "error": "<text>"}                instead of "opened", "listening" or "ready";
                                                            after "open" or "file" nothing else is done
    ← {"event": "notice", "text": "<text>"}                 once "ready", a file cannot be written: it tries again

If the launcher's run folder is the one on this host (``shared``: it contains the token), no file is sent, and hosts
that share it exchange addresses by the files in it. Otherwise the small files of each peer are sent as they grow, and
completely before its "exited". When stdin closes, the process waits for its children and exits; if it is killed, they
continue, and the next host process finds them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import secrets
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from time import monotonic, process_time
from typing import TYPE_CHECKING, Any

import p2pfl
from p2pfl import PeerId
from p2pfl.control_groups import usable_cores
from p2pfl.errors import P2pflError, RunFolderError, error_text
from p2pfl.file_locks import require_locks
from p2pfl.process_title import has_title, set_title
from p2pfl.run_file.addresses import is_ipv6
from p2pfl.run_folder.files import json_object, read_json, write_atomically, write_errors
from p2pfl.run_folder.folder import RunFolder
from p2pfl.terminal import encode_as_utf8
from peers.sent_files import SentFiles, inside

if TYPE_CHECKING:
    from peers.warm import Forks

PROTOCOL = 1
"""Version of the requests and events."""
TOKEN = ".launcher"
"""A file in the launcher's run folder: hosts that find it share that folder."""
INTERVAL = 0.25
"""Seconds between two looks at the peers' files."""
MAX_LOAD = 0.02
"""Maximum fraction of a core that this takes: with many peers, looks are rarer."""
BEAT = 5.0
"""Seconds between two signs of life."""
PROBE_TIMEOUT = 10.0
"""Seconds that a connection to another host may take."""


def serve() -> int:
    """Serve requests on stdin until it closes and all children have ended."""
    set_title("p2pfl host")
    events = os.dup(1)
    os.dup2(2, 1)
    encode_as_utf8()
    process = HostProcess(events)
    process.send(hello())
    return process.serve()


def hello() -> dict[str, Any]:
    """Describe this host and what is installed on it."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "numpy", "pyzmq", "p2pfl-mesh"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "event": "hello",
        "protocol": PROTOCOL,
        "versions": versions,
        "code": code_hash(),
        "address": os.environ.get("P2PFL_ADDRESS") or (connection[2] if len(connection) == 4 else None),
        "hostname": socket.gethostname(),
        "cores": usable_cores(),
    }


def code_hash() -> str:
    """Return a hash of the code of ``p2pfl`` and ``peers``, which must be the same on all hosts."""
    total = hashlib.sha256()
    for root in (Path(p2pfl.__file__).parent, Path(__file__).parent):
        for path in sorted(root.rglob("*.py")):
            total.update(f"{root.name}/{path.relative_to(root)}\0".encode())
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


class HostProcess:
    """The state of a host process. ``events`` is the descriptor that they are written to."""

    def __init__(self, events: int) -> None:
        self._events = events
        self._connected = True
        self._folder: RunFolder | None = None
        self._shared = False
        self._peers: list[PeerId] = []
        self._sent: dict[PeerId, SentFiles] = {}
        self._adopted: dict[PeerId, int] = {}
        """{peer: process id} of peers that an earlier host process has forked."""
        self._addresses: dict[PeerId, str | None] = {}
        """Those reported of the peers on this host."""
        self._forks: Forks | None = None
        self._sets: list[str] = []
        self._listener: socket.socket | None = None
        self._refused = False
        """Whether the run could not be opened here: nothing else is done for it."""
        self._loaded = False
        self._unwritten: dict[str, dict[str, Any]] = {}
        """Requests to write files that have failed while peers run, by file."""
        self._closed_by_forks: tuple[int, ...] = ()
        self._due = 0.0
        self._sent_at = 0.0

    def serve(self) -> int:
        """Process requests until stdin closes and all children have ended."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._closed_by_forks = (woken, wake, self._events)
        listening, pending = True, b""
        while listening or (self._forks and self._forks.children):
            ready, _, _ = select.select([woken, *([0] if listening else [])], [], [], INTERVAL if listening else None)
            if woken in ready:
                os.read(woken, 4096)
                if self._forks:
                    self._forks.reap()
            if 0 in ready:
                chunk = os.read(0, 1 << 16)
                listening = bool(chunk)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            if listening and monotonic() >= self._due:
                began = process_time()  # on a busy host, a look takes long but costs no more
                self._look()
                self._write_again()
                self._due = monotonic() + max(INTERVAL, (process_time() - began) / MAX_LOAD)
            if listening:
                self._beat()
        return 0

    def send(self, event: Mapping[str, Any]) -> None:
        """Report an event, unless the launcher has disconnected."""
        self._sent_at = monotonic()
        line = memoryview((json.dumps(event) + "\n").encode())
        while line and self._connected:  # a signal, e.g. of an exited child, interrupts a long write
            try:
                line = line[os.write(self._events, line) :]
            except OSError:
                self._connected = False

    def _beat(self) -> None:
        """Give a sign of life when one is due."""
        if monotonic() > self._sent_at + BEAT:
            self.send({"event": "beat"})

    def _obey(self, request: dict[str, Any]) -> None:
        if self._refused:
            return
        do = request["do"]
        writes = f"{do} {request.get('peer', request.get('path'))}" if do in ("address", "file") else ""
        self._unwritten.pop(writes, None)
        try:
            self._execute(request)
        except (P2pflError, OSError) as error:
            if self._loaded and writes:  # its peers train on meanwhile
                self._unwritten[writes] = request
                self.send(
                    {"event": "notice", "text": f"{writes}: {error_text(error.__cause__ or error)}; trying again"}
                )
                return
            self._refused = do in ("open", "file")
            self.send({"event": "failed", "error": error_text(error)})

    def _execute(self, request: Mapping[str, Any]) -> None:
        getattr(self, f"_do_{request['do']}")(**{name: value for name, value in request.items() if name != "do"})

    def _write_again(self) -> None:
        for writes, request in list(self._unwritten.items()):
            with suppress(P2pflError, OSError):
                self._execute(request)
                del self._unwritten[writes]

    # ---- requests --------------------------------------------------------------------------------------------

    def _do_open(self, folder: str, run: str, token: str, peers: Sequence[PeerId], have: Mapping[str, int]) -> None:
        """Open or create the folder of the run for ``peers``, and report which of them run already.

        Args:
            run: the id of the run.
        """
        try:
            root = Path(folder).expanduser()
        except RuntimeError:
            raise RunFolderError(f"{folder}: no such home folder; give another folder by --host-dir") from None
        if (info := root / "run.json").is_file() and (json_object(info.read_bytes()) or {}).get("id") != run:
            raise RunFolderError(
                f"{root}: contains another run; give another folder by --host-dir, or remove it there"
            )
        self._shared = (read_json(root / TOKEN) or {}).get("token") == token
        require_locks(root, "put run folders on file systems with locks, e.g. a local disk: --host-dir FOLDER")
        new = [peer for peer in peers if not RunFolder(root).peer(peer).journal.is_dir()]
        self._folder = RunFolder.create(root, peers, again=True)
        self._peers = list(peers)
        for notice in self._folder.addresses.glob("*.dead"):  # of an earlier launcher, which restarts them
            notice.unlink(missing_ok=True)
        set_title(f"p2pfl host {self._folder.root}")
        for peer in peers:
            if (pid := find_pid(self._folder, peer)) is not None:
                self._adopted[peer] = pid
            if not self._shared:
                self._sent[peer] = SentFiles(self._folder.peer(peer), have)
        opened = {"shared": self._shared, "running": self._adopted, "folder": str(self._folder.root)}
        self.send({"event": "opened", **opened, "new": new})

    def _do_file(self, path: str, mode: int, data: str) -> None:
        """Write a file of the run folder, unless it has that content already."""
        assert self._folder is not None
        target, content = inside(self._folder.root, path), base64.b64decode(data)
        if target.is_file() and target.read_bytes() == content:
            return
        new = target.with_name(f".{target.name}.{secrets.token_hex(8)}.new")  # other hosts may share the folder
        with write_errors(target), ExitStack() as unless_replaced:
            target.parent.mkdir(mode=0o700 if path.startswith("keys/") else 0o777, parents=True, exist_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            unless_replaced.callback(new.unlink)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            new.replace(target)
            unless_replaced.pop_all()

    def _do_listen(self, port: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=128)
        self.send({"event": "listening", "port": self._listener.getsockname()[1]})

    def _do_probe(self, hosts: Mapping[str, tuple[str, int]]) -> None:
        """Connect to other hosts, as the peers of this one will."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(16) as pool:
            problems = list(pool.map(_connection_problem, hosts.values()))
        failures = {name: problem for name, problem in zip(hosts, problems, strict=True) if problem}
        self.send({"event": "probed", "failures": failures})

    def _do_load(self, sets: Sequence[str]) -> None:
        """Load torch, the run and its data; only before a fork if all peers run already."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._sets = list(sets)
        if len(self._adopted) < len(self._peers):
            self._load()
        self._loaded = True
        self.send({"event": "ready"})

    def _load(self) -> Forks:
        if self._forks is not None:
            return self._forks
        self.send({"event": "loading"})
        assert self._folder is not None
        import torch

        from p2pfl.run_file.load import load
        from p2pfl.session.gpus import find_gpus, require_gpu
        from peers.warm import Forks

        torch.set_num_threads(1)
        run = load(self._folder.run_file, self._sets)
        require_gpu(run)
        if run.file.device != "cpu" and run.file.gpu.memory_fraction is None and (gpus := len(find_gpus())):
            most = max(sum(peer % gpus == gpu for peer in self._peers) for gpu in range(gpus))
            self._sets.append(f"gpu.memory_fraction={1.0 / max(1, most)}")
        self._forks = Forks(self._events, self._sets, before_exit=self._report_last)
        self._forks.load(self._folder)
        return self._forks

    def _do_fork(self, peers: Sequence[PeerId]) -> None:
        assert self._folder is not None
        self._load().fork(self._folder.root, peers, self._closed_by_forks)

    def _do_address(self, peer: PeerId, address: str | None) -> None:
        """Write the address of a peer on another host, or delete it."""
        assert self._folder is not None
        path = self._folder.addresses / f"{peer:02d}"
        if address is None:
            path.unlink(missing_ok=True)
        else:
            write_atomically(path, address.encode())

    def _do_signal(self, peers: Sequence[PeerId], signal: int) -> None:
        children = {} if self._forks is None else {peer: pid for pid, (peer, _) in self._forks.children.items()}
        for peer in peers:
            pid = children.get(peer) or self._adopted.get(peer)
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal)

    def _do_sync(self) -> None:
        self._look()
        self.send({"event": "synced"})

    # ---- reports ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Report what has changed in the files of this host's peers, and which adopted peers have ended."""
        if self._folder is None:
            return
        ended = [peer for peer in self._adopted if find_pid(self._folder, peer) is None]
        for peer in self._peers:
            self._report(peer)
            self._beat()  # files may be slow to read
        for peer in ended:
            del self._adopted[peer]
            self.send({"event": "exited", "peer": peer, "code": None, "error": ""})

    def _report(self, peer: PeerId) -> None:
        assert self._folder is not None
        for event in self._sent[peer].changes() if peer in self._sent else ():
            self.send(event)
        address: str | None = None
        with suppress(OSError, UnicodeDecodeError):
            address = (self._folder.addresses / f"{peer:02d}").read_text(encoding="utf-8")
        if self._addresses.get(peer) != address:
            self._addresses[peer] = address
            self.send({"event": "address", "peer": peer, "address": address})

    def _report_last(self, peer: PeerId) -> None:
        """Report the last changes of a peer that has exited."""
        if self._connected:
            self._report(peer)


def find_pid(folder: RunFolder, peer: PeerId) -> int | None:
    """Return the process id of a running peer; the id in its status may have been reused by another process."""
    status = folder.peer(peer).status()
    if status is None:
        return None
    with suppress(OSError):
        found = Path(f"/proc/{status.pid}/cmdline").read_bytes().decode(errors="replace")
        if has_title(found, f"p2pfl peer {peer} {folder.root}"):
            return status.pid
    return None


def _connection_problem(target: tuple[str, int]) -> str:
    """Return why a host cannot be reached; nothing if it can. As peers do, it resolves names to IPv4 addresses."""
    name, port = target
    try:
        if not is_ipv6(name):
            name = str(socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        socket.create_connection((name, port), timeout=PROBE_TIMEOUT).close()
    except socket.gaierror as error:
        return f"{error.strerror} (peers resolve names to IPv4 addresses; an IPv6 address can be given as such)"
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return error.strerror or str(error)
    return ""
