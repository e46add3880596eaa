"""FedGen against its paper: rounds by hand in float64, one generator on a complete graph, divergence, options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from p2pfl import rng
from p2pfl.algorithms.fedgen import FedGen, GeneratorHyper
from p2pfl.algorithms.lg_fedavg import LGFedAvg
from p2pfl.messaging.topology import Topology
from p2pfl.models import Model
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest, has_diverged
from tests.support import messages, payload, peer_data, random_dataset, run_rounds, setting

INPUTS, FEATURES, CLASSES = 4, 5, 3
LINE = Topology.from_edges(3, [(0, 1), (1, 2)])
COMPLETE = Topology.from_edges(4, [(i, j) for i in range(4) for j in range(i)])
NEIGHBORHOODS = ([0, 1], [0, 1, 2], [1, 2])
PLAIN = {"lr": 0.2, "batch": 64, "noise": 3, "generator_steps": 3, "generator_lr": 0.01}
"""All samples in one batch, so that an epoch is a step."""
Weights = dict[str, Tensor]


def network(me: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(me)
        return Model("two layers", nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, FEATURES)), FEATURES, CLASSES)


def make(peers: int = 3, of: Any = FedGen, samples: int = 6, **given: Any) -> list[Any]:
    """Peer i has 6 + 2i samples and weights of its own; heads start equal."""
    if of is FedGen:
        given = {**PLAIN, **given}
    made = []
    for me in range(peers):
        data = peer_data(random_dataset(samples + 2 * me, classes=CLASSES, seed=me), test=range(4))
        made.append(of(of.Hyper.parse(given), setting(me, peers, network(me), data)))
    return made


# ---- rounds by hand ------------------------------------------------------------------------------------------


def weights_of(module: nn.Module) -> Weights:
    return {name: value.detach().double().clone() for name, value in module.named_parameters()}


def generated(g: Weights, noise: Tensor, y: Tensor) -> Tensor:
    x = torch.cat([noise.double(), one_hot(y, CLASSES).double()], dim=1) @ g["layers.0.weight"].T + g["layers.0.bias"]
    x = (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt() * g["layers.1.weight"] + g["layers.1.bias"]
    return x.clamp(min=0.0) @ g["layers.3.weight"].T + g["layers.3.bias"]


class Reference:
    def __init__(self, peer: FedGen) -> None:
        self.peer, self.h = peer, peer.hyper
        self.w, self.g = weights_of(peer.model), weights_of(peer.generator)
        raw, self.y = peer.data.train.take(np.arange(len(peer.data.train)))
        self.x = raw.double().flatten(1) / 255.0
        self.counts = np.bincount(peer.data.train.labels, minlength=CLASSES)
        self.heard: dict[int, Any] = {}

    def draw(self, stream: np.random.Generator, samples: int) -> tuple[Tensor, Tensor]:
        noise = stream.random((samples, self.h.noise), dtype=np.float32)
        counts = sum(self.heard.values())
        return torch.from_numpy(noise), torch.from_numpy(
            stream.choice(CLASSES, size=samples, p=counts / counts.sum())
        )

    def scores(self, z: Tensor) -> Tensor:
        return z @ self.w["head.weight"].T + self.w["head.bias"]

    def train(self) -> None:
        """Eq. 5."""
        w = {name: value.requires_grad_() for name, value in self.w.items()}
        features = self.x @ w["backbone.1.weight"].T + w["backbone.1.bias"]
        loss = cross_entropy(self.scores(features), self.y)
        if self.heard:
            noise, y = self.draw(self.peer.streams.numpy("generated"), len(self.y))
            loss = loss + self.h.generated * cross_entropy(self.scores(generated(self.g, noise, y)), y)
        gradients = torch.autograd.grad(loss, list(w.values()))
        self.w = {name: (w[name] - self.h.lr * g).detach() for name, g in zip(w, gradients, strict=True)}

    def train_generator(self, stream: np.random.Generator) -> None:
        """Eq. 4, by Adam written out."""
        first, second = ({name: torch.zeros_like(value) for name, value in self.g.items()} for _ in range(2))
        for step in range(1, self.h.generator_steps + 1):
            noise, y = self.draw(stream, self.h.batch)
            g = {name: value.requires_grad_() for name, value in self.g.items()}
            gradients = torch.autograd.grad(cross_entropy(self.scores(generated(g, noise, y)), y), list(g.values()))
            for name, gradient in zip(g, gradients, strict=True):
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                update = first[name] / (1 - 0.9**step) / ((second[name] / (1 - 0.999**step)).sqrt() + 1e-8)
                self.g[name] = (g[name] - self.h.generator_lr * update).detach()


def test_rounds_follow_the_papers_algorithm() -> None:
    expected, peers = [Reference(peer) for peer in make()], make()
    start = weights_of(peers[0].generator)
    run_rounds(peers, LINE, 3)
    for t in range(3):
        for one in expected:
            one.train()
        n = [len(one.y) for one in expected]
        heads = [{name: one.w[name] for name in ("head.weight", "head.bias")} for one in expected]
        for one, near in zip(expected, NEIGHBORHOODS, strict=True):
            for name in heads[0]:
                one.w[name] = torch.stack([n[j] * heads[j][name] for j in near]).sum(0) / sum(n[j] for j in near)
            one.heard |= {j: expected[j].counts for j in near}
            one.train_generator(rng.shared(peers[0].seed, "net.shared", t))
    for peer, one in zip(peers, expected, strict=True):
        for module, values in ((peer.model, one.w), (peer.generator, one.g)):
            for name, value in module.named_parameters():
                if name == "layers.0.bias":
                    continue  # batch normalization removes it, so Adam scales up the rounding errors of its gradient
                torch.testing.assert_close(value.double(), values[name], atol=2e-4, rtol=1e-3, msg=name)
    assert max(float((expected[0].g[name] - start[name]).abs().max()) for name in start) > 0.02
    assert peers[0].labels == {j: tuple(expected[j].counts) for j in (0, 1)}


# ---- properties ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_peers_on_a_complete_graph_hold_one_generator_and_one_head(participation: float) -> None:
    peers = make(4, participation=participation)
    start = digest(peers[0].generator.state_dict())
    run_rounds(peers, COMPLETE, 3)
    assert len({digest([peer.generator.state_dict(), peer.shared_part()]) for peer in peers}) == 1
    assert digest(peers[0].generator.state_dict()) != start
    assert len({digest(peer.model.backbone.state_dict()) for peer in peers}) == 4


def test_without_weight_on_generated_features_it_is_lg_fedavg() -> None:
    peers, plain = make(generated=0.0), make(of=LGFedAvg, lr=PLAIN["lr"], batch=PLAIN["batch"])
    for group in (peers, plain):
        run_rounds(group, LINE, 3)
    assert [digest(peer.model.state_dict()) for peer in peers] == [digest(peer.model.state_dict()) for peer in plain]


def test_only_heads_and_counts_travel() -> None:
    traffic = run_rounds(make(), LINE, 2)
    for t in range(2):
        for one, degree in zip(traffic, (1, 2, 1), strict=True):
            assert messages(one[t].sent, "Labeled") == degree
            assert payload(one[t].sent) == 4 * degree * (FEATURES + 1) * CLASSES


def test_missing_neighbor_is_left_out() -> None:
    peers = make()
    run_rounds(peers, LINE, 1, silent=[2])
    assert sorted(peers[1].labels) == [0, 1]


def test_counts_that_are_none_are_left_out() -> None:
    peers = make()
    for peer, labels in zip(peers[:2], [(0, 0, 0), (1, 2)], strict=True):
        whole = peer.local_part()
        peer.local_part = lambda whole=whole, labels=labels: replace(whole, labels=labels)
    run_rounds(peers, LINE, 2)
    assert [sorted(peer.labels) for peer in peers] == [[], [2], [2]]
    assert not any(map(has_diverged, peers[0].model.state_dict().values()))


def test_peer_with_one_sample_learns_from_generated_features_too() -> None:
    peers = make(samples=1, batch=1)
    assert len(peers[0].data.train) == 1
    run_rounds(peers, LINE, 2)
    assert not any(map(has_diverged, peers[0].model.state_dict().values()))


def test_diverged_generator_is_replaced_by_the_one_from_before() -> None:
    peers = make(generator_lr=1e30)
    before = digest(peers[0].generator.state_dict())
    run_rounds(peers, LINE, 2)
    assert {digest(peer.generator.state_dict()) for peer in peers} == {before}
    assert not any(map(has_diverged, peers[1].model.state_dict().values()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given",
    [
        *({"generated": 0.5}, {"noise": 4}, {"generator_hidden": 2}, {"generator_steps": 5}, {"generator_lr": 0.05}),
        {"participation": 0.5},
    ],
    ids=lambda given: next(iter(given)),
)
def test_every_option_changes_what_is_learned(given: dict[str, Any]) -> None:
    changed, plain = make(**given), make()
    for peers in (changed, plain):
        run_rounds(peers, LINE, 3)
    assert digest(changed[1].model.state_dict()) != digest(plain[1].model.state_dict())


@pytest.mark.parametrize("wrong", [{"generated": -1.0}, {"noise": 0}, {"generator_steps": -1}, {"generator_lr": 0.0}])
def test_out_of_range_option_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionErrors, match=next(iter(wrong))):
        GeneratorHyper.parse(wrong)
