"""``share``: the part of a model that peers send and average; the rest stays local."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import RunFileError
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.run_file.load import from_dict
from p2pfl.simulation.simulate import simulate
from p2pfl.tensors import clone
from tests.conftest import tree
from tests.support import payload, peer_data, random_dataset, run_rounds, setting

INPUTS, HIDDEN, CLASSES, PEERS = 4, 5, 3, 3
LINE = Topology.from_edges(PEERS, [(0, 1), (1, 2)])
NAMES = {
    "backbone": {"backbone.1.weight", "backbone.1.bias", "backbone.3.bias"},
    "frozen": {"backbone.3.weight"},
    "head": {"head.weight", "head.bias"},
}
PARTS = {
    "trainable": NAMES["backbone"] | NAMES["head"],
    "all": NAMES["backbone"] | NAMES["frozen"] | NAMES["head"],
    "head": NAMES["head"],
    "backbone": NAMES["backbone"],
    ("backbone.1.*", "*.bias"): {"backbone.1.weight", "backbone.1.bias", "backbone.3.bias", "head.bias"},
}
CHOOSING = ("fedavg", "dfedavgm", "dpsgd", "ditto", "divshare")


def partly_frozen() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))
        layers[3].weight.requires_grad_(False)
        return Model("partly frozen", layers, HIDDEN, CLASSES)


def make(name: str, share: Any) -> list[Any]:
    method = ALGORITHMS[name]
    more = {"local_epochs": 1} if name == "dpsgd" else {}
    h = method.Hyper.parse({"share": share, "momentum": 0.0, "lr": 0.1, "batch": 64, **more})
    data = [peer_data(random_dataset(6, classes=CLASSES, seed=me)) for me in range(PEERS)]
    return [method(h, setting(me, PEERS, partly_frozen(), data[me], rounds=4)) for me in range(PEERS)]


def model_of(peer: Any) -> Model:
    model: Model = getattr(peer, "averaged", peer.model)
    return model


def trained_alone(peers: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Return each peer's model after its training, without a change of the peers."""
    copies = copy.deepcopy(peers)
    for peer in copies:
        peer.local_training() if hasattr(peer, "local_training") else train(peer)
    return [clone(model_of(peer).state_dict()) for peer in copies]


def train(peer: Any) -> None:
    peer.optimizer = peer.hyper.make_optimizer(peer.model.parameters())
    peer.train(epochs=1, batch=peer.hyper.batch)


@pytest.mark.parametrize("share", PARTS, ids=str)
@pytest.mark.parametrize("name", CHOOSING)
def test_shared_part_is_sent_and_averaged_and_the_rest_stays_local(name: str, share: Any) -> None:
    peers = make(name, share)
    local = trained_alone(peers)
    traffic = run_rounds(peers, LINE, 1)[0]
    sizes = {tensor: value.numel() for tensor, value in local[0].items()}
    assert payload(traffic[0].sent) == 4 * sum(sizes[tensor] for tensor in PARTS[share])
    for tensor, value in model_of(peers[1]).state_dict().items():
        mean = torch.stack([each[tensor] for each in local]).mean(0)
        expected = mean if tensor in PARTS[share] else local[1][tensor]
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (["head.*", "stem.*"], r"algorithm\.share\.1: 'stem\.\*' matches no parameter; there are backbone\."),
        ("heads", r"algorithm\.share: .*'head'"),
    ],
)
@pytest.mark.parametrize("name", ["fedavg", "dpsgd", "fml", "fedavg-dec"])
def test_what_does_not_exist_is_refused_by_name(name: str, share: Any, message: str) -> None:
    settings = tree(algorithm={"name": name, "share": share}, models="tiny-cnn")
    with pytest.raises(RunFileError, match=message):
        simulate(from_dict(settings))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["flt", "fml", "fedkd", "fedavg-dec", "fedprox-dec", "fml-dec"])
def test_other_methods_average_a_part_too(name: str) -> None:
    more = {"manifold": "none"} if name == "flt" else {}
    algorithm = {"name": name, "batch": 16, "share": "backbone", **more}
    run = from_dict(tree(algorithm=algorithm, models="tiny-cnn", peers=3, rounds=2))
    assert all(result.accuracy is not None for result in simulate(run))
