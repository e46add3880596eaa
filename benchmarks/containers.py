"""A mesh in containers of a real engine, left alone and disturbed: does it end with the bits of `p2pfl simulate`?

    scripts/check-compose                       # builds the image; then all trials
    scripts/check-compose --image p2pfl cut     # one of them, with an image that is there

    calm     nobody does anything; once with each version of compose that is there
    died     the process of one peer is killed: the engine starts its container again
    killed   a container is killed, and started again when its neighbours have noticed
    cut      a container is taken off the network, and put back at another address when its neighbours have noticed

The mesh is that of docker-compose.yml. Each trial begins with nothing and leaves nothing but the image. A blow falls
in the middle of the run: the peer that it hits has rounds behind it and before it.

Exit codes: 0 all is well, 1 something is not, 3 there is no engine to try it on.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import click

from launcher.sources import IN_CONTAINER, Container
from launcher.summary import settings
from p2pfl import metrics
from p2pfl.runfolder import PeerFolder, PeerId, Result, RunFolder

CLONE = Path(__file__).parent.parent
COMPOSE_FILE = CLONE / "docker-compose.yml"
RUN_FILE = CLONE / "topologies" / "mesh8.yaml"

VICTIM: PeerId = 3
BEHIND_IT = 5
"""Rounds that the victim has done when the blow falls. So early everybody talks to everybody: all will miss it."""
PATIENCE = 120.0
"""Seconds for what takes half a minute at most: heartbeats that fail, a health check that succeeds."""
LONGEST = 900.0
"""Seconds for a run, and for what comes before its first rounds."""
LOOK_EVERY = 0.1


class Failed(click.ClickException):
    """Something is not as promised."""


class NoEngine(click.ClickException):
    """There is nothing to try it on."""

    exit_code = 3


# ---- commands ------------------------------------------------------------------------------------------------


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run it in the clone. In a session of its own, so that Ctrl-C is for us only, and we can tidy up."""
    return subprocess.run(
        command, cwd=CLONE, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
    )


def output(*command: str) -> str:
    """What a command prints. Raises Failed."""
    done = run(*command)
    if done.returncode:
        raise Failed(f"{shlex.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout.strip()


def p2pfl(*arguments: object) -> str:
    return output(sys.executable, "-m", "launcher.cli", *map(str, arguments))


def inspected(*containers: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(output("docker", "inspect", *containers))
    return found


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> float:
    """Seconds until ``condition`` held. Raises Failed if that takes too long."""
    began = monotonic()
    while not condition():
        if monotonic() - began > seconds:
            raise Failed(f"has not come within {seconds:g} s: {what}")
        sleep(LOOK_EVERY)
    return monotonic() - began


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Who presses Ctrl-C twice waits: nothing may be left behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- the mesh ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """The peers of one trial, each in its container: ``containers`` has their ids in the order of the peers."""

    name: str
    image: str
    containers: Sequence[str]
    rounds: int
    scratch: Path

    @property
    def others(self) -> list[PeerId]:
        return [peer for peer in range(len(self.containers)) if peer != VICTIM]

    def folder(self, peer: PeerId) -> PeerFolder:
        """What a peer has written so far, be its container running or not."""
        into = Path(tempfile.mkdtemp(dir=self.scratch))
        Container(self.containers[peer], IN_CONTAINER).fetch(into, checkpoints=False)
        return RunFolder(into).peer(peer)

    def rounds_done(self, peer: PeerId) -> int:
        return len(metrics.read(place.metrics)) if (place := self.folder(peer)).metrics.exists() else 0

    def has_lost_the_victim(self, peer: PeerId) -> bool:
        return f" peer {VICTIM}: connection lost" in self.folder(peer).log.read_text(encoding="utf-8")

    def health(self, peer: PeerId) -> str:
        """What a peer answers if it is asked how it does."""
        return output("docker", "exec", self.containers[peer], "python", "-P", "-m", "peers", "--health")

    def seem_healthy(self, peers: Sequence[PeerId]) -> bool:
        """To the engine, which asks them every 15 seconds."""
        found = inspected(*(self.containers[peer] for peer in peers))
        return all(one["State"]["Health"]["Status"] == "healthy" for one in found)

    def have_finished(self) -> bool:
        """All containers have ended with exit code 0. Raises Failed if one has ended otherwise."""
        states = [found["State"] for found in inspected(*self.containers)]
        for peer, state in enumerate(states):
            if state["Status"] == "exited" and state["ExitCode"]:
                raise Failed(f"peer {peer} ended with exit code {state['ExitCode']}")
        return all(state["Status"] == "exited" for state in states)

    def restarts(self) -> list[int]:
        """How often the engine has started each container again of its own accord."""
        return [found["RestartCount"] for found in inspected(*self.containers)]

    def place_of_the_victim(self) -> tuple[str, str]:
        """The network that it is in, and its address there."""
        (found,) = inspected(self.containers[VICTIM])
        ((network, place),) = found["NetworkSettings"]["Networks"].items()
        return network, place["IPAddress"]


@contextmanager
def started(compose: Sequence[str], name: str, image: str, like: RunFolder, scratch: Path) -> Iterator[Mesh]:
    """The mesh as ``compose up`` starts it, under a name of its own. Nothing is left of it afterwards."""
    project = (*compose, "--project-name", name, "--file", str(COMPOSE_FILE))
    about = settings(like)
    labels = [f"label=com.docker.compose.project={name}", "label=com.docker.compose.service=peer-{}"]
    find = ("docker", "ps", "--all", "--quiet", "--no-trunc", *(part for one in labels for part in ("--filter", one)))
    try:
        output(*project, "up", "--detach", "--no-build")
        containers = [output(*(part.format(peer) for part in find)) for peer in range(about["peers"])]
        yield Mesh(name, image, containers, about["rounds"], scratch)
    except Failed:
        click.echo(run(*project, "logs", "--tail=10").stdout, err=True)
        raise
    finally:
        with uninterrupted():
            output(*project, "down", "--volumes", "--timeout", "0")


@contextmanager
def container(name: str, *arguments: str) -> Iterator[None]:
    """One besides the mesh's, with the arguments of `docker run`."""
    try:
        output("docker", "run", "--name", name, *arguments)
        yield
    finally:
        with uninterrupted():
            run("docker", "rm", "--force", "--volumes", name)


# ---- blows, each told in words -------------------------------------------------------------------------------


def died(mesh: Mesh) -> str:
    status = mesh.folder(VICTIM).status()
    assert status is not None
    output("docker", "exec", mesh.containers[VICTIM], "sh", "-c", f"kill -KILL {status.pid}")
    told = _missed(mesh)
    wait_until(lambda: mesh.restarts()[VICTIM] == 1, "the engine starts the container again")
    return f"its process was killed {told}; the engine started the container again"


def killed(mesh: Mesh) -> str:
    output("docker", "kill", mesh.containers[VICTIM])
    told = _missed(mesh)
    _others_do_well(mesh)
    output("docker", "start", mesh.containers[VICTIM])
    return f"its container was killed {told}, and started again"


def cut(mesh: Mesh) -> str:
    victim = mesh.containers[VICTIM]
    network, before = mesh.place_of_the_victim()
    output("docker", "network", "disconnect", network, victim)
    told = _missed(mesh)
    _others_do_well(mesh)
    wait_until(lambda: _connected(mesh, VICTIM, 0), f"peer {VICTIM} has lost all neighbours")
    # Some engines give the address that was given back last, some the next one: here it is taken.
    name, command = f"{mesh.name}-another", ("--entrypoint", "sleep", mesh.image, "infinity")
    with container(name, "--detach", "--init", "--network", network, *command):
        output("docker", "network", "connect", "--alias", f"peer-{VICTIM}", network, victim)
    after = mesh.place_of_the_victim()[1]
    if before == after:
        raise Failed(f"the engine gave peer {VICTIM} the address that it had: {after}")
    return f"it was taken off the network {told}, and put back as {after}, no longer {before}"


BLOWS: dict[str, Callable[[Mesh], str]] = {"died": died, "killed": killed, "cut": cut}


def _missed(mesh: Mesh) -> str:
    """That it fell in the middle of the run, and that all neighbours have noticed."""
    noticed = f"all neighbours have lost the connection to peer {VICTIM}"
    seconds = wait_until(lambda: all(map(mesh.has_lost_the_victim, mesh.others)), noticed)
    done = mesh.rounds_done(VICTIM)
    if not 0 < done < mesh.rounds:
        raise Failed(f"the blow fell after {done} of {mesh.rounds} rounds: that is not the middle")
    return f"after {done} of {mesh.rounds} rounds, which {len(mesh.others)} neighbours knew {seconds:.1f} s later"


def _others_do_well(mesh: Mesh) -> None:
    """They wait for the one that is away: so say they themselves, and the engine finds them healthy."""
    wait_until(lambda: mesh.seem_healthy(mesh.others), "the engine finds the others healthy")
    for peer in mesh.others:
        if not _connected(mesh, peer, len(mesh.others) - 1):
            raise Failed(f"all but one should be connected: {mesh.health(peer)}")


def _connected(mesh: Mesh, peer: PeerId, count: int) -> bool:
    return mesh.health(peer).endswith(f" {count} of {len(mesh.others)} neighbours connected")


# ---- trials --------------------------------------------------------------------------------------------------


def simulated(image: str, name: str, scratch: Path) -> RunFolder:
    """What the run gives in one process, in one container."""
    file = f"/etc/p2pfl/{RUN_FILE.name}"
    command = ("--entrypoint", "p2pfl", image, "simulate", file, "--run-dir", f"{IN_CONTAINER}/simulated")
    with container(name, "--network", "none", "--volume", f"{RUN_FILE}:{file}:ro", *command):
        p2pfl("collect", scratch / "simulated", f"container:{name}")
    return RunFolder.open(scratch / "simulated")


def trial(compose: Sequence[str], blow: str | None, name: str, image: str, like: RunFolder, scratch: Path) -> str:
    """What became of the mesh, in words. Raises Failed if it did not end as ``like``."""
    began = monotonic()
    with started(compose, name, image, like, scratch) as mesh:
        told = "left alone"
        if blow is not None:
            wait_until(lambda: mesh.rounds_done(VICTIM) >= BEHIND_IT, f"peer {VICTIM} has done some rounds", LONGEST)
            told = f"peer {VICTIM}: {BLOWS[blow](mesh)}"
        wait_until(mesh.have_finished, "all peers have finished", LONGEST)
        seconds = monotonic() - began
        expected = [int(blow == "died" and peer == VICTIM) for peer in range(len(mesh.containers))]
        if mesh.restarts() != expected:
            raise Failed(f"containers were started again so often: {mesh.restarts()}")
        into = Path(tempfile.mkdtemp(dir=scratch))
        p2pfl("collect", into, f"compose:{COMPOSE_FILE}")
    p2pfl("digest", into, like.root)
    for place in like.peers():
        result, other = _result(RunFolder(into).peer(place.peer)), _result(place)
        if result.missing or result.left_out:
            raise Failed(f"peer {place.peer}: {result.missing} messages missing, {result.left_out} rounds left out")
        if (result.out, result.inn) != (other.out, other.inn):
            raise Failed(f"peer {place.peer} sent or received other numbers of bytes")
    return f"{told}; the same bits, the same bytes, none missing; {seconds:.0f} s"


def _result(place: PeerFolder) -> Result:
    result = place.result()
    if result is None:
        raise Failed(f"peer {place.peer} has left no result")
    return result


def engine() -> str:
    """Its version. Raises NoEngine."""
    try:
        asked = run("docker", "version", "--format", "{{.Server.Version}}")
    except OSError as error:
        raise NoEngine(f"no engine: docker: {error.strerror}") from None
    if asked.returncode:
        raise NoEngine(f"no engine: {(asked.stderr or asked.stdout).strip()}")
    return asked.stdout.strip()


def composes() -> dict[str, tuple[str, ...]]:
    """Both versions, if they are there: {version: command}. Raises NoEngine if there is none."""
    found: dict[str, tuple[str, ...]] = {}
    for command in (("docker", "compose"), ("docker-compose",)):
        try:
            asked = run(*command, "version", "--short")
        except OSError:
            continue
        if not asked.returncode:
            found[asked.stdout.strip()] = command
    if not found:
        raise NoEngine("no compose: neither `docker compose` nor `docker-compose` is there")
    return found


@click.command(help=__doc__)
@click.argument("trials", nargs=-1, type=click.Choice(["calm", *BLOWS]))
@click.option("--image", envvar="P2PFL_IMAGE", help="Use this one; default: build it, as `docker compose up` does.")
def main(trials: Sequence[str], image: str | None) -> None:
    version, programs = engine(), composes()
    (newest, compose), *_ = programs.items()
    name = f"p2pfl-check-{os.getpid()}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What compose and `p2pfl collect` read; the GPUs stay out of it.
    os.environ |= {"COMPOSE_PROJECT_NAME": name, "COMPOSE_PROFILES": ""}
    built = ""
    if image is None:
        began = monotonic()
        output(*compose, "--file", str(COMPOSE_FILE), "build", "keys")
        image, built = "p2pfl", f", built in {monotonic() - began:.0f} s"
    os.environ["P2PFL_IMAGE"] = image
    size = int(output("docker", "image", "inspect", "--format", "{{.Size}}", image))
    click.echo(f"engine {version}; image {image}: {size / 1e9:.2f} GB{built}")
    with tempfile.TemporaryDirectory() as root:
        scratch = Path(root)
        began = monotonic()
        like = simulated(image, name, scratch)
        about = settings(like)
        click.echo(f"simulate: {about['peers']} peers, {about['rounds']} rounds; {monotonic() - began:.0f} s")
        for sort in trials or ("calm", *BLOWS):
            for number, command in programs.items() if sort == "calm" else [(newest, compose)]:
                told = trial(command, None if sort == "calm" else sort, name, image, like, scratch)
                click.echo(f"{sort}, {' '.join(command)} {number}: {told}")


if __name__ == "__main__":
    main()
