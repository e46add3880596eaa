"""Locations of run folders on this host, other hosts and in containers, and how to fetch their files.

    FOLDER                      a run folder, or a folder that contains run folders, e.g. of mounted volumes
    [USER@]HOST:FOLDER          the same on another host, through `ssh` and `tar` there
    container:NAME[:FOLDER]     the same in a container, running or not, through `docker cp`
    compose:[FILE]              the containers of all peers of a compose project
    pod:NAMESPACE/NAME          the same in a peer's pod, through `kubectl exec` and `tar` there
    k8s:[[NAMESPACE/]NAME]      the pods of all peers of `p2pfl k8s`, of one run or of all runs of a namespace

Only regular files that belong to a run folder (``is_wanted``) are copied, because untrusted users may have added
links and other files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol

from launcher.collect.archive import untar
from launcher.collect.limits import Limit
from launcher.errors import CollectError

IN_CONTAINER = "/run/p2pfl"
"""The run folder in a container, unless its P2PFL_RUN names another."""
PEER_CONTAINER = "peer"
"""The container of a peer in the pods of `p2pfl k8s`."""
MAX_DEPTH = 2
"""How many levels below the given folder to search for run folders."""
RUN_FILES = ("run.yaml", "run.json")
PEER_FILES = ("peer.log", "peer.log.1", "metrics.jsonl", "chaos.jsonl", "output.log", "status.json", "result.json")
"""In the order of copying: a copied status of a finished peer comes with its result."""
CHECKPOINTS = ("checkpoint-previous.pt", "checkpoint.pt")

SSH = ("ssh", "-T", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""These override the user's configuration: an unreachable host must not delay the others."""
TAR_FILES_CHANGED = 1
"""Exit code of `tar` if files grew while it read them."""


def is_wanted(name: str, checkpoints: bool) -> bool:
    """Return whether to copy the file ``name``, a path relative to the given folder."""
    parts = PurePosixPath(name).parts
    if ".." in parts or name.startswith("/") or not name.isprintable():
        return False
    if parts[-1:] and parts[-1] in RUN_FILES:
        return len(parts) - 1 <= MAX_DEPTH
    if (
        len(parts) < 3
        or len(parts) - 3 > MAX_DEPTH
        or parts[-3] != "peers"
        or not re.fullmatch(r"[0-9]{2}|[1-9][0-9]{2,8}", parts[-2])
    ):
        return False
    return parts[-1] in PEER_FILES or (checkpoints and parts[-1] in CHECKPOINTS)


class LocationSpec(Protocol):
    """One or more locations, as the user names them; ``str`` returns that text."""

    def locations(self) -> Sequence[Location]:
        """Return the locations. Raises CollectError."""


class Location(Protocol):
    """A folder with one or more run folders; ``str`` returns a text that ``parse`` takes."""

    def fetch(self, into: Path, checkpoints: bool, limit: Limit) -> None:
        """Copy the wanted files with their relative paths into the folder ``into``.

        Raises CollectError, also if there is more than ``limit`` allows.
        """


def parse(text: str) -> LocationSpec:
    """Parse a location. An existing folder takes precedence over a host of that name. Raises CollectError."""
    scheme, _, rest = text.partition(":")
    if scheme == "container":
        name, _, folder = rest.partition(":")
        if not name or name.startswith("-"):
            raise CollectError(f"{text}: expected container:NAME or container:NAME:FOLDER")
        return Container(name, folder or IN_CONTAINER)
    if scheme == "compose":
        return Compose(Path(rest).absolute())
    if scheme == "pod" and "/" in rest:
        return Pod(*_names(text, rest))
    if scheme == "k8s":
        return Kubernetes(*_names(text, rest if "/" in rest else f"/{rest}"))
    remote = re.fullmatch(r"((?:[^/:@\[\]]+@)?(?:[^/:@\[\]]+|\[[^/\[\]]+\])):(.*)", text)
    if remote is None or Path(text).exists():
        return Folder(Path(text).absolute())
    host, folder = remote.groups()
    if host.startswith("-") or not folder:
        raise CollectError(f"{text}: expected HOST:FOLDER or USER@HOST:FOLDER")
    return Remote(host.replace("[", "").replace("]", ""), folder, text)


# ---- this host -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A folder on this host."""

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def locations(self) -> list[Folder]:
        with _reading():
            if not self.root.is_dir():
                raise CollectError("no such folder")
        found = list(_run_folders(self.root, MAX_DEPTH))
        if not found:
            raise CollectError(f"contains no run folder within {MAX_DEPTH} levels")
        return found

    def fetch(self, into: Path, checkpoints: bool, limit: Limit) -> None:
        with _reading():
            peers = sorted(os.listdir(self.root / "peers")) if (self.root / "peers").is_dir() else []
        peer_files = [f"peers/{peer}/{name}" for peer in peers for name in (*CHECKPOINTS, *PEER_FILES)]
        for name in (*RUN_FILES, *peer_files):
            if is_wanted(name, checkpoints):
                _copy(self.root, into, name, limit)


def _run_folders(root: Path, depth: int) -> Iterator[Folder]:
    """Yield ``root`` or the run folders in it, and unreadable folders, so that they are reported."""
    try:
        entries = sorted(root.iterdir())
        folders = [entry for entry in entries if entry.is_dir() and entry.name != "lost+found"]
    except OSError:
        yield Folder(root)
        return
    if any(entry.name in RUN_FILES for entry in entries):
        yield Folder(root)
    elif depth:
        for folder in folders:
            yield from _run_folders(folder, depth - 1)


def _copy(root: Path, into: Path, name: str, limit: Limit) -> None:
    """Copy a regular file; do nothing if it is missing or something else."""
    with _reading():
        file = _open_regular(root / name)
    if file is None:
        return
    limit.count_file()
    target = into / name
    with file:
        limit.check_size(name, os.fstat(file.fileno()).st_size)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as copy:
            while chunk := _chunk(file):  # the file may grow
                limit.count_bytes(len(chunk))
                limit.check_size(name, copy.tell() + len(chunk))
                copy.write(chunk)
        changed = os.fstat(file.fileno()).st_mtime_ns
        os.utime(target, ns=(changed, changed))


def _open_regular(path: Path) -> BinaryIO | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError) or error.errno in (errno.ELOOP, errno.ENXIO):
            return None  # missing, a link or a socket
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
    """Turn an OSError of reading into CollectError. Errors of writing, e.g. a full disk, are handled elsewhere."""
    try:
        yield
    except OSError as error:
        raise CollectError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from None


# ---- other hosts and containers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Remote:
    """A folder on another host, reached by ssh."""

    host: str
    folder: str
    text: str

    def __str__(self) -> str:
        return self.text

    def locations(self) -> list[Remote]:
        return [self]

    def fetch(self, into: Path, checkpoints: bool, limit: Limit) -> None:
        # The quotes keep the remote shell from expanding ~; ssh starts in the home folder anyway.
        folder = re.sub(r"^~(/+|$)", "", self.folder) or "."
        command = [*SSH, "--", self.host, shlex.join(_tar(folder, checkpoints))]
        untar(command, into, partial(is_wanted, checkpoints=checkpoints), limit, (0, TAR_FILES_CHANGED))


def _tar(folder: str, checkpoints: bool) -> list[str]:
    """Return the command that writes the files of ``folder`` to stdout, without those never wanted."""
    excluded = ["*.tmp", "addresses", "slots", "mps", "journal"] + ["checkpoint*"] * (not checkpoints)
    return ["tar", "-C", folder, *(f"--exclude={name}" for name in excluded), "-cf", "-", "."]


@dataclass(frozen=True)
class Container:
    """A folder in a container of the local Docker engine."""

    name: str
    folder: str

    def __str__(self) -> str:
        return f"container:{self.name}" + (f":{self.folder}" if self.folder != IN_CONTAINER else "")

    def locations(self) -> list[Container]:
        return [self]

    def fetch(self, into: Path, checkpoints: bool, limit: Limit) -> None:
        command = ["docker", "cp", f"{self.name}:{self.folder.rstrip('/')}/.", "-"]
        untar(command, into, partial(is_wanted, checkpoints=checkpoints), limit)


# ---- a compose project ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compose:
    """The containers of all peers of a compose project, given by its compose file or the folder of that file."""

    file: Path

    def __str__(self) -> str:
        return f"compose:{self.file}"

    def locations(self) -> list[Container]:
        """Return the containers of peers, running or not, each with the folder that its P2PFL_RUN names."""
        folder, options = (self.file, []) if self.file.is_dir() else (self.file.parent, ["-f", str(self.file)])
        # Compose lists services of a profile only if the profile is active.
        environment = {"COMPOSE_PROFILES": "gpu", **os.environ}
        ids = _output([*_compose(), *options, "ps", "-a", "-q"], folder, environment)
        if not ids.split():
            raise CollectError("no containers: this project has not been started on this Docker engine")
        found = [_peer_container(config) for config in json.loads(_output(["docker", "inspect", *ids.split()]))]
        return sorted((container for container in found if container), key=lambda container: container.name)


def _peer_container(container: dict[str, Any]) -> Container | None:
    """Return the container of a peer: it has P2PFL_ME, or its service is called peer-3 or gpu-3. Else None."""
    config = container["Config"]
    environment = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
    service = (config.get("Labels") or {}).get("com.docker.compose.service", "")
    if "P2PFL_ME" not in environment and not re.fullmatch(r"(peer|gpu)-\d+", service):
        return None
    return Container(container["Name"].lstrip("/"), environment.get("P2PFL_RUN", IN_CONTAINER))


# ---- a Kubernetes cluster ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pod:
    """The run folder in the pod of one peer, in the cluster of kubectl's current context."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"pod:{self.namespace}/{self.name}"

    def locations(self) -> list[Pod]:
        return [self]

    def fetch(self, into: Path, checkpoints: bool, limit: Limit) -> None:
        command = ["kubectl", "exec", "--pod-running-timeout=10s", f"--namespace={self.namespace}", self.name]
        command += [f"--container={PEER_CONTAINER}", "--", *_tar(IN_CONTAINER, checkpoints)]
        allowed = (0, TAR_FILES_CHANGED)  # kubectl exits with the code of the command
        untar(command, into, partial(is_wanted, checkpoints=checkpoints), limit, allowed)


@dataclass(frozen=True)
class Kubernetes:
    """The pods of all peers of ``p2pfl k8s``, in the cluster of kubectl's current context.

    Attributes:
        namespace: empty for kubectl's current namespace.
        name: prefix of the run's objects; empty for all runs.
    """

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"k8s:{self.namespace}/{self.name}" if self.namespace else f"k8s:{self.name}"

    def locations(self) -> list[Pod]:
        labels = ["app.kubernetes.io/name=p2pfl", "app.kubernetes.io/component=peer"]
        labels += [f"app.kubernetes.io/instance={self.name}"] if self.name else []
        where = [f"--namespace={self.namespace}"] if self.namespace else []
        answer = _output(["kubectl", "get", "pods", *where, f"--selector={','.join(labels)}", "--output=json"])
        pods = [(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in json.loads(answer)["items"]]
        if not pods:
            raise CollectError("no pods of peers; name the run as NAMESPACE/NAME, or start it")
        return [Pod(*pod) for pod in sorted(pods, key=lambda pod: (pod[0], _ordinal(pod[1])))]


def _names(text: str, names: str) -> tuple[str, str]:
    namespace, _, name = names.partition("/")
    if not re.fullmatch(r"([a-z0-9]([-.a-z0-9]*[a-z0-9])?)?", name) or not re.fullmatch(r"[-a-z0-9]*", namespace):
        raise CollectError(f"{text}: expected k8s:NAME, k8s:NAMESPACE/NAME or pod:NAMESPACE/NAME")
    return namespace, name


def _ordinal(pod: str) -> tuple[str, int]:
    """Return a key that sorts mesh-2 before mesh-10."""
    stem, _, number = pod.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (pod, 0)


# ---- commands ------------------------------------------------------------------------------------------------


def _compose() -> list[str]:
    """Return the command of Compose: version 2 is a plugin of docker, version 1 a program."""
    try:
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    except OSError:
        plugin = False
    return ["docker", "compose"] if plugin else ["docker-compose"]


def _output(command: Sequence[str], folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=folder,
            env=environment,
        )
    except OSError as error:
        raise CollectError(f"{error.filename or command[0]}: {error.strerror}") from None
    if done.returncode:
        raise CollectError(done.stderr.strip() or f"{shlex.join(command)}: exit code {done.returncode}")
    return done.stdout
