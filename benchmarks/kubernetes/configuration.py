"""The configuration of the cluster's programs, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kubernetes.node import ADDRESS, BRIDGE, PODS

API = f"https://{ADDRESS}:6443"
NODE = "node"
PAUSE = "docker.io/library/p2pfl-pause:1"
PLUGINS = "/usr/lib/cni"
"""Where Debian's containernetworking-plugins are."""
READY = f"http://{ADDRESS}:8181/ready"

CONTAINERD = """\
version = 2
root = "{store}"
state = "/run/containerd-state"
disabled_plugins = [{disabled}]
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true  # root of a virtual machine may lack the right to lower it
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{network}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
"""
CRI = "io.containerd.grpc.v1.cri"
SOCKET = "/run/containerd.sock"

DNS = """\
. {{
    bind {address}
    errors
    ready {address}:8181
    kubernetes cluster.local {{
        kubeconfig {kubeconfig}
        ttl 5
    }}
    cache 5
}}
"""


def containerd(store: Path, network: Path, *, with_cri: bool) -> str:
    """Return the configuration of containerd; without CRI, it touches no container by itself."""
    disabled = "" if with_cri else json.dumps(CRI)
    return CONTAINERD.format(
        store=store, network=network, pause=PAUSE, plugins=PLUGINS, disabled=disabled, socket=SOCKET
    )


def network() -> str:
    """Return the network plug-in's configuration: pods on one bridge, on which the node has its address."""
    addresses = {"type": "host-local", "ranges": [[{"subnet": PODS}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "ipam": addresses}
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}, indent=1)


def kubeconfig(token: str) -> str:
    """Return a kubeconfig of an administrator. No certificate is checked: the network is the node's alone."""
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "admin"}}],
            "current-context": "here",
        }
    )


def kubelet(root: Path, cgroup: str) -> str:
    """Return the kubelet's configuration.

    Its API is open, and it evicts nothing and removes no image when a disk is nearly full: the disk is the host's.
    """
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": ADDRESS,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroup}",
            "clusterDNS": [ADDRESS],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": f"unix://{SOCKET}",
            "evictionHard": dict.fromkeys(("memory.available", "nodefs.available", "imagefs.available"), "0%"),
            "failCgroupV1": False,
            "failSwapOn": False,
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(root / "pod-logs"),
            "resolvConf": "",
            "volumePluginDir": str(root / "volume-plugins"),
        }
    )


def dns(kubeconfig: Path) -> str:
    """Return the Corefile of CoreDNS, which runs outside of pods."""
    return DNS.format(address=ADDRESS, kubeconfig=kubeconfig)


# ---- objects -----------------------------------------------------------------------------------------------------


def namespace(name: str) -> dict[str, Any]:
    """Return a namespace that enforces the Pod Security Standard *restricted*."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def volumes(name: str, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a volume in each folder, for the claims of the StatefulSet ``name`` in the namespace of that name."""
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": f"{name}-{number}"},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteOnce"],
                "claimRef": {"namespace": name, "name": f"run-{name}-{number}"},
                "local": {"path": str(folder)},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        }
        for number, folder in enumerate(folders)
    ]
