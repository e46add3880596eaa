"""What a run asks of a Ray cluster, and how peers are divided among its nodes. Needs no Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends.hosts import BackendOptions
from launcher.backends.ray.backend import Ray
from launcher.backends.ray.plan import Demand, Node, RayOptions, plan
from launcher.errors import LaunchError
from launcher.prepare import LaunchRequest
from p2pfl.errors import MissingExtra, RunFileError

GB = 10**9


def node(number: int, total: Mapping[str, float] | None = None, **free: float) -> Node:
    return Node(f"id{number}", f"10.0.0.{number}", total or free, free)


def counts(demand: Demand, options: RayOptions, *nodes: Node) -> list[int]:
    return [len(bundle.peers) for bundle in plan(demand, options, nodes)]


def test_divides_peers_by_free_cpus_in_blocks() -> None:
    bundles = plan(Demand(20), RayOptions(), [node(1, CPU=2), node(2, CPU=8), node(3, CPU=0.5)])
    assert [bundle.peers for bundle in bundles] == [tuple(range(16)), (16, 17, 18, 19)]
    assert [dict(bundle.resources) for bundle in bundles] == [{"CPU": 8.0}, {"CPU": 2.0}]
    assert [bundle.slots for bundle in bundles] == [8, 2]


def test_takes_no_more_cpus_than_peers_can_use() -> None:
    (bundle,) = plan(Demand(3, threads=2), RayOptions(), [node(1, CPU=64)])
    assert bundle.resources == {"CPU": 6.0}
    assert bundle.slots == 3


def test_reserves_what_each_peer_asks_for() -> None:
    options = RayOptions(cpus=0.5, memory=GB)
    bundles = plan(Demand(6), options, [node(1, CPU=4, memory=2 * GB), node(2, CPU=4, memory=16 * GB)])
    assert [(len(bundle.peers), dict(bundle.resources)) for bundle in bundles] == [
        (4, {"CPU": 2.0, "memory": 4.0 * GB}),
        (2, {"CPU": 1.0, "memory": 2.0 * GB}),
    ]


def test_fills_gpus_by_fractions_and_reserves_whole_ones() -> None:
    """Ray gives out a part of one GPU, or whole ones; a peer's part must lie on one GPU."""
    bundles = plan(Demand(7), RayOptions(gpus=0.3), [node(1, CPU=8, GPU=2), node(2, CPU=8, GPU=0.4)])
    assert [(len(bundle.peers), bundle.resources["GPU"]) for bundle in bundles] == [(6, 2.0), (1, 0.3)]
    assert bundles[0].slots is None  # as gpu.peers_per_gpu says


def test_slots_of_the_run_file_win() -> None:
    assert plan(Demand(4, slots=1), RayOptions(), [node(1, CPU=4)])[0].slots is None


def test_uses_as_many_nodes_as_asked_for() -> None:
    nodes = [node(1, CPU=4), node(2, CPU=2), node(3, CPU=4)]
    assert counts(Demand(6), RayOptions(hosts=2), *nodes) == [3, 3]


def test_uses_no_more_nodes_than_peers() -> None:
    assert counts(Demand(2), RayOptions(), *(node(number, CPU=4) for number in range(5))) == [1, 1]


def test_names_what_is_asked_for_and_what_there_is() -> None:
    nodes = [node(1, {"CPU": 8, "GPU": 0}, CPU=4), node(2, CPU=4)]
    with pytest.raises(LaunchError) as error:
        plan(Demand(20), RayOptions(gpus=0.25), nodes)
    assert str(error.value) == (
        "the Ray cluster has no room: 20 peers ask for 0.25 GPUs per peer; 10.0.0.1 has 0 GPUs free of 0 GPUs (room "
        "for 0); 10.0.0.2 has 0 GPUs free of 0 GPUs (room for 0); ask for less with --option cpus=, gpus= or "
        "memory=, add nodes, or wait with --option wait=SECONDS"
    )


def test_names_a_lack_of_nodes() -> None:
    with pytest.raises(LaunchError, match=r"no room: 4 peers ask for 1 CPUs per node, and 3 nodes are asked for;"):
        plan(Demand(4), RayOptions(hosts=3), [node(1, CPU=4), node(2, CPU=0)])
    with pytest.raises(LaunchError, match="no node is alive"):
        plan(Demand(4), RayOptions(), [])


@pytest.mark.exhaustive
@given(
    peers=st.integers(1, 60),
    cpus=st.none() | st.floats(0.05, 4),
    gpus=st.sampled_from([0.0, 0.1, 0.25, 0.3, 1.0, 2.0]),
    memory=st.integers(0, 4 * GB),
    free=st.lists(st.tuples(st.floats(0, 32), st.integers(0, 8), st.integers(0, 64 * GB)), max_size=6),
    hosts=st.none() | st.integers(1, 4),
)
def test_no_bundle_exceeds_its_node_and_every_peer_has_one_place(
    peers: int, cpus: float | None, gpus: float, memory: int, free: Any, hosts: int | None
) -> None:
    nodes = [node(n, CPU=c, GPU=float(g), memory=float(m)) for n, (c, g, m) in enumerate(free)]
    options = RayOptions(hosts=hosts, cpus=cpus, gpus=gpus, memory=memory)
    try:
        bundles = plan(Demand(peers), options, nodes)
    except LaunchError:
        return
    assert [peer for bundle in bundles for peer in bundle.peers] == list(range(peers))
    rooms = list(nodes)
    for bundle in sorted(bundles, key=lambda bundle: -max(bundle.resources.values(), default=0)):
        fits = [
            each for each in rooms if all(each.free[name] >= value - 1e-3 for name, value in bundle.resources.items())
        ]
        assert fits
    assert hosts is None or len(bundles) <= hosts


def test_parses_options() -> None:
    options = RayOptions.parse(["address=10.0.0.1:6379", "cpus=.5", "gpus=0", "memory=1.5GiB", "hosts=3", "wait=0"])
    assert options == RayOptions("10.0.0.1:6379", 3, 0.5, 0.0, 3 * 2**29, 0.0)
    assert RayOptions(**options.to_dict()) == options


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "cpu=1",
            "--option cpu=1: should be KEY=VALUE with one of address, hosts, cpus, gpus, memory, wait, runtime_env",
        ),
        ("hosts", "--option hosts: should be KEY=VALUE"),
        ("hosts=0", "--option hosts=0: should be a number of nodes, at least 1"),
        ("cpus=nan", "--option cpus=nan: should be a number of CPUs per peer"),
        ("gpus=1.5", "--option gpus=1.5: should be a fraction of one GPU"),
        ("memory=2 chairs", "--option memory=2 chairs: should be a number of bytes, e.g. 500MB"),
        ("memory=4", "--option memory=4: is 4 bytes per peer; did you mean 4GB?"),
        ("runtime_env=missing.yaml", "--option runtime_env=missing.yaml: cannot be read: No such file"),
        ("address=", "--option address=: should be HOST:PORT"),
    ],
)
def test_names_a_wrong_option(text: str, problem: str) -> None:
    with pytest.raises(LaunchError) as error:
        RayOptions.parse([text])
    assert str(error.value).startswith(problem)


def test_reads_a_runtime_environment(tmp_path: Path) -> None:
    path = tmp_path / "env.yaml"
    path.write_text("pip: [einops]\n")
    assert RayOptions.parse([f"runtime_env={path}"]).runtime_env == {"pip": ["einops"]}
    path.write_text("[einops]")
    with pytest.raises(LaunchError, match="should contain a mapping"):
        RayOptions.parse([f"runtime_env={path}"])


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        (None, 0.0),
        ({"pip": ["einops"]}, 600.0),
        ({"pip": ["einops"], "config": {"setup_timeout_seconds": 1800}}, 1800.0),
        ({"config": None}, 600.0),
        ({"config": {"setup_timeout_seconds": -1}}, 600.0),
    ],
)
def test_a_runtime_environment_gets_as_long_as_its_configuration_says(
    environment: dict[str, Any] | None, seconds: float
) -> None:
    assert RayOptions(runtime_env=environment).setup_limit == seconds


def test_a_missing_ray_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"--backend ray needs ray, .*pip install 'p2pfl-mesh\[ray\]'"):
        Ray(RayOptions(), Demand(4)).hosts()


def make(tmp_path: Path, device: str, *options: str) -> Ray:
    path = tmp_path / "run.yaml"
    path.write_text(
        f"{{name: x, rounds: 1, peers: 2, data: {{dataset: digits}}, algorithm: local, device: {device}}}"
    )
    return Ray.make(BackendOptions(settings=options, request=LaunchRequest(path)))


@pytest.mark.exhaustive
def test_a_run_on_gpus_must_ask_for_them(tmp_path: Path) -> None:
    with pytest.raises(
        RunFileError, match=r"device: cuda, but no GPUs are asked for: add e\.g\. --option gpus=0\.25"
    ):
        make(tmp_path, "cuda")
    with pytest.raises(LaunchError, match=r"--option gpus=0\.5: the run file says `device: cpu`"):
        make(tmp_path, "cpu", "gpus=0.5")
    assert make(tmp_path, "auto", "gpus=0.5").demand == Demand(2)


def test_a_resumed_run_reserves_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Ray(RayOptions(cpus=0.5), None, "p2pfl-1", [{"CPU": 2.0}], ["10.0.0.7"])
    again = Ray.restore(first.saved())
    assert (again.options, again.namespace, again.bundles, again.nodes) == (
        *(first.options, first.namespace, first.bundles, first.nodes),
    )
    assert again.hosts() == []  # as in run.json
