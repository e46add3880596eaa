"""``share_statistics: true``: batch-normalization statistics are averaged with the weights of the parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms import ALGORITHMS, dpsgd
from p2pfl.algorithms.dpsgd import Parameters
from p2pfl.errors import RunFileError, Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.rng import Streams
from p2pfl.run_file.load import from_dict
from p2pfl.session.build import load_data, make_algorithm
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import buffers_of, clone, parameters_of, statistics_of, weighted_sum
from tests.bodies import arrive, complete
from tests.conftest import tree
from tests.support import peer_data, random_dataset, run_rounds, setting

INPUTS, CLASSES, PEERS = 4, 3, 4
LINE = Topology.from_edges(PEERS, [(i, i + 1) for i in range(PEERS - 1)])
SHARED = {"share_statistics": True, "momentum": 0.0, "lr": 0.05, "batch": 4}
SHARING = (
    *("fedavg", "dpsgd", "dfedavgm", "cga", "ditto", "pfedsim", "flt", "sgp", "swift", "divshare"),
    *("fedavg-dec", "fedprox-dec", "fml", "fml-dec", "fedkd", "gossip", "ad-psgd"),
)
"""Methods that average whole models."""


def normalized(seed: int = 0) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, 5), nn.BatchNorm1d(5), nn.ReLU())
        return Model("normalized", backbone, 5, CLASSES)


def make(name: str, **hyper: Any) -> list[Any]:
    """Peers with one initial model; peer i has 6 + 2i samples."""
    method = ALGORITHMS[name]
    h = method.Hyper.parse({**SHARED, **hyper})
    data = [peer_data(random_dataset(6 + 2 * me, classes=CLASSES, seed=me)) for me in range(PEERS)]
    return [method(h, setting(me, PEERS, normalized(), data[me], rounds=4)) for me in range(PEERS)]


def trained_alone(peers: list[Any], model: str = "model", training: Any = None) -> list[dict[str, Tensor]]:
    """Return the statistics of each peer after its training, without a change of the peers."""
    found = []
    for peer in copy.deepcopy(peers):
        peer.train(batch=peer.hyper.batch, **training) if training else peer.local_training()
        found.append(clone(statistics_of(getattr(peer, model))))
    return found


def assert_statistics(model: nn.Module, expected: Mapping[str, Tensor]) -> None:
    found = statistics_of(model)
    assert found.keys() == expected.keys() == {"backbone.2.running_mean", "backbone.2.running_var"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)


def mean(statistics: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> Mapping[str, Tensor]:
    total = sum(weights.values())
    return weighted_sum([(weights[j] / total, statistics[j]) for j in statistics])


# ---- averages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "model"), [("fedavg", "model"), ("ditto", "averaged")])
def test_a_round_of_fedavg_averages_them_by_samples(name: str, model: str) -> None:
    peers = make(name)
    alone = trained_alone(peers, model)
    counts = [getattr(peer, model).backbone[2].num_batches_tracked.clone() for peer in peers]
    run_rounds(peers, LINE, 1)
    for i, peer in enumerate(peers):
        near = [j for j in (i - 1, i, i + 1) if 0 <= j < PEERS]
        expected = mean({j: alone[j] for j in near}, {j: 6.0 + 2 * j for j in near})
        assert_statistics(getattr(peer, model), expected)
        batches = getattr(peer, model).backbone[2].num_batches_tracked - counts[i]
        assert batches == -(-(6 + 2 * i) // 4)  # the peer's own


@pytest.mark.parametrize(
    ("name", "hyper", "training"),
    [
        ("dpsgd", {"local_epochs": 1}, {"epochs": 1}),
        ("dfedavgm", {}, {"epochs": 1}),
        ("sgp", {"local_epochs": 1}, {"epochs": 1}),
        ("dpsgd", {"local_steps": 2}, {"steps": 2}),
        ("swift", {"local_steps": 2}, {"steps": 2}),
        ("cga", {}, {"steps": 1}),
    ],
)
def test_decentralized_averages_have_the_graphs_weights(
    name: str, hyper: dict[str, Any], training: dict[str, int]
) -> None:
    peers = make(name, **hyper)
    run_rounds(peers, LINE, 1)  # so that they differ
    before, alone = [clone(statistics_of(peer.model)) for peer in peers], trained_alone(peers, training=training)
    run_rounds(peers, LINE, 1)
    sent = before if "steps" in training else alone
    for i, peer in enumerate(peers):
        row = {j: weight for j, weight in peer.weights().items() if weight}
        expected = weighted_sum([(w, alone[j] if j == i else sent[j]) for j, w in sorted(row.items())])
        assert_statistics(peer.model, expected)
        assert (statistics_of(peer.model)["backbone.2.running_var"] > 0).all()


def test_fedavg_dec_averages_them_at_the_aggregator() -> None:
    peers = make("fedavg-dec", participation=0.75)
    alone = trained_alone(peers)
    run_rounds(peers, complete(PEERS), 1)
    participants = peers[0].schedule._drawn[0].participants
    expected = mean({n: alone[n] for n in participants}, {n: 6.0 + 2 * n for n in participants})
    for n in participants:
        assert_statistics(peers[n].model, expected)


def test_pfedsim_averages_those_of_backbones_with_its_weights() -> None:
    peers = make("pfedsim", generalization=0.0)
    run_rounds(peers, LINE, 1)
    before = {i: clone(statistics_of(peer.model)) for i, peer in enumerate(peers)}
    for peer in peers:
        peer.local_training = lambda: None
        peer.personalizes_from = -1
    run_rounds(peers, LINE, 1)
    for peer in peers:
        assert_statistics(peer.model, mean({j: before[j] for j in peer.phi}, peer.phi))


@pytest.mark.parametrize("name", ["fedavg", "dpsgd", "dfedavgm", "swift"])
def test_by_default_they_are_not_sent_and_stay_local(name: str) -> None:
    peers, local = (make(name, share_statistics=shared) for shared in (True, False))
    sent = [run_rounds(each, complete(PEERS), 1) for each in (peers, local)]
    sizes = [
        {entry[1] for traffic in rounds for kinds in traffic[0].sent.values() for entry in kinds.values()}
        for rounds in sent
    ]
    statistics = sum(tensor.nbytes for tensor in statistics_of(local[0].model).values())
    assert sizes[0] == {size + statistics for size in sizes[1]}
    means = [statistics_of(peer.model)["backbone.2.running_mean"] for peer in local]
    assert not any(torch.equal(means[0], other) for other in means[1:])


@pytest.mark.parametrize("topology", [LINE, complete(PEERS)], ids=["line", "complete"])
def test_on_a_complete_graph_peers_agree_on_the_whole_model(topology: Topology) -> None:
    peers = make("fedavg")
    run_rounds(peers, topology, 3)
    outputs = [peer.predict(torch.ones(2, 1, 2, 2)) for peer in peers]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:]) == (topology is not LINE)


# ---- neighbors that are missing or have diverged ------------------------------------------------------------


def test_weight_of_a_missing_neighbor_goes_to_the_local_statistics() -> None:
    peers = make("dpsgd", local_epochs=1)
    alone = trained_alone(peers, training={"epochs": 1})
    run_rounds(peers, LINE, 1, silent=[2])
    row = peers[1].row  # of the graph, with the missing peer
    expected = weighted_sum([(row[0], alone[0]), (1.0 - row[0], alone[1])])
    assert_statistics(peers[1].model, expected)


def test_a_diverged_peer_continues_with_the_statistics_of_the_others() -> None:
    peers = make("fedavg")
    alone = trained_alone(peers)
    parameters_of(peers[1].model)["head.weight"][0, 0] = torch.nan
    run_rounds(peers, complete(PEERS), 1)
    others = [0, 2, 3]
    expected = mean({j: alone[j] for j in others}, {j: 6.0 + 2 * j for j in others})
    for peer in peers:
        assert_statistics(peer.model, expected)


@pytest.mark.parametrize("name", ["fedavg", "fedavg-dec"])
def test_statistics_that_have_diverged_are_not_averaged(name: str) -> None:
    peers = make(name, **({"participation": 0.75, "fixed_aggregator": True} if name == "fedavg-dec" else {}))
    statistics_of(peers[0].model)["backbone.2.running_mean"][0] = torch.inf
    run_rounds(peers, complete(PEERS), 1)
    taking_part = range(PEERS) if name == "fedavg" else peers[0].schedule._drawn[0].participants
    for n in taking_part:
        assert all(tensor.isfinite().all() for tensor in statistics_of(peers[n].model).values())


def test_a_model_without_them_is_refused_on_arrival() -> None:
    peer = make("dpsgd")[0]
    body = Parameters(parameters_of(peer.model))
    with pytest.raises(Unexpected, match="missing tensors"):
        arrive(body, peer.layouts())
    assert arrive(Parameters(body.values | statistics_of(peer.model)), peer.layouts())


# ---- run files ---------------------------------------------------------------------------------------------


def test_methods_that_average_whole_models_have_the_option() -> None:
    having = {name for name, method in ALGORITHMS.items() if "share_statistics" in method.Hyper.known()}
    assert {name for name in having if not name.endswith("-ssl") and name != "fedstyle"} == set(SHARING)
    with pytest.raises(OptionErrors, match="unknown key 'share_statistics'"):
        ALGORITHMS["lg-fedavg"].Hyper.parse({"share_statistics": True})
    assert not dpsgd.Hyper.parse({}).share_statistics


@pytest.mark.parametrize(
    ("algorithm", "models", "without"),
    [("fedavg", "mlp-16", "mlp-16"), ("fml", "tiny-cnn", "tiny-mixer"), ("fml-dec", "tiny-cnn", "tiny-mixer")],
)
def test_a_model_without_batch_normalization_is_refused(algorithm: str, models: str, without: str) -> None:
    options = {"meme": without} if algorithm != "fedavg" else {}
    run = from_dict(tree(algorithm={"name": algorithm, "share_statistics": True, **options}, models=models))
    data = load_data(run)
    with pytest.raises(RunFileError, match=rf"share_statistics: {without} has no batch-normalization statistics"):
        make_algorithm(run, 0, data, torch.device("cpu"), Streams(0, 0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted({*SHARING} - {"flt", "cga"}))
def test_messages_without_training_include_them_and_the_result_names_them(name: str) -> None:
    more = {"energy_start": 1.0, "energy_end": 1.0} if name == "fedkd" else {}
    algorithm = {"name": name, "share_statistics": True, "batch": 16, **more}
    graph = "star" if name == "ad-psgd" else "complete"
    changes = {"algorithm": algorithm, "graph": graph, "models": "tiny-cnn", "rounds": 2}
    results = simulate(from_dict(tree(**changes)))
    untrained = simulate(from_dict(tree(**changes, time={"train": False})), clock=True)
    assert [result.sent for result in untrained] == [result.sent for result in results]
    assert all(result.statistics.startswith("averaged") for result in results)


def test_statistics_are_running_means_and_variances() -> None:
    module = nn.Sequential(
        nn.BatchNorm1d(2),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.BatchNorm1d(2, track_running_stats=False),
    )
    module.register_buffer("mask", torch.full((3,), -torch.inf))
    assert list(statistics_of(module)) == ["0.running_mean", "0.running_var", "1.running_mean", "1.running_var"]
    assert list(statistics_of(module[0])) == ["running_mean", "running_var"]
    assert statistics_of(module)["0.running_mean"].data_ptr() == buffers_of(module)["0.running_mean"].data_ptr()
