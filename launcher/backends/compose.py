"""Write a compose file for a run file: one container per peer, all on one host.

    keys       creates the peers' key pairs, each in a volume that only its peer mounts
    data       downloads the dataset if necessary, and decodes it into a volume that peers mount read-only
    peer-0 …   the peers, on an internal network, each with a volume for its run folder
    gpu-0 …    the same peers with the host's GPUs, in profile ``gpu``; service ``gpu`` starts them

Environment variables hold what differs between a container and a launch on one host, so that the run file is the same
as for `p2pfl launch`. The file works with docker-compose 1.29 and Compose 2: hence no ``name``, and a bind mount
instead of ``configs``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.backends.container_files import (
    DECODED,
    FILES,
    KEYS,
    RUN,
    decode_command,
    environment,
    files_of_run,
    reads_dataset_files,
    set_options,
)
from p2pfl.errors import KeysError
from p2pfl.run_folder.key_files import PUBLIC, check, private_file

if TYPE_CHECKING:
    from p2pfl import PeerId
    from p2pfl.run_file.run import Run

RESTARTS = 10
"""How often the engine restarts a container that fails, to bound the attempts of a peer that can never start."""
BUILD = {
    "BASE": "${BASE:-python:3.12-slim-bookworm}",
    "TORCH_INDEX": "${TORCH_INDEX-https://download.pytorch.org/whl/cpu}",
}
"""Build arguments and their defaults, the same as in the Dockerfile."""


@dataclass(frozen=True)
class ComposeFile:
    """The settings of a compose file.

    Attributes:
        file: the run file. Relative paths are relative to the folder of the compose file.
        sets: changes to keys of the run file.
        keys: folder with the keys of all peers; None to create new keys.
        image: name of the image; None to build one from the folder of the compose file.
    """

    file: Path
    sets: Sequence[str] = ()
    keys: Path | None = None
    image: str | None = None

    def render(self) -> str:
        """Return the text of the compose file. Raises RunFileError, and KeysError if keys are missing."""
        from p2pfl.run_file import load as run_files

        run = run_files.load(self.file, self.sets, self.environment)
        self._check(run)
        return "".join(f"{line}\n" for line in _Writer(self, run).lines())

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every peer. They override the keys of the run file."""
        return environment(self.file, "tcp://peer-{id}:{port}")

    def _check(self, run: Run) -> None:
        transport = run.file.transport
        if transport.hosts:
            raise run.error_at("transport.hosts", ValueError("remove it: containers find each other by name"))
        if self.keys is not None:
            check(self.keys, run.peers, range(run.peers), transport.public_keys)
            if self.owner_of_keys == 0:
                raise KeysError(
                    f"{self.keys}: owned by root, but peers run as another user; `chown -R 1000 {self.keys}`"
                )
        elif transport.public_keys is not None:
            raise run.error_at("transport.public_keys", ValueError("pass the folder of keys as --keys, or remove it"))
        if self.image is None and (installed := [plugin.name for plugin in run.plugins if not plugin.sources]):
            text = (
                f"{installed[0]} is installed here, but not in the image; list its file, or pass an image as --image"
            )
            raise run.error_at("plugins", ValueError(text))

    @property
    def owner_of_keys(self) -> int | None:
        """User id that peers must run as, because only the owner can read a private key; None for any."""
        return None if self.keys is None else private_file(self.keys, 0).stat().st_uid


class _Writer:
    """Write a compose file section by section. Anchors and merge keys avoid repeating what peers share."""

    def __init__(self, settings: ComposeFile, run: Run) -> None:
        self.settings = settings
        self.run = run
        self.peers = range(run.peers)
        self.file = settings.environment["P2PFL_FILE"]
        root = run.file.data.root
        self.sets = set_options(run, settings.sets)
        self.binds = files_of_run(run, settings.file)
        """The files to mount: {anchor: (path on the host, path in the container)}."""
        self.files = None
        """Volume or folder with the dataset's files; None if it has none."""
        if reads_dataset_files(run):
            self.files = "${P2PFL_DATA:-files}" if root is None else str(root)

    def lines(self) -> Iterator[str]:
        yield from self._head()
        yield "services:"
        yield from self._setup_services()
        for peer in self.peers:
            yield from self._peer(peer, "peer", "[mesh]")
        yield ""
        yield "  # ---- the same peers with the GPUs of this host: run `docker compose up gpu` instead"
        for peer in self.peers:
            yield from self._peer(peer, "gpu", f"{{mesh: {{aliases: [peer-{peer}]}}}}")
        yield from self._rest()

    def _head(self) -> Iterator[str]:
        options = [f"--set={item}" for item in self.settings.sets]
        options += [f"--keys={self.settings.keys}"] if self.settings.keys else []
        options += [f"--image={self.settings.image}"] if self.settings.image else []
        yield f"# {self.run.name}: {self.run.peers} peers, one container each; see docs/deploy.md."
        yield f"# Generated by `{shlex.join(['p2pfl', 'compose', str(self.settings.file), *options])}`."
        yield ""
        yield "x-container: &container"
        if self.settings.image is None:
            yield "  image: ${P2PFL_IMAGE:-p2pfl}"
            yield "  pull_policy: never   # built once, by the first service"
        else:
            yield f"  image: {_quoted(self.settings.image)}"
        yield "  init: true"
        yield "  read_only: true"
        yield "  tmpfs: [/tmp]"
        yield "  cap_drop: [ALL]"
        yield '  security_opt: ["no-new-privileges:true"]'
        yield f"  cpus: ${{P2PFL_CPUS:-{self.run.file.threads}}}"
        yield "  mem_limit: ${P2PFL_MEMORY:-2g}"
        yield "  pids_limit: 256"
        yield "  logging: {driver: local}"
        yield ""
        yield "x-peer: &peer"
        yield "  <<: *container"
        yield f"  restart: on-failure:{RESTARTS}"
        yield "  stop_grace_period: 1m"
        yield "  depends_on:"
        for service in ("keys", "data") if self.settings.keys is None else ("data",):
            yield f"    {service}: {{condition: service_completed_successfully}}"
        if self.sets:
            yield f"  command: {_list(self.sets)}"
        yield ""
        yield "x-gpu: &gpu"
        yield "  <<: *peer"
        yield "  profiles: [gpu]"
        yield f"  command: {_list([*self.sets, '--set=device=cuda'])}"
        yield "  deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}"
        yield ""
        yield "x-environment: &environment"
        for name, value in self.settings.environment.items():
            yield f"  {name}: {_quoted(value)}"
        yield ""
        yield "x-mounts:"
        for name, (path, target) in self.binds.items():
            source = _quoted(_bind_source(path))
            yield f"  - &{name} {{type: bind, source: {source}, target: {_quoted(target)}, read_only: true}}"
        yield f'  - &decoded "decoded:{DECODED}:ro"'
        if self.files:
            yield f"  - &files {self._files_volume(read_only=True)}"
        yield ""

    def _files_volume(self, *, read_only: bool) -> str:
        """Return the volume or folder with the dataset's files, as a value in YAML."""
        if (root := self.run.file.data.root) is None:
            return f'"{self.files}:{FILES}{":ro" if read_only else ""}"'
        source = _quoted(_bind_source(root))
        options = f"read_only: {str(read_only).lower()}, bind: {{create_host_path: true}}"
        return f"{{type: bind, source: {source}, target: {FILES}, {options}}}"

    def _setup_services(self) -> Iterator[str]:
        build = self._build()
        if self.settings.keys is None:
            command = ["p2pfl", "keys", "new", str(self.run.peers), "--into", KEYS, "--apart", "--owner", "p2pfl"]
            yield "  # ---- creates a key pair for each peer, unless it exists"
            yield "  keys:"
            yield "    <<: *container"
            yield from build
            yield f"    entrypoint: {_list(command)}"
            yield "    user: root"
            yield "    cap_add: [CHOWN]"
            yield "    network_mode: none"
            yield "    healthcheck: {disable: true}"
            yield "    volumes:"
            for peer in self.peers:
                yield f'      - "keys-{peer}:{KEYS}/{peer:02d}"'
            yield ""
            build = []
        mounts = [*(f"*{name}" for name in self.binds), f'"decoded:{DECODED}"']
        if self.files:
            mounts.append(self._files_volume(read_only=False))
        downloads = self.files is not None and self.run.file.data.download
        yield "  # ---- decodes the dataset for all peers"
        yield "  data:"
        yield "    <<: *container"
        yield from build
        if self.settings.keys is None:
            yield "    depends_on: [keys]"
        yield f"    entrypoint: {_list(decode_command(self.file, self.sets))}"
        yield "    environment: *environment"
        yield "    networks: [default]" if downloads else "    network_mode: none"
        yield "    healthcheck: {disable: true}"
        yield f"    volumes: [{', '.join(mounts)}]"
        yield ""
        yield "  # ---- the peers"

    def _build(self) -> list[str]:
        """Return the build section, for the first service only: it builds the image for all."""
        if self.settings.image is not None:
            return []
        owner = self.settings.owner_of_keys
        arguments = {**BUILD, **({"UID": str(owner)} if owner is not None else {})}
        return [
            "    build:",
            "      context: .",
            "      args:",
            *(f'        {a}: "{b}"' for a, b in arguments.items()),
        ]

    def _peer(self, peer: PeerId, kind: str, networks: str) -> Iterator[str]:
        """Yield the service of a peer. ``kind``: ``peer``, or ``gpu`` with the GPUs of the host."""
        yield f"  {kind}-{peer}:"
        yield f"    <<: *{kind}"
        yield f"    networks: {networks}"
        mounts = [*(f"*{name}" for name in self.binds), "*decoded", *(["*files"] if self.files else [])]
        if self.settings.keys is None:
            mounts.append(f'"keys-{peer}:{KEYS}:ro"')
        yield f"    environment: {{<<: *environment, P2PFL_ME: {peer}}}"
        yield f'    volumes: [{", ".join(mounts)}, "run-{peer}:{RUN}"]'
        if self.settings.keys is not None:
            yield "    secrets:"
            yield f"      - {{source: public, target: {KEYS}/{PUBLIC}}}"
            yield f"      - {{source: key-{peer}, target: {private_file(Path(KEYS), peer)}}}"

    def _rest(self) -> Iterator[str]:
        yield "  gpu:"
        yield "    <<: *container"
        yield "    profiles: [gpu]"
        yield f"    depends_on: [{', '.join(f'gpu-{peer}' for peer in self.peers)}]"
        yield '    entrypoint: ["true"]'
        yield "    network_mode: none"
        yield "    healthcheck: {disable: true}"
        yield ""
        yield "networks:"
        yield "  mesh: {internal: true}   # no connection to other networks"
        yield ""
        if self.settings.keys is not None:
            yield "secrets:"
            yield f"  public: {{file: {_quoted(_bind_source(self.settings.keys / PUBLIC))}}}"
            for peer in self.peers:
                yield f"  key-{peer}: {{file: {_quoted(_bind_source(private_file(self.settings.keys, peer)))}}}"
            yield ""
        yield "volumes:"
        yield "  decoded:"
        if self.files and self.run.file.data.root is None:
            yield "  files:"
        for kind in ("keys", "run") if self.settings.keys is None else ("run",):
            for peer in self.peers:
                yield f"  {kind}-{peer}:"


def _bind_source(path: Path) -> str:
    """Return a path that compose does not mistake for the name of a volume."""
    return str(path) if path.is_absolute() else f"./{os.path.normpath(path)}"


def _escaped(text: str) -> str:
    """Escape ``$``, so that compose substitutes no variables."""
    return text.replace("$", "$$")


def _quoted(text: str) -> str:
    """Return a quoted YAML string."""
    return json.dumps(_escaped(text), ensure_ascii=False)


def _list(words: Sequence[str]) -> str:
    return json.dumps([_escaped(word) for word in words], ensure_ascii=False)
