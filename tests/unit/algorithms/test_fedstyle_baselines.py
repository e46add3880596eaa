"""FedStyle's baselines against its appendix C: whole rounds in float64, what is sent, every option, divergence."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from p2pfl.algorithms.fedavg_ssl import FedAvgSSL
from p2pfl.algorithms.fedstyle_baselines import APFLSSL, DittoSSL, FedPerSSL, FedProxSSL, FedRepSSL
from p2pfl.learning.evaluation import evaluate
from p2pfl.options import OptionErrors
from p2pfl.tensors import digest, has_diverged
from tests.fedstyle_reference import (
    ALONE,
    FEATURES,
    LINE,
    SIDE,
    Reference,
    Weights,
    agree,
    complete,
    hyper,
    make,
    reference_rounds,
)
from tests.support import payload, run_rounds

ALL = (FedAvgSSL, FedPerSSL, FedRepSSL, FedProxSSL, APFLSSL, DittoSSL)
by_method = pytest.mark.parametrize("of", ALL)


def baselines(of: type[FedAvgSSL], peers: int = 3, kind: str = "linear", **given: Any) -> list[Any]:
    return make(hyper(of, **given), peers, of=of, kind=kind)


# ---- whole rounds against a reference ------------------------------------------------------------------------


class PersonalProjector(Reference):
    def is_shared(self, name: str) -> bool:
        return name.startswith("backbone.")


class FedRepReference(PersonalProjector):
    def local_training(self) -> None:
        for learned in ("projector.", "predictor."), ("backbone.",):
            frozen = {name: value for name, value in self.local.items() if not name.startswith(learned)}
            for _ in range(self.h.local_epochs):
                x1, x2 = self.views(self.x), self.views(self.x)
                self.descend(partial(self.contrast, self.local, x1, x2), self.local)
                self.local |= frozen


class Proximal(Reference):
    def near(self, weights: Weights, center: Weights, x1: Tensor, x2: Tensor) -> Tensor:
        """L_unsup + μ/2 |weights − center|²."""
        distance = torch.stack([(weights[name] - center[name]).square().sum() for name in weights]).sum()
        mu: float = self.h.mu
        return self.contrast(weights, x1, x2) + mu / 2 * distance


class FedProxReference(Proximal):
    def local_training(self) -> None:
        for _ in range(self.h.local_epochs):
            x1, x2 = self.views(self.x), self.views(self.x)
            self.descend(partial(self.near, self.local, self.w, x1, x2), self.local)


class PersonalNet(Reference):
    def __init__(self, peer: Any) -> None:
        super().__init__(peer)
        self.personal = dict(self.w)


class APFLReference(PersonalNet):
    def local_training(self) -> None:
        for _ in range(self.h.local_epochs):
            views = self.views(self.x), self.views(self.x)
            shared = [self.project(x, self.local).detach() for x in views]

            def personal_loss(views: Any = views, shared: Any = shared) -> Tensor:
                own = [self.project(x, self.personal) for x in views]
                mixed = [self.h.alpha * z_g + (1.0 - self.h.alpha) * z for z_g, z in zip(shared, own, strict=True)]
                return self.unsupervised(mixed[0], mixed[1], self.personal)

            self.descend(personal_loss, self.personal)
            self.descend(partial(self.contrast, self.local, *views), self.local)


class DittoReference(PersonalNet, Proximal):
    def local_training(self) -> None:
        super().local_training()
        for _ in range(self.h.local_epochs):
            x1, x2 = self.views(self.x), self.views(self.x)
            self.descend(partial(self.near, self.personal, self.local, x1, x2), self.personal)


REFERENCES: dict[type[FedAvgSSL], type[Reference]] = {
    FedAvgSSL: Reference,
    FedPerSSL: PersonalProjector,
    FedRepSSL: FedRepReference,
    FedProxSSL: FedProxReference,
    APFLSSL: APFLReference,
    DittoSSL: DittoReference,
}


@pytest.mark.exhaustive
@by_method
@pytest.mark.parametrize("given", [{}, {"loss": "simsiam", "output": 2}], ids=["simclr", "simsiam"])
def test_rounds_follow_the_appendix(of: type[FedAvgSSL], given: dict[str, Any]) -> None:
    expected = [REFERENCES[of](peer) for peer in baselines(of, **given)]
    peers = baselines(of, **given)
    start = Reference.of(peers[0].content)
    run_rounds(peers, LINE, 3)
    reference_rounds(expected, LINE, 3)
    for peer, reference in zip(peers, expected, strict=True):
        agree(peer.content, reference.local)
        agree(peer.averaged, reference.w)
        moved = {name: float((reference.local[name] - start[name]).abs().max()) for name in start}
        assert min(moved.values()) > 1e-4, moved  # more than ``agree`` allows
        if isinstance(reference, PersonalNet):
            agree(peer.personal, reference.personal)
            away = [float((reference.personal[name] - reference.local[name]).abs().max()) for name in start]
            assert max(away) > 1e-4


@pytest.mark.exhaustive
@by_method
def test_complete_graph_yields_one_global_model(of: type[FedAvgSSL]) -> None:
    peers = baselines(of, 6, participation=0.5)
    seen: dict[int, set[str]] = {}

    def remember(peer: Any, t: int) -> None:
        seen.setdefault(t, set()).add(digest(peer.averaged.backbone.state_dict()))

    run_rounds(peers, complete(6), 3, after=remember)
    assert [len(seen[t]) for t in range(3)] == [1, 1, 1]


# ---- what is sent --------------------------------------------------------------------------------------------

BACKBONE = SIDE * SIDE * FEATURES + FEATURES
PROJECTOR = (FEATURES * 3 + 3) + (3 * 3 + 3)


@by_method
@pytest.mark.parametrize(("given", "more"), [({}, 4 * FEATURES), ({"share_statistics": False}, 2 * FEATURES)])
def test_sends_one_net_or_its_shared_part(of: type[FedAvgSSL], given: dict[str, Any], more: int) -> None:
    peers = baselines(of, kind="normalised", **given)
    numbers = BACKBONE + more + (PROJECTOR if of.share_projector else 0)
    for t, traffic in enumerate(zip(*run_rounds(peers, LINE, 2), strict=True)):
        assert [payload(one.sent) for one in traffic] == [4 * numbers * degree for degree in (1, 2, 1)], t


# ---- evaluation ----------------------------------------------------------------------------------------------


def evaluations(peer: Any) -> list[Any]:
    return [evaluate(peer.predict, peer.data, peer.data.test)] + [
        evaluate(one.predict, peer.data, one.samples) for one in peer.extra_metrics(False)
    ]


@by_method
def test_probe_of_personalization_is_on_the_nets_that_stay_local(of: type[FedAvgSSL]) -> None:
    (peer,) = baselines(of, 1, probe_epochs=5)
    run_rounds([peer], ALONE, 1)
    x = torch.rand(3, 1, SIDE, SIDE)
    scores = peer.predict(x)
    probe: Any = peer.classifier
    assert isinstance(probe, nn.Linear)
    net = peer.personal if of in (APFLSSL, DittoSSL) else peer.content
    torch.testing.assert_close(scores, net.backbone(x) @ probe.weight.T + probe.bias)


@pytest.mark.exhaustive
@by_method
def test_training_ignores_labels_and_evaluation_changes_nothing(of: type[FedAvgSSL]) -> None:
    truth = baselines(of, batch=3)
    lies = make(hyper(of, batch=3), of=of, labels=lambda y: np.random.default_rng(0).permutation(y))
    run_rounds(truth, LINE, 2, after=lambda peer, t: evaluations(peer))  # type: ignore[arg-type]
    run_rounds(lies, LINE, 2)
    for one, other in zip(truth, lies, strict=True):
        assert digest(one.state_dict()) == digest(other.state_dict())


def test_fedrep_leaves_frozen_layers_frozen() -> None:
    peers = baselines(FedRepSSL)
    (weight,) = [p for name, p in peers[0].content.named_parameters() if name == "backbone.1.weight"]
    weight.requires_grad_(False)
    peers[0].local_training()
    assert not weight.requires_grad
    assert all(p.requires_grad for p in peers[0].content.parameters() if p is not weight)


# ---- divergence and options ----------------------------------------------------------------------------------


@pytest.mark.exhaustive
@by_method
def test_peer_whose_training_diverges_continues_from_the_average(of: type[FedAvgSSL]) -> None:
    peers = baselines(of, kind="normalised")
    (x,) = [peers[1].data]
    augment, calls = x.augment, iter(range(1000))
    x.augment = lambda images: augment(images) * (math.nan if next(calls) < 2 else 1.0)
    run_rounds(peers, complete(3), 3)
    for peer in peers:
        for name in ("content", "averaged", *(["personal"] if hasattr(peer, "personal") else [])):
            diverged = [key for key, value in getattr(peer, name).state_dict().items() if has_diverged(value)]
            assert diverged == [], name
        assert evaluate(peer.predict, peer.data, peer.data.test) is not None


OPTIONS: dict[type[FedAvgSSL], list[dict[str, Any]]] = {
    FedAvgSSL: [
        *({"loss": "simsiam"}, {"temperature": 0.1}, {"local_epochs": 1}, {"batch": 3}, {"lr": 0.01}),
        *({"momentum": 0.5}, {"weight_decay": 0.1}, {"participation": 0.4}, {"hidden": 2}, {"output": 2}),
        *({"share_statistics": False}, {"optimizer": "adam"}),
    ],
    FedProxSSL: [{"mu": 1.0}],
    APFLSSL: [{"alpha": 0.25}],
    DittoSSL: [{"mu": 1.0}],
}


@cache
def trained(of: type[FedAvgSSL], **given: Any) -> str:
    peers = baselines(of, kind="normalised", **given)
    run_rounds(peers, LINE, 2)
    nets = [peers[1].content, getattr(peers[1], "personal", peers[1].averaged)]
    return digest([net.backbone.state_dict() for net in nets])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("of", "given"), [(of, given) for of in OPTIONS for given in OPTIONS[of]])
def test_every_option_changes_what_is_learned(of: type[FedAvgSSL], given: dict[str, Any]) -> None:
    assert trained(of, **given) != trained(of)


@pytest.mark.exhaustive
@by_method
def test_drop_last_changes_what_is_learned(of: type[FedAvgSSL]) -> None:
    """Peers have four, six and eight samples."""
    assert trained(of, batch=4, drop_last=True) != trained(of, batch=4)
    assert trained(of, batch=2, drop_last=True) == trained(of, batch=2)


@by_method
def test_all_options_are_covered(of: type[FedAvgSSL]) -> None:
    common = {name for given in OPTIONS[FedAvgSSL] for name in given}
    probes = {"probe_samples", "probe_peers", "probe_epochs", "probe_steps", "probe_lr", "probe_batch"}  # fedstyle's
    own = {name for given in OPTIONS.get(of, []) for name in given}
    assert common | own | probes == set(of.Hyper.known()) - {"betas", "clip_norm", "drop_last"}


@pytest.mark.parametrize(
    ("of", "wrong"), [(FedProxSSL, {"mu": -1.0}), (APFLSSL, {"alpha": 1.0}), (DittoSSL, {"mu": -0.1})]
)
def test_out_of_range_option_is_rejected(of: type[FedAvgSSL], wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionErrors, match=next(iter(wrong))):
        hyper(of, **wrong)
