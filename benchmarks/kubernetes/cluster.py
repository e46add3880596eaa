"""A cluster of one node: its control plane, its container runtime and its DNS, without a kube-proxy.

The services of `p2pfl k8s` are headless, so that pods need no kube-proxy: DNS answers with their addresses.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.kubernetes import configuration, images
from benchmarks.kubernetes.node import ADDRESS, HIDDEN, Node, node
from benchmarks.scenarios import NotInstalled, run, wait

PROGRAMS = {
    "kube-apiserver": "Kubernetes",
    "kube-controller-manager": "Kubernetes",
    "kube-scheduler": "Kubernetes",
    "kubelet": "Kubernetes",
    "kubectl": "Kubernetes, or Debian's kubernetes-client",
    "coredns": "CoreDNS",
    "etcd": "Debian's etcd-server",
    "containerd": "Debian's containerd",
    "ctr": "Debian's containerd",
    "runc": "Debian's runc",
    "catatonit": "Debian's catatonit",
    "ip": "Debian's iproute2",
    "openssl": "Debian's openssl",
    "nsenter": "Debian's util-linux",
    "setpriv": "Debian's util-linux",
    "unshare": "Debian's util-linux",
}
"""What must be on PATH, and where it comes from."""
COMMAND_LIMIT = 60.0
"""Seconds that a command to the cluster may take."""
START_LIMIT = 120.0
IMPORT_LIMIT = 600.0


def missing() -> list[str]:
    """Return what this host lacks, as texts."""
    found = [f"{name} (from {origin})" for name, origin in PROGRAMS.items() if shutil.which(name) is None]
    if not Path(configuration.PLUGINS, "bridge").exists():
        found.append(f"{configuration.PLUGINS}/bridge (from Debian's containernetworking-plugins)")
    if os.geteuid() != 0:
        found.append("the right to create namespaces (run this as root)")
    return found


@dataclass(frozen=True)
class Cluster:
    """A running cluster. ``image``: the name of the imported image."""

    root: Path
    node: Node
    image: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.root / "kubeconfig")}

    def run(self, *command: object, limit: float = COMMAND_LIMIT, text: str | None = None) -> str:
        """Run a command on the node and return its output.

        Args:
            text: its input.

        Raises:
            click.ClickException: it failed, or took longer than ``limit`` seconds.
        """
        self.node.check()
        return run(*self.node.inside(*command), env=self.environment, limit=limit, text=text or "")

    def kubectl(self, *arguments: object, limit: float = COMMAND_LIMIT, text: str | None = None) -> str:
        """Run kubectl. Raises as ``run``."""
        return self.run("kubectl", f"--request-timeout={limit:.0f}s", *arguments, limit=limit + 5, text=text)

    def get(self, *arguments: object) -> Any:
        """Return objects of the cluster, as plain values. Raises as ``run``."""
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def apply(self, objects: Iterable[dict[str, Any]]) -> None:
        """Create objects. Raises as ``run``."""
        self.kubectl("apply", "--filename=-", text=yaml.safe_dump_all(objects))

    def answers(self, *arguments: object) -> bool:
        """Whether a kubectl command succeeds."""
        with suppress(click.ClickException):
            self.kubectl(*arguments)
            return True
        self.node.check()
        return False


@contextmanager
def cluster(root: Path, image: Path | None, store: Path | None) -> Iterator[Cluster]:
    """Start a cluster with its files in ``root``, an empty folder, and remove it afterwards.

    Args:
        image: archive with the project's image.
        store: containerd's store, which is kept with the imported image; None for one in ``root``.

    Raises:
        NotInstalled: programs are missing.
        click.ClickException: a program failed, or did not start in time.
    """
    if lacking := missing():
        raise NotInstalled(", ".join(lacking))
    if image is None:
        raise NotInstalled("an image: build it with `docker build`, `docker save` it, and name the file as --image")
    store = (store or root / "store").resolve()
    for folder in (root, store):
        if any(folder.is_relative_to(hidden) for hidden in HIDDEN):
            raise click.ClickException(f"{folder}: choose a folder outside of {', '.join(HIDDEN)}")
    store.mkdir(parents=True, exist_ok=True)
    with node(root) as held:
        wait("the node's namespaces", held.is_ready)
        started = Cluster(root, held, images.name(image))
        _import(started, image, store)
        _start(started, store)
        yield started


def _import(started: Cluster, image: Path, store: Path) -> None:
    """Import the images with a containerd that runs no pods; remove what a killed check left in the store."""
    pause = started.root / "pause.tar"
    program = shutil.which("catatonit")
    assert program is not None
    images.write_pause(pause, configuration.PAUSE, Path(program))
    _containerd(started, store, with_cri=False)
    ctr = ("ctr", f"--address={configuration.SOCKET}", "--namespace=k8s.io")
    if containers := started.run(*ctr, "containers", "list", "--quiet").split():
        started.run(*ctr, "containers", "remove", *containers)
    present = started.run(*ctr, "images", "list", "--quiet").split()
    mark, digest = store / "imported", images.digest(image)
    if started.image not in present or not mark.exists() or mark.read_text() != digest:
        mark.unlink(missing_ok=True)
        click.echo(f"importing {image}; kept in {store}", err=True)
        started.run(*ctr, "images", "import", image.resolve(), limit=IMPORT_LIMIT)
        mark.write_text(digest)
    started.run(*ctr, "images", "import", pause)
    started.node.stop("containerd")


def _containerd(started: Cluster, store: Path, *, with_cri: bool) -> None:
    file = started.root / "containerd.toml"
    file.write_text(configuration.containerd(store, started.root / "network", with_cri=with_cri))
    started.node.daemon("containerd", "containerd", "--config", file)

    def answers() -> bool:
        with suppress(click.ClickException):
            return bool(started.run("ctr", f"--address={configuration.SOCKET}", "version"))
        started.node.check()
        return False

    wait("containerd", answers, START_LIMIT)


def _start(started: Cluster, store: Path) -> None:
    """Start all programs of the cluster, and wait until its node is ready and its DNS answers."""
    root, daemon = started.root, started.node.daemon
    token = secrets.token_hex(16)
    kubeconfig, key = root / "kubeconfig", root / "service-accounts.key"
    kubeconfig.write_text(configuration.kubeconfig(token))
    (root / "tokens").write_text(f'{token},admin,admin,"system:masters"\n')
    (root / "kubelet.yaml").write_text(configuration.kubelet(root, started.node.cgroup))
    (root / "Corefile").write_text(configuration.dns(kubeconfig))
    (root / "network").mkdir()
    (root / "network" / "pods.conflist").write_text(configuration.network())
    for name in ("volumes", "kubelet"):
        (root / name).mkdir()
    started.run("openssl", "genrsa", "-out", key, "2048")
    _containerd(started, store, with_cri=True)
    daemon("etcd", "etcd", "--data-dir=/run/etcd", "--log-level=warn")
    daemon(
        "kube-apiserver", "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--cert-dir=/run/certificates",
        f"--bind-address={ADDRESS}", f"--advertise-address={ADDRESS}", "--secure-port=6443",
        "--service-cluster-ip-range=10.96.0.0/16", "--endpoint-reconciler-type=none",
        f"--token-auth-file={root / 'tokens'}", "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--kubelet-preferred-address-types=InternalIP",  # the node's name is in no DNS
    )  # fmt: skip
    wait("the API server", lambda: started.answers("get", "--raw=/readyz"), START_LIMIT)
    daemon(
        "kube-controller-manager", "kube-controller-manager", f"--kubeconfig={kubeconfig}", "--leader-elect=false",
        f"--service-account-private-key-file={key}", "--cert-dir=/run/certificates",
        "--node-monitor-grace-period=5m",  # on a busy machine
    )  # fmt: skip
    daemon("kube-scheduler", "kube-scheduler", f"--kubeconfig={kubeconfig}", "--leader-elect=false")
    daemon(
        "kubelet", "kubelet", f"--config={root / 'kubelet.yaml'}", f"--kubeconfig={kubeconfig}",
        f"--root-dir={root / 'kubelet'}", "--cert-dir=/run/certificates", f"--hostname-override={configuration.NODE}",
        f"--node-ip={ADDRESS}",
    )  # fmt: skip
    daemon("coredns", "coredns", "-conf", root / "Corefile")
    ready = ("wait", "--for=condition=Ready", f"node/{configuration.NODE}", "--timeout=1s")
    wait("the node to be ready", lambda: started.answers(*ready), START_LIMIT)
    wait("DNS", lambda: _is_ready(started), START_LIMIT)


def _is_ready(started: Cluster) -> bool:
    """Whether the DNS knows the cluster's services."""
    script = f"import urllib.request; urllib.request.urlopen({configuration.READY!r}, timeout=5)"
    with suppress(click.ClickException):
        started.run("python3", "-Ic", script)
        return True
    started.node.check()
    return False
