"""Where peers have left their run folders, and how to fetch these.

    FOLDER                      a run folder, or a folder with run folders in it: mounted volumes, say
    [USER@]HOST:FOLDER          the same on another host, through `ssh` and its `tar`
    container:NAME[:FOLDER]     the same in a container, running or not, through `docker cp`
    compose:[FILE]              all peers' containers of a compose project

Only files that a run folder has (``wanted``) are taken, and only regular ones: whoever can write there may have put
links and other names into it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from launcher.errors import CollectError

IN_CONTAINER = "/run/p2pfl"
"""Where a peer in a container keeps its run folder, unless its P2PFL_RUN says otherwise."""
DEPTH = 2
"""So many folders down from the given one, run folders are looked for."""
OF_THE_RUN = ("run.yaml", "run.json")
OF_A_PEER = ("peer.log", "metrics.jsonl", "chaos.jsonl", "output.log", "status.json", "result.json")
"""Copied in this order: by when a status says that the peer has finished, there is a result."""
CHECKPOINTS = ("checkpoint-previous.pt", "checkpoint.pt")

SSH = ("ssh", "-T", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""Options on the command line win over the user's configuration: a host that is gone must not hold up the others."""
CHANGED = 1
"""Exit code of a `tar` under whose feet files have grown."""


def wanted(name: str, checkpoints: bool) -> bool:
    """Whether the file ``name``, relative to the given folder, is one that is taken."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/"):
        return False
    if parts[-1:] and parts[-1] in OF_THE_RUN:
        return len(parts) - 1 <= DEPTH
    if len(parts) < 3 or len(parts) - 3 > DEPTH or parts[-3] != "peers" or not re.fullmatch(r"[0-9]{2,9}", parts[-2]):
        return False
    return parts[-1] in OF_A_PEER or (checkpoints and parts[-1] in CHECKPOINTS)


class Source(Protocol):
    """Where to look. As text it is what the user would write."""

    def places(self) -> Sequence[Place]:
        """All that there is to fetch. Raises CollectError."""


class Place(Protocol):
    """Where one run folder lies, or several that come as one. As text it is a source too."""

    def fetch(self, into: Path, checkpoints: bool) -> None:
        """Copy the wanted files, with the folders above them, into the folder ``into``. Raises CollectError."""


def parse(text: str) -> Source:
    """What ``text`` names. A folder that exists wins over a host of that name. Raises CollectError."""
    sort, _, rest = text.partition(":")
    if sort == "container":
        name, _, folder = rest.partition(":")
        if not name or name.startswith("-"):
            raise CollectError(f"{text}: should be container:NAME or container:NAME:FOLDER")
        return Container(name, folder or IN_CONTAINER)
    if sort == "compose":
        return Compose(Path(rest).absolute())
    remote = re.fullmatch(r"((?:[^/:@\[\]]+@)?(?:[^/:@\[\]]+|\[[^/\[\]]+\])):(.*)", text)
    if remote is None or Path(text).exists():
        return Folder(Path(text).absolute())
    host, folder = remote.groups()
    if host.startswith("-") or not folder:
        raise CollectError(f"{text}: should be HOST:FOLDER or USER@HOST:FOLDER")
    return Remote(host.replace("[", "").replace("]", ""), folder, text)


# ---- this host -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """On this host, or mounted here."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def places(self) -> list[Folder]:
        if not self.root.is_dir():
            raise CollectError("no such folder")
        found = list(_run_folders(self.root, DEPTH))
        if not found:
            raise CollectError(f"no run folder here, and none in the folders here, {DEPTH} deep")
        return found

    def fetch(self, into: Path, checkpoints: bool) -> None:
        with _reading():
            peers = sorted(os.listdir(self.root / "peers")) if (self.root / "peers").is_dir() else []
        of_peers = [f"peers/{peer}/{name}" for peer in peers for name in (*CHECKPOINTS, *OF_A_PEER)]
        for name in (*OF_THE_RUN, *of_peers):
            if wanted(name, checkpoints):
                _copy(self.root / name, into / name)


def _run_folders(root: Path, depth: int) -> Iterator[Folder]:
    """``root``, or those in it; also what cannot be looked into, so that it is missed."""
    try:
        entries = sorted(root.iterdir())
        folders = [entry for entry in entries if entry.is_dir() and entry.name != "lost+found"]
    except OSError:
        yield Folder(root)
        return
    if any(entry.name in OF_THE_RUN for entry in entries):
        yield Folder(root)
    elif depth:
        for folder in folders:
            yield from _run_folders(folder, depth - 1)


def _copy(source: Path, target: Path) -> None:
    """A regular file as it is now; nothing if there is none, or if it is a link."""
    with _reading():
        file = _open_regular(source)
    if file is None:
        return
    with file:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            while chunk := _chunk(file):
                copy.write(chunk)
        changed = os.fstat(file.fileno()).st_mtime_ns
        os.utime(target, ns=(changed, changed))


def _open_regular(path: Path) -> BinaryIO | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in (errno.ELOOP, errno.ENXIO):
            return None  # not there, or a link, or a socket
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def _chunk(file: BinaryIO) -> bytes:
    with _reading():
        return file.read(1 << 20)


@contextmanager
def _reading() -> Iterator[None]:
    """What goes wrong inside is the source's fault; elsewhere it is ours, such as a disk that is full."""
    try:
        yield
    except OSError as error:
        raise CollectError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


# ---- elsewhere -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remote:
    """On another host, where one may log in."""

    host: str
    folder: str
    text: str

    def __str__(self) -> str:
        return self.text

    def places(self) -> list[Remote]:
        return [self]

    def fetch(self, into: Path, checkpoints: bool) -> None:
        # The remote shell would expand ~, were it not for the quotes; ssh begins at home anyway.
        folder = re.sub(r"^~(/+|$)", "", self.folder) or "."
        leave_out = ["*.tmp", "addresses", "slots", "mps"] + ["checkpoint*"] * (not checkpoints)
        remote = ["tar", "-C", folder, *(f"--exclude={name}" for name in leave_out), "-cf", "-", "."]
        _untar([*SSH, "--", self.host, shlex.join(remote)], into, checkpoints, tolerated=(0, CHANGED))


@dataclass(frozen=True)
class Container:
    """A container of the Docker engine that `docker` talks to."""

    name: str
    folder: str

    def __str__(self) -> str:
        return f"container:{self.name}" + (f":{self.folder}" if self.folder != IN_CONTAINER else "")

    def places(self) -> list[Container]:
        return [self]

    def fetch(self, into: Path, checkpoints: bool) -> None:
        _untar(["docker", "cp", f"{self.name}:{self.folder.rstrip('/')}/.", "-"], into, checkpoints)


def _untar(command: Sequence[str], into: Path, checkpoints: bool, tolerated: Sequence[int] = (0,)) -> None:
    """Run ``command`` and take what is wanted from the tar archive that it writes. Raises CollectError."""
    with tempfile.TemporaryFile() as words:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=words)
        except OSError as error:
            raise CollectError(f"{command[0]}: {error.strerror}") from None
        problem = ""
        with process:
            assert process.stdout is not None
            try:
                with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
                    for member in archive:
                        if member.isreg() and wanted(member.name, checkpoints):
                            archive.extract(member, into, filter="data")
                while process.stdout.read(1 << 16):  # tar pads its archive; nobody should die of a closed pipe
                    pass
            except tarfile.TarError as error:
                problem = f"no whole tar archive: {error}"
            except BaseException:
                process.kill()
                raise
        words.seek(0)
        said = "; ".join(words.read().decode(errors="replace").split("\n")[-4:]).strip("; ")
    if problem or process.returncode not in tolerated:
        # What the command says of itself explains more than what its archive lacks.
        raise CollectError(said or problem or f"{command[0]}: exit code {process.returncode}")


# ---- a compose project ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compose:
    """A compose file, or a folder in which compose finds one. It stands for the containers of its peers."""

    file: Path

    def __str__(self) -> str:
        return f"compose:{self.file}"

    def places(self) -> list[Container]:
        """Those of the peers, running or not, each with the folder that its P2PFL_RUN names."""
        folder, which = (self.file, []) if self.file.is_dir() else (self.file.parent, ["-f", str(self.file)])
        # Services of a profile count only with it.
        environment = {"COMPOSE_PROFILES": "gpu", **os.environ}
        ids = _output([*_compose(), *which, "ps", "-a", "-q"], folder, environment)
        if not ids.split():
            raise CollectError("no containers: nothing of this project was started on this engine")
        found = [_peer_in(container) for container in json.loads(_output(["docker", "inspect", *ids.split()]))]
        return sorted((one for one in found if one is not None), key=lambda one: one.name)


def _peer_in(container: dict[str, Any]) -> Container | None:
    """The container as a source, if it is a peer's: it has P2PFL_ME, or its service is called peer-3 or gpu-3."""
    config = container["Config"]
    environment = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
    service = (config.get("Labels") or {}).get("com.docker.compose.service", "")
    if "P2PFL_ME" not in environment and not re.fullmatch(r"(peer|gpu)-\d+", service):
        return None
    return Container(container["Name"].lstrip("/"), environment.get("P2PFL_RUN", IN_CONTAINER))


def _compose() -> list[str]:
    """Compose version 2 is a plugin of docker, version 1 a program."""
    try:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    except OSError:
        plugin = False
    return ["docker", "compose"] if plugin else ["docker-compose"]


def _output(command: Sequence[str], folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder, env=environment
        )
    except OSError as error:
        raise CollectError(f"{error.filename or command[0]}: {error.strerror}") from None
    if done.returncode:
        raise CollectError(done.stderr.strip() or f"{shlex.join(command)}: exit code {done.returncode}")
    return done.stdout
