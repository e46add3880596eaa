"""Run eight peers in a real Kubernetes of one node, started on this machine for it. Requires root.

\b
    docker build -t p2pfl . && docker save p2pfl --output image.tar
    sudo scripts/check-k8s --image image.tar
    sudo scripts/check-k8s --image image.tar --store /var/tmp/store killed keys

\b
    calm          no fault
    restart       `kubectl rollout restart` in mid-run
    killed        a process killed (kill -9), and two pods deleted with --force, in mid-run
    scaled        the StatefulSet scaled to 0 in mid-run, and to 8 again
    keys          keys made before, in the Secret of the manifests; each pod sees only its own

The API server, controllers, scheduler, kubelet, etcd, containerd and CoreDNS are those on PATH; nothing is
downloaded. They run in namespaces of their own, with which all of their processes, mounts and interfaces disappear.
Pods have volumes on this host's disk, and a namespace that enforces the Pod Security Standard *restricted*.

Each run must end with the digests of `p2pfl simulate`, by the same version of torch as in the image. Prints a
Markdown table. Exit code 1: a scenario failed; 3: programs, the image or root are absent, nothing was checked.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from benchmarks.kubernetes.cluster import Cluster, cluster
from benchmarks.kubernetes.scenarios import RUN_FILE, SCENARIOS, Deployment
from benchmarks.scenarios import command, compared

OPTIONS = (
    click.Option(
        ["--image"],
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Archive of the project's image, written by `docker save`. Required.",
    ),
    click.Option(
        ["--store"],
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder of containerd's images, kept for the next check. Default: import the image each time.",
    ),
)


def same(started: Cluster, name: str) -> bool:
    # One simulation for all: names of runs, and delays of messages, change no digest.
    file = started.root / "runs" / RUN_FILE.name
    if not file.exists():
        shutil.copy(RUN_FILE, file)
    return compared(file, Deployment(started, name).collected)


main = command(SCENARIOS, cluster, same, __doc__, "p2pfl-k8s-", OPTIONS)

if __name__ == "__main__":
    main()
