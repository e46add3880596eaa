"""Runs of `p2pfl k8s` in the cluster: what happens to each, and how its results get back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.kubernetes import configuration
from benchmarks.kubernetes.cluster import Cluster
from benchmarks.scenarios import check_messages, p2pfl, wait
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics

RUN_FILE = Path(__file__).parents[2] / "topologies" / "mesh8.yaml"
PEERS = 8
USER = 1000
"""The user of the image's peers."""
LIMIT = 300.0
"""Seconds that a run may take, with what happens to it."""
BEFORE = 5
"""Rounds that each peer has done when something happens to it."""
SLOW = "chaos={link: {delay: 0.5}}"
"""At least a second for each round, so that there is time to restart peers in mid-run."""
OPTIONS = ("--cpus=100m", "--memory=1Gi")
"""Requests that fit on a small node: by default, a peer asks for a whole CPU, and eight peers for eight."""


@dataclass(frozen=True)
class Deployment:
    """A run in a namespace of its own, whose name is also the run's."""

    cluster: Cluster
    name: str

    @property
    def file(self) -> Path:
        return self.cluster.root / "runs" / f"{self.name}.yaml"

    @property
    def collected(self) -> RunFolder:
        return RunFolder(self.cluster.root / "runs" / self.name)

    def volume(self, peer: int) -> Path:
        return self.cluster.root / "volumes" / self.name / str(peer)

    @property
    def where(self) -> str:
        return f"--namespace={self.name}"

    @property
    def stateful_set(self) -> str:
        return f"statefulset/{self.name}"

    def kubectl(self, *arguments: object, limit: float = 60.0, text: str | None = None) -> str:
        return self.cluster.kubectl(self.where, *arguments, limit=limit, text=text)

    def prepare(self, sets: tuple[str, ...]) -> None:
        """Write the run file, and create the namespace and the peers' volumes."""
        self.file.parent.mkdir(exist_ok=True)
        text = RUN_FILE.read_text(encoding="utf-8")
        self.file.write_text(text + "".join(item.replace("=", ": ", 1) + "\n" for item in sets))
        for peer in range(PEERS):
            self.volume(peer).mkdir(parents=True)
        self.cluster.apply(
            [
                configuration.namespace(self.name),
                *configuration.volumes(self.name, [self.volume(peer) for peer in range(PEERS)]),
            ]
        )

    def options(self) -> list[object]:
        return [self.file, f"--image={self.cluster.image}", f"--name={self.name}", *OPTIONS]

    def start(self, *sets: str) -> None:
        """Write a kustomize base with new keys, and apply it."""
        self.prepare(sets)
        base = self.file.with_suffix(".k8s")
        p2pfl("k8s", *self.options(), f"--output={base}", limit=LIMIT)
        self.kubectl("apply", f"--kustomize={base}")

    # ---- what the peers have done: read from their volumes, which are folders of this machine ---------------------

    def rounds_done(self, peer: int) -> int:
        status = RunFolder(self.volume(peer)).peer(peer).status()
        return 0 if status is None else status.rounds_done

    def has_finished(self, peer: int) -> bool:
        result = RunFolder(self.volume(peer)).peer(peer).result()  # a stopped peer has one too
        return result is not None and result.phase == "finished"

    def wait_for_rounds(self, rounds: int) -> None:
        self.wait(f"round {rounds}", lambda: min(map(self.rounds_done, range(PEERS))) >= rounds)

    def resumed(self) -> dict[int, list[int]]:
        """Return {peer: the rounds in which it resumed}."""
        found: dict[int, list[int]] = {}
        for peer in range(PEERS):
            lines = RunFolder(self.volume(peer)).peer(peer).log.read_text(encoding="utf-8").splitlines()
            found[peer] = [int(line.rpartition("resumed t=")[2]) for line in lines if "resumed t=" in line]
        return found

    def wait(self, what: str, condition: Callable[[], object]) -> float:
        """Wait for ``condition()``; raise click.ClickException, which shows the pods, after the limit."""

        def checked() -> object:
            self.cluster.node.check()
            return condition()

        try:
            return wait(f"{self.name}: {what}", checked, LIMIT)
        except click.ClickException as error:
            raise click.ClickException(f"{error.message}\n{self.explain()}") from None

    def explain(self) -> str:
        """Return the state of all pods, and the latest events."""
        pods = self.kubectl("get", "pods", "--output=wide")
        events = self.kubectl("get", "events", "--sort-by=.lastTimestamp").splitlines()[-15:]
        return "\n".join([pods, *events, f"rounds done: {[self.rounds_done(peer) for peer in range(PEERS)]}"])

    def finish(self) -> None:
        """Wait for the end of the run, collect its files from the pods, and remove the pods."""
        self.wait("the end of the run", lambda: all(map(self.has_finished, range(PEERS))))
        self.wait("all pods to run", lambda: self.pods_ready() == PEERS)
        copies = self.cluster.root / "copies" / self.name
        for peer in range(PEERS):
            self.kubectl("cp", "--container=peer", f"{self.pod(peer)}:/run/p2pfl", copies / str(peer), limit=LIMIT)
        p2pfl("collect", self.collected.root, copies, limit=LIMIT)
        check_messages(self.collected)
        for files in self.collected.peers():
            if len(metrics.read(files.metrics)) == 0:
                raise click.ClickException(f"{self.name}: peer {files.peer} recorded no metrics")
        self.kubectl("delete", self.stateful_set, "--wait=false")

    def pods_ready(self) -> int:
        """Return how many peers are healthy, as Kubernetes knows it."""
        status = self.cluster.get(self.where, self.stateful_set)["status"]
        return int(status.get("readyReplicas", 0))

    def pod(self, peer: int) -> str:
        return f"{self.name}-{peer}"


# ---- scenarios, each described in the sentence it returns --------------------------------------------------------


def calm(cluster: Cluster) -> str:
    run = Deployment(cluster, "calm")
    run.start()
    run.kubectl("rollout", "status", run.stateful_set, f"--timeout={LIMIT:.0f}s", limit=LIMIT)
    run.finish()
    return f"{PEERS} pods"


def restart(cluster: Cluster) -> str:
    run = Deployment(cluster, "restart")
    run.start(SLOW)
    run.wait_for_rounds(BEFORE)
    run.kubectl("rollout", "restart", run.stateful_set)
    run.kubectl("rollout", "status", run.stateful_set, f"--timeout={LIMIT:.0f}s", limit=LIMIT)
    run.finish()
    resumed = run.resumed()
    rounds = _rounds(run)
    inside = sum(any(0 < t < rounds for t in times) for times in resumed.values())
    if not inside:
        raise click.ClickException(f"restart: no peer was restarted in mid-run: {resumed}")
    return f"all pods restarted one after the other from round {BEFORE} of {rounds} on, {inside} of them in mid-run"


def killed(cluster: Cluster) -> str:
    run = Deployment(cluster, "killed")
    run.start(SLOW)
    run.wait_for_rounds(BEFORE)
    status = RunFolder(run.volume(3)).peer(3).status()
    assert status is not None
    run.kubectl("exec", run.pod(3), "--container=peer", "--", "sh", "-c", f"kill -KILL {status.pid}")
    if not run.kubectl("logs", run.pod(3), "--container=peer", "--tail=1").strip():
        raise click.ClickException("killed: `kubectl logs` shows no line of peer 3")
    run.wait("the kubelet to restart the killed process", lambda: _restarts(run, 3) == 1)
    deleted = [run.pod(peer) for peer in (1, 5)]
    run.kubectl("delete", "pod", *deleted, "--force", "--grace-period=0")
    run.finish()
    resumed = {peer: times for peer, times in run.resumed().items() if times}
    if sorted(resumed) != [1, 3, 5]:
        raise click.ClickException(f"killed: expected peers 1, 3 and 5 to resume: {resumed}")
    times = ", ".join(str(resumed[peer][-1]) for peer in (3, 1, 5))
    return f"a process killed, then two pods deleted by force; resumed in rounds {times} of {_rounds(run)}"


def scaled(cluster: Cluster) -> str:
    run = Deployment(cluster, "scaled")
    run.start(SLOW)
    run.wait_for_rounds(BEFORE)
    run.kubectl("scale", run.stateful_set, "--replicas=0")
    seconds = run.wait("all pods to end", lambda: not cluster.get(run.where, "pods")["items"])
    done = [run.rounds_done(peer) for peer in range(PEERS)]
    run.kubectl("scale", run.stateful_set, f"--replicas={PEERS}")
    run.finish()
    resumed = run.resumed()
    if [times[-1:] for times in resumed.values()] != [[rounds] for rounds in done]:
        raise click.ClickException(f"scaled: peers stopped after rounds {done}, but resumed in {resumed}")
    return f"stopped in {seconds:.0f} s after rounds {min(done)} to {max(done)} of {_rounds(run)}, and started again"


def keys(cluster: Cluster) -> str:
    run = Deployment(cluster, "keys")
    run.prepare(())
    folder = run.file.with_suffix(".keys")
    p2pfl("keys", "new", run.file, "--into", folder, limit=LIMIT)
    manifests = p2pfl("k8s", *run.options(), f"--keys={folder}", limit=LIMIT)
    run.kubectl("apply", "--server-side", "--filename=-", text=manifests)
    run.wait("all pods to run", lambda: run.pods_ready() == PEERS)
    for peer in range(PEERS):
        script = "ls /keys /own-key /public-keys 2> /dev/null; grep -cE ' /(keys|own-key|public-keys) ' /proc/mounts"
        *seen, mounts = run.kubectl("exec", run.pod(peer), "--container=peer", "--", "sh", "-c", script).split()
        if seen != ["/keys:", f"{peer:02d}.key", "public.yaml"] or mounts != "1":
            raise click.ClickException(f"keys: peer {peer} sees {seen} in {mounts} mounts")
    run.finish()
    return "keys as a Secret in the manifests; each peer sees only its own and the public keys"


def _rounds(run: Deployment) -> int:
    return len(metrics.read(run.collected.peer(0).metrics))


def _restarts(run: Deployment, peer: int) -> int:
    (container,) = run.cluster.get(run.where, f"pod/{run.pod(peer)}")["status"]["containerStatuses"]
    return int(container["restartCount"])


SCENARIOS = {"calm": calm, "restart": restart, "killed": killed, "scaled": scaled, "keys": keys}
