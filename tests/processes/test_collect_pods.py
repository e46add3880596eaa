"""`p2pfl collect` from pods, with a fake kubectl."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import Host, Invoke, hosts_by_peer

KUBECTL = """#!/bin/bash
# Pods are folders beside bin.
here=$(dirname "$0")/../pods
echo "$*" >> "$here/calls"
case "$*" in
    "get pods --namespace=lab --selector=app.kubernetes.io/name=p2pfl,app.kubernetes.io/component=peer,app.kubernetes.io/instance=mesh --output=json")
        cat "$here/list.json" ;;
    "get pods "*) echo '{"items": []}' ;;
    "exec --pod-running-timeout=10s --namespace=lab "*" --container=peer -- tar -C /run/p2pfl "*)
        [ -d "$here/$4" ] || { echo 'container not found ("peer")' >&2; exit 1; }
        pod=$4; shift 9; cd "$here/$pod" && tar "$@" ;;
    *) exit 64 ;;
esac
"""  # noqa: E501


@pytest.fixture
def start(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Start fake pods ``mesh-N`` in namespace ``lab``; those of ``broken`` have no container. Return their folder."""
    pods, programs = tmp_path / "pods", tmp_path / "bin"
    pods.mkdir()
    programs.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def make(*peers: int, broken: tuple[int, ...] = ()) -> Path:
        for peer in peers:
            host(f"mesh-{peer}", peer).root.rename(pods / f"mesh-{peer}")
        names = [f"mesh-{peer}" for peer in sorted({*peers, *broken}, reverse=True)]
        items = [{"metadata": {"namespace": "lab", "name": name}} for name in names]
        (pods / "list.json").write_text(json.dumps({"items": items}))
        return pods

    return make


def test_collects_from_all_pods_of_a_run(start: Callable[..., Path], into: Path, invoke: Invoke) -> None:
    pods = start(0, 1, 2, 3)
    outcome = invoke("collect", into, "--k8s", "lab/mesh")
    assert outcome.exit_code == 0, outcome.stderr
    folder = RunFolder.open(into)
    assert hosts_by_peer(folder) == {peer: f"mesh-{peer}" for peer in range(4)}
    assert outcome.stdout.splitlines()[0] == "pod:lab/mesh-0: peer 0"
    assert folder.info["collected"]["sources"] == ["k8s:lab/mesh"]
    assert "--exclude=checkpoint*" in (pods / "calls").read_text()
    assert not folder.peer(0).checkpoint.exists()
    assert invoke("collect", into, "--checkpoints").exit_code == 0  # from the same pods
    assert folder.peer(0).checkpoint.exists()


def test_reports_a_pod_without_a_running_peer(start: Callable[..., Path], into: Path, invoke: Invoke) -> None:
    start(0, 1, 2, broken=(3,))
    outcome = invoke("collect", into, "--k8s", "lab/mesh")
    assert outcome.exit_code == 1
    assert outcome.stderr.splitlines()[-1] == 'pod:lab/mesh-3: cannot be read: container not found ("peer")'
    assert sorted(hosts_by_peer(RunFolder.open(into))) == [0, 1, 2]


def test_collects_from_one_pod(start: Callable[..., Path], into: Path, invoke: Invoke) -> None:
    start(0, 1)
    assert invoke("collect", into, "pod:lab/mesh-1").exit_code == 0
    assert hosts_by_peer(RunFolder.open(into)) == {1: "mesh-1"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k8s"], "k8s:: no pods of peers"),
        (["--k8s", "lab/other"], "k8s:lab/other: no pods of peers; name the run as NAMESPACE/NAME, or start it"),
        (["--k8s", "lab/--all"], "k8s:lab/--all: expected k8s:NAME"),
        (["pod:lab/x --all"], "expected k8s:NAME, k8s:NAMESPACE/NAME or pod:NAMESPACE/NAME"),
    ],
)
def test_reports_runs_that_do_not_exist(
    start: Callable[..., Path], into: Path, invoke: Invoke, arguments: list[str], words: str
) -> None:
    start(0)
    outcome = invoke("collect", into, *arguments)
    assert outcome.exit_code == 1
    assert words in outcome.stderr
