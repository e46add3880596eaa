"""DFML against its paper: whole rounds in numpy, peak models, every byte, what is evaluated and recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from p2pfl.algorithms.dfml import DFML
from p2pfl.algorithms.dfml_messages import Pupil, Taught
from p2pfl.errors import Unexpected
from p2pfl.messaging.topology import Topology
from p2pfl.tensors import buffers_of, clone, digest, parameters_of
from tests.bodies import arrive, complete
from tests.dfml_reference import CLASSES, INPUTS, Reference, agree, assignments, hyper, make, run_reference
from tests.support import Traffic, messages, payload, run_rounds

# ---- rounds against a reference in numpy ---------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", [complete(4), Topology.from_edges(4, [(0, 1), (1, 2), (2, 3)])])
@pytest.mark.parametrize("wsl", [False, True])
def test_rounds_follow_algorithm_1(wsl: bool, topology: Topology) -> None:
    h = hyper(local_epochs=2, wsl=wsl)
    peers = make(h)
    expected = [Reference(peer) for peer in peers]
    run_rounds(peers, topology, 8)
    run_reference(expected, assignments(peers, topology, 8), h)
    agree(peers, expected)
    assert len({assignment.aggregator for assignment in assignments(peers, topology, 8)}) > 2
    assert h.alpha_max in {peer.peak_alpha for peer in peers}


@pytest.mark.exhaustive
def test_peak_model_is_from_round_with_highest_alpha() -> None:
    h = hyper(participation=1.0, period=4, period_increment=0)
    peers = make(h)
    seen: dict[int, list[Tensor]] = {me: [] for me in range(4)}
    peaks: dict[int, list[Tensor]] = {me: [] for me in range(4)}

    def keep(peer: Any, t: int) -> None:
        seen[peer.me].append(peer.model.head.weight.detach().clone())
        peaks[peer.me].append(peer.peak.head.weight.detach().clone())

    run_rounds(peers, complete(4), 12, after=keep)
    # Follows α up to its first maximum, and changes only at maxima from then on.
    source = [0, 1, 2, 3, 3, 3, 3, 7, 7, 7, 7, 11]
    for me in range(4):
        assert all(torch.equal(peaks[me][t], seen[me][source[t]]) for t in range(12))
        assert not torch.equal(seen[me][10], seen[me][7])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"participation": 0.25}, [0, 1, 2, 3, 4, 4, 6, 7, 8, 9]),  # N/|S| = 4 of 5 rounds
        ({"participation": 0.25, "peak_updates": 2}, [0, 1, 2, 3, 4, 4, 4, 4, 8, 9]),
        ({"participation": 0.5, "peak_updates": 1}, [0, 1, 2, 3, 4, 4, 4, 4, 4, 9]),
    ],
)
def test_few_senders_mean_more_peak_rounds_per_period(given: dict[str, Any], source: list[int]) -> None:
    h = hyper(fixed_aggregator=True, period=5, period_increment=0, **given)
    peers = make(h)
    seen: list[Tensor] = []
    peaks: list[Tensor] = []
    ages: list[float] = []

    def keep(peer: Any, t: int) -> None:
        if peer.me == 0:
            seen.append(peer.model.head.weight.detach().clone())
            peaks.append(peer.peak.head.weight.detach().clone())
            ages.append(peer.diagnostics()["peak_age"])

    run_rounds(peers, complete(4), 10, after=keep)
    assert all(torch.equal(peaks[t], seen[source[t]]) for t in range(10))
    assert ages == [t - source[t] for t in range(10)]
    assert peers[0].peak_alpha == h.alpha_max


def test_idle_peers_neither_change_nor_send() -> None:
    peers = make(hyper(participation=0.25))
    before = [digest(peer.state_dict()) for peer in peers]
    (assignment,) = assignments(peers, complete(4), 1)
    traffic = run_rounds(peers, complete(4), 1)
    for me in range(4):
        idle = me not in assignment.participants
        assert (digest(peers[me].state_dict()) == before[me]) == idle
        assert (traffic[me][0].sent == {} and traffic[me][0].received == {}) == idle


@pytest.mark.exhaustive
def test_models_agree_more_after_mutual_learning() -> None:
    @torch.no_grad()
    def disagreement(peers: list[DFML]) -> float:
        x = peers[0].data.input(peers[0].data.train.take(np.arange(6))[0], augmented=False)
        p = torch.stack([peer.predict(x).softmax(1) for peer in peers])
        return float((p - p.mean(0)).abs().mean())

    peers = make(hyper(participation=1.0, shape="fixed", alpha_max=1.0, mutual_epochs=30, lr=0.5))
    before = disagreement(peers)
    run_rounds(peers, complete(4), 1)
    assert disagreement(peers) < 0.3 * before


# ---- what travels --------------------------------------------------------------------------------------------


def bytes_of(peer: DFML) -> int:
    tensors = {**parameters_of(peer.model), **buffers_of(peer.model)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def sent(traffic: list[list[Traffic]], t: int) -> int:
    return sum(payload(one[t].sent) for one in traffic)


@pytest.mark.exhaustive
@pytest.mark.parametrize("participation", [0.25, 0.5, 1.0])
def test_two_models_travel_per_sender_and_round(participation: float) -> None:
    peers = make(hyper(participation=participation), names=("flat", "linear", "normalized", "linear", "flat"))
    traffic = run_rounds(peers, complete(5), 5)
    for t, assignment in enumerate(assignments(peers, complete(5), 5)):
        assert len(assignment.senders) == min(4, max(1, round(participation * 5)))
        assert sent(traffic, t) == sum(2 * bytes_of(peers[n]) for n in assignment.senders)
        for me, peer in enumerate(traffic):
            aggregates = me == assignment.aggregator
            assert messages(peer[t].sent, "Pupil") == (me in assignment.senders)
            assert messages(peer[t].sent, "Taught") == (len(assignment.senders) if aggregates else 0)
            assert messages(peer[t].received, "Pupil") == (len(assignment.senders) if aggregates else 0)
            assert messages(peer[t].received, "Taught") == (me in assignment.senders)


def test_batch_norm_statistics_travel_both_ways() -> None:
    peers = make(hyper(participation=1.0, lr=1e-9), names=("normalized",) * 3)
    run_rounds(peers, complete(3), 1)
    local_batches, mutual_batches = 1, 3
    for peer in peers:
        found = buffers_of(peer.model)
        assert int(found["backbone.2.num_batches_tracked"]) == local_batches + mutual_batches
        assert not peer.model.training


def test_model_with_wrong_name_or_shape_is_rejected_on_arrival() -> None:
    peers = make(hyper())
    layouts = peers[0].layouts()
    flat, linear = ((peer.model.name, parameters_of(peer.model), buffers_of(peer.model)) for peer in peers[:2])
    assert arrive(Pupil(*linear), layouts).architecture == "linear"
    assert arrive(Taught(*flat[1:]), layouts).parameters.keys() == flat[1].keys()
    wide = {**flat[1], "head.weight": torch.zeros(CLASSES, INPUTS + 1)}
    for wrong in (
        Pupil("linear", *flat[1:]),
        Pupil("flat", *linear[1:]),
        Pupil("resnet18", *flat[1:]),
        Pupil("flat", wide, {}),
        Pupil("flat", flat[1], {"running_mean": torch.zeros(3)}),
        Taught(*linear[1:]),  # a flat model cannot come back as a linear one
    ):
        with pytest.raises(Unexpected):
            arrive(wrong, layouts)


# ---- what is evaluated and recorded --------------------------------------------------------------------------


def test_extra_metrics_evaluate_the_peak_model() -> None:
    peers = make(hyper(participation=1.0, period=2, period_increment=0))
    run_rounds(peers, complete(4), 3)
    x = torch.rand(5, 1, 2, 2)
    for peer in peers:
        found = {measure.name: measure for measure in peer.extra_metrics(whole=True)}
        assert list(found) == ["peak", "peak_global", "local", "peak_local"]
        assert [measure.name for measure in peer.extra_metrics(whole=False)] == ["peak", "local", "peak_local"]
        assert found["peak"].samples is peer.data.test
        assert found["peak_global"].samples is peer.data.global_test
        assert found["local"].samples is found["peak_local"].samples is peer.data.validation
        assert torch.equal(found["peak"].predict(x), peer.peak(x))
        assert torch.equal(found["local"].predict(x), peer.model(x))
        assert not torch.equal(peer.peak(x), peer.model(x))
        assert not peer.peak.training


def test_diagnostics_report_alpha_models_and_peak() -> None:
    h = hyper(participation=0.5)
    peers = make(h)
    seen: dict[tuple[int, int], Mapping[str, float]] = {}
    run_rounds(peers, complete(4), 4, after=lambda peer, t: seen.update({(peer.me, t): dict(peer.diagnostics())}))
    for t, assignment in enumerate(assignments(peers, complete(4), 4)):
        for me in range(4):
            assert seen[me, t]["alpha"] == h.alpha_at(t)
            assert seen[me, t].get("models") == (3 if me == assignment.aggregator else None)
            if me in assignment.participants and t < 3:
                assert (seen[me, t]["peak_alpha"], seen[me, t]["peak_age"]) == (h.alpha_at(t), 0)


def test_peers_share_no_memory() -> None:
    """Received tensors are copies: training one peer changes no other peer's model."""
    peers = make(hyper(participation=1.0))
    run_rounds(peers, complete(4), 1)
    before = clone(parameters_of(peers[0].model))
    peers[1].local_training()
    assert all(torch.equal(before[name], value) for name, value in parameters_of(peers[0].model).items())
