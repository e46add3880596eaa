"""From a run file to a compose file: every peer a container, all on one host.

    keys       makes the peers' pairs of keys, each in a volume that only its peer sees
    data       decodes the dataset, fetched first if need be, into a volume that the peers can only read
    peer-0 …   the peers, on a network of their own, each with a volume for its run folder
    gpu-0 …    the same peers with the host's GPUs, in profile ``gpu``; service ``gpu`` starts them

What differs between a container and a launch on one host stands in variables of the environment, so that the run file
is the one that `p2pfl launch` takes. Both docker-compose 1.29 and Compose 2 understand what is written: hence no
``name``, and a bind mount where the latter has ``configs``.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2pfl.errors import KeysError
from p2pfl.keys import PUBLIC, check, private_file

if TYPE_CHECKING:
    from p2pfl.config import Run
    from p2pfl.runfolder import PeerId

PORT = 5700
"""Peer i listens at PORT + i. Any would do: each has an address of its own."""

CONFIG, RUN, KEYS, FILES, DECODED = "/etc/p2pfl", "/run/p2pfl", "/keys", "/data/files", "/data/decoded"
"""Places in a container: of the run file, the run folder, the keys, the dataset's files, and what is decoded of them.
In the image, the second and the last two belong to the user that peers run as, and so do new volumes there."""

BUILD = {
    "BASE": "${BASE:-python:3.12-slim-bookworm}",
    "TORCH_INDEX": "${TORCH_INDEX-https://download.pytorch.org/whl/cpu}",
}
"""Arguments that the image is built with, unless the environment says otherwise: those of the Dockerfile."""


@dataclass(frozen=True)
class Mesh:
    """A run in containers.

    Attributes:
        file: the run file. Paths that are not absolute begin in the folder of the compose file.
        sets: what to change in it.
        keys: folder with the keys of all peers; None: new ones are made.
        image: which to use; None: one that is built from the folder of the compose file.
    """

    file: Path
    sets: Sequence[str] = ()
    keys: Path | None = None
    image: str | None = None

    def compose(self) -> str:
        """The compose file. Raises RunFileError, and KeysError if the folder has not the keys of all."""
        from p2pfl import config

        run = config.load(self.file, self.sets, self.environment)
        self._check(run)
        return "".join(f"{line}\n" for line in _Writer(self, run).lines())

    @property
    def environment(self) -> dict[str, str]:
        """Of every peer. Where it is about the same as the run file, it goes before that."""
        return {
            "P2PFL_FILE": f"{CONFIG}/{self.file.name}",
            "P2PFL_RUN": RUN,
            "P2PFL_HOST": "0.0.0.0",
            "P2PFL_PORT": str(PORT),
            "P2PFL_ADDRESS": "tcp://peer-{id}:{port}",
            "P2PFL_KEYS": KEYS,
            "P2PFL_DATA": FILES,
            "P2PFL_CACHE": DECODED,
        }

    def _check(self, run: Run) -> None:
        transport, data = run.file.transport, run.file.data
        if transport.hosts:
            raise run.blame("transport.hosts", ValueError("containers are found by their names: leave it out"))
        if self.keys is not None:
            check(self.keys, run.peers, range(run.peers), transport.public_keys)
            if self.owner_of_keys == 0:
                raise KeysError(f"{self.keys}: root's, as whom no peer runs: chown them to another user")
        elif transport.public_keys is not None:
            raise run.blame("transport.public_keys", ValueError("give their folder with --keys, or leave it out"))
        root = data.root or Path(FILES)
        if strays := [path for path in run.source.files(root) if not path.is_relative_to(root)]:
            raise run.blame("data.dataset", ValueError(f"{strays[0]} is outside of data.root, which is mounted"))

    @property
    def owner_of_keys(self) -> int | None:
        """User id that peers must run as: only its owner can read a private key. None: any."""
        return None if self.keys is None else private_file(self.keys, 0).stat().st_uid


class _Writer:
    """Section by section. Anchors and merge keys say once what all peers have."""

    def __init__(self, mesh: Mesh, run: Run) -> None:
        self.mesh = mesh
        self.run = run
        self.peers = range(run.peers)
        self.file = mesh.environment["P2PFL_FILE"]
        root = run.file.data.root
        self.sets = [f"--set={one}" for one in (*mesh.sets, *([f"data.root={FILES}"] if root else []))]
        self.files = None
        """Volume or folder with the dataset's files, if it has any."""
        if run.source.files(Path(FILES)):
            self.files = "${P2PFL_DATA:-files}" if root is None else _escaped(str(root))

    def lines(self) -> Iterator[str]:
        yield from self._head()
        yield "services:"
        yield from self._preparing()
        for peer in self.peers:
            yield from self._peer(peer)
        yield ""
        yield "  # ---- the same peers with the GPUs of this host: `docker compose up gpu` instead"
        for peer in self.peers:
            yield from self._peer_with_gpu(peer)
        yield from self._rest()

    def _head(self) -> Iterator[str]:
        options = [f"--set={one}" for one in self.mesh.sets]
        options += [f"--keys={self.mesh.keys}"] if self.mesh.keys else []
        options += [f"--image={self.mesh.image}"] if self.mesh.image else []
        yield f"# {self.run.name}: {self.run.peers} peers, each in a container of its own; docs/deploy.md says more."
        yield f"# Written by `{shlex.join(['p2pfl', 'compose', str(self.mesh.file), *options])}`."
        yield ""
        yield "x-container: &container"
        if self.mesh.image is None:
            yield "  image: ${P2PFL_IMAGE:-p2pfl}"
            yield "  pull_policy: never   # it is built here, once for all"
        else:
            yield f"  image: {_text(self.mesh.image)}"
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
        yield "  restart: on-failure"
        yield "  stop_grace_period: 1m"
        yield "  depends_on:"
        for service in self._before_the_peers():
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
        for name, value in self.mesh.environment.items():
            yield f"  {name}: {_text(value)}"
        yield ""
        yield "x-mounts:"
        for name, (path, target) in self._binds().items():
            source = _text(_beside(path))
            yield f"  - &{name} {{type: bind, source: {source}, target: {_text(target)}, read_only: true}}"
        yield f'  - &decoded "decoded:{DECODED}:ro"'
        if self.files:
            yield f'  - &files "{self.files}:{FILES}:ro"'
        yield ""

    def _before_the_peers(self) -> list[str]:
        return ["keys", "data"] if self.mesh.keys is None else ["data"]

    def _binds(self) -> dict[str, tuple[Path, str]]:
        """Files that the peers read, from beside the compose file: {anchor: (there, in the container)}."""
        from p2pfl.topology import FromFile

        found = {"file": (self.mesh.file, self.file)}
        if isinstance(self.run.graph, FromFile):
            path = self.run.graph.path
            found["graph"] = (self.mesh.file.parent / path, os.path.normpath(Path(CONFIG) / path))
        return found

    def _preparing(self) -> Iterator[str]:
        build = self._build()
        if self.mesh.keys is None:
            making = ["p2pfl", "keys", "new", str(self.run.peers), "--into", KEYS, "--apart", "--owner", "p2pfl"]
            yield "  # ---- makes a pair of keys for each peer, and keeps those that are there"
            yield "  keys:"
            yield "    <<: *container"
            yield from build
            yield f"    entrypoint: {_list(making)}"
            yield "    user: root"
            yield "    cap_add: [CHOWN]"
            yield "    network_mode: none"
            yield "    healthcheck: {disable: true}"
            yield "    volumes:"
            for peer in self.peers:
                yield f'      - "keys-{peer}:{KEYS}/{peer:02d}"'
            yield ""
            build = []
        mounts = [*(f"*{name}" for name in self._binds()), f'"decoded:{DECODED}"']
        if self.files:
            mounts.append(f'"{self.files}:{FILES}"')
        fetches = self.files is not None and self.run.file.data.download
        yield "  # ---- decodes the dataset for all of them"
        yield "  data:"
        yield "    <<: *container"
        yield from build
        if self.mesh.keys is None:
            yield "    depends_on: [keys]"
        yield f"    entrypoint: {_list(['p2pfl', 'data', 'show', self.file, *self.sets, '--set=transport={}'])}"
        yield "    environment: *environment"
        yield "    networks: [default]" if fetches else "    network_mode: none"
        yield "    healthcheck: {disable: true}"
        yield f"    volumes: [{', '.join(mounts)}]"
        yield ""
        yield "  # ---- the peers"

    def _build(self) -> list[str]:
        """The first service that starts builds the image for all."""
        if self.mesh.image is not None:
            return []
        owner = self.mesh.owner_of_keys
        arguments = {**BUILD, **({"UID": str(owner)} if owner is not None else {})}
        return [
            "    build:",
            "      context: .",
            "      args:",
            *(f'        {a}: "{b}"' for a, b in arguments.items()),
        ]

    def _peer(self, peer: PeerId) -> Iterator[str]:
        yield f"  peer-{peer}:"
        yield "    <<: *peer"
        yield "    networks: [mesh]"
        yield from self._own(peer)

    def _peer_with_gpu(self, peer: PeerId) -> Iterator[str]:
        yield f"  gpu-{peer}:"
        yield "    <<: *gpu"
        yield f"    networks: {{mesh: {{aliases: [peer-{peer}]}}}}"
        yield from self._own(peer)

    def _own(self, peer: PeerId) -> Iterator[str]:
        """What is one peer's, with a GPU or without."""
        mounts = [*(f"*{name}" for name in self._binds()), "*decoded", *(["*files"] if self.files else [])]
        if self.mesh.keys is None:
            mounts.append(f'"keys-{peer}:{KEYS}:ro"')
        yield f"    environment: {{<<: *environment, P2PFL_ME: {peer}}}"
        yield f'    volumes: [{", ".join(mounts)}, "run-{peer}:{RUN}"]'
        if self.mesh.keys is not None:
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
        yield "  mesh: {internal: true}   # no way in, no way out"
        yield ""
        if self.mesh.keys is not None:
            yield "secrets:"
            yield f"  public: {{file: {_text(_beside(self.mesh.keys / PUBLIC))}}}"
            for peer in self.peers:
                yield f"  key-{peer}: {{file: {_text(_beside(private_file(self.mesh.keys, peer)))}}}"
            yield ""
        yield "volumes:"
        yield "  decoded:"
        if self.files and self.run.file.data.root is None:
            yield "  files:"
        for kind in ("keys", "run") if self.mesh.keys is None else ("run",):
            for peer in self.peers:
                yield f"  {kind}-{peer}:"


def _beside(path: Path) -> str:
    """As compose files write it, so that it is not taken for the name of a volume."""
    return str(path) if path.is_absolute() else f"./{os.path.normpath(path)}"


def _escaped(text: str) -> str:
    """So that no variables are put into it."""
    return text.replace("$", "$$")


def _text(text: str) -> str:
    """One word of YAML."""
    return json.dumps(_escaped(text), ensure_ascii=False)


def _list(words: Sequence[str]) -> str:
    return json.dumps([_escaped(word) for word in words], ensure_ascii=False)


__all__ = ["Mesh"]
