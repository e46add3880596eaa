"""Run a mesh in containers, with faults and without, and compare it with `p2pfl simulate`.

    scripts/check-compose                       # build the image, then run all trials
    scripts/check-compose --image p2pfl cut     # run one trial with an existing image

    calm     no fault; once with each installed version of compose
    died     a peer's process is killed; the engine restarts its container
    killed   a container is killed, and restarted when its neighbors have noticed
    cut      a container is disconnected from the network, and reconnected at another address when its neighbors have
             noticed
    waitless cut, with `synchrony: none`: the simulation takes messages in the order of this run

The mesh is that of docker-compose.yml. Each trial starts from scratch and leaves only the image. The fault happens in
the middle of the run.

Exit codes: 0 all trials passed, 1 one failed, 3 no container engine found.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.scenarios import NotInstalled, check_messages, command, p2pfl, run, uninterrupted, wait
from launcher.backends.container_files import RUN as IN_CONTAINER
from p2pfl import PeerId
from p2pfl.run_folder.folder import PeerFolder, RunFolder
from p2pfl.session import metrics

CLONE = Path(__file__).parent.parent
COMPOSE_FILE = CLONE / "docker-compose.yml"
RUN_FILE = CLONE / "topologies" / "mesh8.yaml"

MOUNTED = "/etc/p2pfl"
"""Where containers have the run file."""
ATTEMPTS = 20
VICTIM: PeerId = 3
ROUNDS_BEFORE = 5
"""Rounds that the victim has done when the fault happens. So early all peers exchange with all, so all notice."""
EVENT_LIMIT = 120.0
"""Maximum seconds for what usually takes up to 30 s: failing heartbeats, a successful health check."""
RUN_LIMIT = 900.0
"""Maximum seconds for a run, and for its start-up."""


def output(*command: object) -> str:
    """Run a command in the repository; return what it prints. Raises click.ClickException if it fails."""
    return run(*command, cwd=CLONE).strip()


def copy_from(container: str, into: Path) -> None:
    """Copy the run folder of a container, running or not.

    The engine gives up if a file is deleted meanwhile, as peers do that do not wait: so several times, if need be.
    """
    for _ in range(ATTEMPTS):
        with suppress(click.ClickException):
            output("docker", "cp", f"{container}:{IN_CONTAINER}/.", into)
            return
    output("docker", "cp", f"{container}:{IN_CONTAINER}/.", into)


def inspect(*containers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output("docker", "inspect", *containers))
    return found


# ---- the mesh ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """The peers of one trial. ``containers``: the container id of each peer."""

    name: str
    image: str
    containers: Sequence[str]
    rounds: int
    scratch: Path

    @property
    def others(self) -> list[PeerId]:
        return [peer for peer in range(len(self.containers)) if peer != VICTIM]

    def folder(self, peer: PeerId) -> PeerFolder:
        """Fetch the files of a peer, whether or not its container is running."""
        into = Path(tempfile.mkdtemp(dir=self.scratch))
        copy_from(self.containers[peer], into)
        return RunFolder(into).peer(peer)

    def rounds_done(self, peer: PeerId) -> int:
        files = self.folder(peer)
        return len(metrics.read(files.metrics)) if files.metrics.exists() else 0

    def has_lost_the_victim(self, peer: PeerId) -> bool:
        return f"connection lost peer={VICTIM}\n" in self.folder(peer).log.read_text(encoding="utf-8")

    def health(self, peer: PeerId) -> str:
        """Return a peer's answer to `python -m peers --health`."""
        return output("docker", "exec", self.containers[peer], "python", "-P", "-m", "peers", "--health")

    def are_healthy(self, peers: Sequence[PeerId]) -> bool:
        """Whether the engine's health checks succeed; it runs them every 15 seconds."""
        found = inspect(*(self.containers[peer] for peer in peers))
        return all(state["State"]["Health"]["Status"] == "healthy" for state in found)

    def have_finished(self) -> bool:
        """Whether all containers have exited with code 0; raise click.ClickException if one has another code."""
        states = [found["State"] for found in inspect(*self.containers)]
        for peer, state in enumerate(states):
            if state["Status"] == "exited" and state["ExitCode"]:
                raise click.ClickException(f"peer {peer} ended with exit code {state['ExitCode']}")
        return all(state["Status"] == "exited" for state in states)

    def restarts(self) -> list[int]:
        """Return how often the engine restarted each container."""
        return [found["RestartCount"] for found in inspect(*self.containers)]

    def victim_network(self) -> tuple[str, str]:
        """Return the victim's network, and its address there."""
        (found,) = inspect(self.containers[VICTIM])
        ((network, endpoint),) = found["NetworkSettings"]["Networks"].items()
        return network, endpoint["IPAddress"]


@dataclass(frozen=True)
class Engine:
    """The container engine, and what all trials need.

    Attributes:
        composes: {version: command} of the installed versions of compose, the newest first.
        expected: the run, simulated.
    """

    composes: Mapping[str, tuple[str, ...]]
    name: str
    image: str
    expected: RunFolder
    scratch: Path

    @contextmanager
    def started(self, compose: Sequence[str], file: Path, rounds: int) -> Iterator[Mesh]:
        """Start the mesh with ``compose up`` under a separate project name, and remove it afterwards."""
        project = (*compose, "--project-name", self.name, "--file", str(file))
        labels = (f"label=com.docker.compose.project={self.name}", "label=com.docker.compose.service=peer-{}")
        find = ("docker", "ps", "--all", "--quiet", "--no-trunc", "--filter", labels[0], "--filter", labels[1])
        try:
            output(*project, "up", "--detach", "--no-build")
            containers = [
                output(*(part.format(peer) for part in find)) for peer in range(self.expected.settings["peers"])
            ]
            yield Mesh(self.name, self.image, containers, rounds, self.scratch)
        except click.ClickException:
            click.echo(output(*project, "logs", "--tail=10"), err=True)
            raise
        finally:
            with uninterrupted():
                output(*project, "down", "--volumes", "--timeout", "0")


@contextmanager
def container(name: str, *arguments: str) -> Iterator[None]:
    """Start another container with the arguments of `docker run`, and remove it afterwards."""
    try:
        output("docker", "run", "--name", name, *arguments)
        yield
    finally:
        with uninterrupted(), suppress(click.ClickException):
            output("docker", "rm", "--force", "--volumes", name)


# ---- faults, each described in the sentence it returns -------------------------------------------------------


def died(mesh: Mesh) -> str:
    status = mesh.folder(VICTIM).status()
    assert status is not None
    output("docker", "exec", mesh.containers[VICTIM], "sh", "-c", f"kill -KILL {status.pid}")
    noticed = _wait_until_noticed(mesh)
    wait("the engine restarts the container", lambda: mesh.restarts()[VICTIM] == 1, EVENT_LIMIT)
    return f"its process was killed {noticed}; the engine restarted the container"


def killed(mesh: Mesh) -> str:
    output("docker", "kill", mesh.containers[VICTIM])
    noticed = _wait_until_noticed(mesh)
    _check_others(mesh)
    output("docker", "start", mesh.containers[VICTIM])
    return f"its container was killed {noticed}, and restarted"


def cut(mesh: Mesh) -> str:
    victim = mesh.containers[VICTIM]
    network, before = mesh.victim_network()
    output("docker", "network", "disconnect", network, victim)
    noticed = _wait_until_noticed(mesh)
    _check_others(mesh)
    wait(f"peer {VICTIM} has lost all connections", lambda: _connected(mesh, VICTIM, 0), EVENT_LIMIT)
    # Take the free address: some engines would assign it again.
    name, command = f"{mesh.name}-another", ("--entrypoint", "sleep", mesh.image, "infinity")
    with container(name, "--detach", "--init", "--network", network, *command):
        output("docker", "network", "connect", "--alias", f"peer-{VICTIM}", network, victim)
    after = mesh.victim_network()[1]
    if before == after:
        raise click.ClickException(f"the engine gave peer {VICTIM} its old address {after} again")
    return f"it was disconnected {noticed}, and reconnected as {after} instead of {before}"


FAULTS: dict[str, Callable[[Mesh], str]] = {"died": died, "killed": killed, "cut": cut}


def _wait_until_noticed(mesh: Mesh) -> str:
    """Wait until all neighbors have noticed the fault; check that the run was in its middle."""
    event = f"all neighbors have lost the connection to peer {VICTIM}"
    seconds = wait(event, lambda: all(map(mesh.has_lost_the_victim, mesh.others)), EVENT_LIMIT)
    done = mesh.rounds_done(VICTIM)
    if not 0 < done < mesh.rounds:
        raise click.ClickException(
            f"the fault happened after {done} of {mesh.rounds} rounds, not in the middle of the run"
        )
    return f"after {done} of {mesh.rounds} rounds, noticed by {len(mesh.others)} neighbors {seconds:.1f} s later"


def _check_others(mesh: Mesh) -> None:
    """Check that the other peers wait, connected to each other, and that the engine finds them healthy."""
    wait("the engine finds the other peers healthy", lambda: mesh.are_healthy(mesh.others), EVENT_LIMIT)
    for peer in mesh.others:
        if not _connected(mesh, peer, len(mesh.others) - 1):
            raise click.ClickException(f"a peer is not connected to all but one: {mesh.health(peer)}")


def _connected(mesh: Mesh, peer: PeerId, count: int) -> bool:
    return mesh.health(peer).endswith(f" {count} of {len(mesh.others)} neighbors connected")


# ---- trials --------------------------------------------------------------------------------------------------


def simulated(image: str, name: str, scratch: Path, folder: Path = RUN_FILE.parent, *options: str) -> RunFolder:
    """Simulate the run in one container.

    Args:
        folder: mounted in the container; the options come after the run file in it.
    """
    file = RUN_FILE.name if folder == RUN_FILE.parent else "run.yaml"
    command = ("simulate", f"{MOUNTED}/{file}", *options, "--run-dir", f"{IN_CONTAINER}/simulated")
    mounted = ("--network", "none", "--volume", f"{folder}:{MOUNTED}:ro", "--entrypoint", "p2pfl")
    into = Path(tempfile.mkdtemp(dir=scratch))
    with container(name, *mounted, image, *command):
        copy_from(name, into)
    return RunFolder.open(into / "simulated")


def calm(engine: Engine) -> str:
    for number, compose in engine.composes.items():
        trial(engine, compose, None, engine.scratch / f"calm-{number}")
    return f"no fault, with compose {' and '.join(engine.composes)}"


def trial(
    engine: Engine,
    compose: Sequence[str],
    fault: Callable[[Mesh], str] | None,
    into: Path,
    file: Path = COMPOSE_FILE,
    rounds: int | None = None,
) -> str:
    """Run the mesh with a fault, and describe it. Raises click.ClickException if the run is not as simulated."""
    with engine.started(compose, file, rounds or engine.expected.settings["rounds"]) as mesh:
        what = ""
        if fault is not None:
            early = f"peer {VICTIM} has done {ROUNDS_BEFORE} rounds"
            wait(early, lambda: mesh.rounds_done(VICTIM) >= ROUNDS_BEFORE, RUN_LIMIT)
            what = f"peer {VICTIM}: {fault(mesh)}"
        wait("all peers have finished", mesh.have_finished, RUN_LIMIT)
        restarts = [int(fault is died and peer == VICTIM) for peer in range(len(mesh.containers))]
        if mesh.restarts() != restarts:
            raise click.ClickException(
                f"the engine restarted containers {mesh.restarts()} times; expected {restarts}"
            )
        copies = Path(tempfile.mkdtemp(dir=engine.scratch))
        for peer, container_id in enumerate(mesh.containers):
            copy_from(container_id, copies / str(peer))
        p2pfl("collect", into, copies)
    expected = engine.expected
    if file != COMPOSE_FILE:
        expected = simulated(engine.image, f"{engine.name}-again", engine.scratch, into, "--replay", MOUNTED)
    p2pfl("digest", into, expected.root)
    check_messages(RunFolder(into), expected)
    return what


def with_fault(name: str, engine: Engine) -> str:
    return trial(engine, next(iter(engine.composes.values())), FAULTS[name], engine.scratch / name)


def waitless(engine: Engine) -> str:
    folder, rounds = engine.scratch / "waitless", 300
    folder.mkdir()
    file = folder / RUN_FILE.name
    file.write_text(RUN_FILE.read_text(encoding="utf-8").replace("rounds: 40", f"rounds: {rounds}\nsynchrony: none"))
    composed = p2pfl("compose", file.name, "--image", engine.image, cwd=folder)
    (folder / "compose.yml").write_text(composed, encoding="utf-8")
    compose = next(iter(engine.composes.values()))
    return trial(engine, compose, cut, folder / "run", folder / "compose.yml", rounds)


def composes() -> dict[str, tuple[str, ...]]:
    """Return {version: command} of the installed versions of compose. Raises NotInstalled if there is none."""
    found: dict[str, tuple[str, ...]] = {}
    for program in (("docker", "compose"), ("docker-compose",)):
        with suppress(OSError, click.ClickException):
            found[output(*program, "version", "--short")] = program
    if not found:
        raise NotInstalled("neither `docker compose` nor `docker-compose` found")
    return found


@contextmanager
def requirements(scratch: Path, image: str | None) -> Iterator[Engine]:
    """Build the image, unless one is named, and simulate the run in it. Raises NotInstalled without an engine."""
    try:
        version = output("docker", "version", "--format", "{{.Server.Version}}")
    except (OSError, click.ClickException) as error:
        raise NotInstalled(f"a container engine: {error}") from None
    programs = composes()
    name = f"p2pfl-check-{os.getpid()}"
    # Read by compose; no profile: without GPUs.
    os.environ |= {"COMPOSE_PROJECT_NAME": name, "COMPOSE_PROFILES": ""}
    if image is None:
        output(*next(iter(programs.values())), "--file", COMPOSE_FILE, "build", "keys")
        image = "p2pfl"
    os.environ["P2PFL_IMAGE"] = image
    size = int(output("docker", "image", "inspect", "--format", "{{.Size}}", image))
    click.echo(f"engine {version}; image {image}: {size / 1e9:.2f} GB\n")
    yield Engine(programs, name, image, simulated(image, name, scratch), scratch)


SCENARIOS: dict[str, Callable[[Engine], str]] = {
    "calm": calm,
    **{name: partial(with_fault, name) for name in FAULTS},
    "waitless": waitless,
}
OPTIONS = (
    click.Option(
        ["--image"], envvar="P2PFL_IMAGE", help="Image to use. Default: build it, as `docker compose` does."
    ),
)
main = command(SCENARIOS, requirements, lambda engine, name: True, __doc__, "p2pfl-compose-", OPTIONS)

if __name__ == "__main__":
    main()
