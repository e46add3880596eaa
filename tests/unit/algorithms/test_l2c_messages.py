"""L2C's messages: pruned edges, every byte, precision, updates spooled to files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from p2pfl.algorithms import base
from p2pfl.algorithms.l2c import Update
from p2pfl.messaging.tensor_file import Spool
from p2pfl.tensors import digest, parameters_of
from tests.bodies import complete
from tests.l2c_peers import LINE, NUMBERS, hyper, make
from tests.regression import theta
from tests.support import messages, payload, run_rounds

# ---- pruning -------------------------------------------------------------------------------------------------


def test_after_t0_peers_receive_from_strongest_sources_only() -> None:
    peers = make(hyper(prune_round=2, prune_to=2), 5)
    rows: list[dict[int, Any]] = [{} for _ in peers]
    traffic = run_rounds(
        peers, complete(5), 6, after=lambda peer, t: rows[peer.me].__setitem__(t, dict(peer.weights() or {}))
    )
    for me, rounds in enumerate(traffic):
        assert [len(one.sources) for one in rounds] == [4, 4, 4, 2, 2, 2]
        at_t0 = rows[me][2]
        kept = sorted(sorted((j for j in at_t0 if j != me), key=lambda j: (-at_t0[j], j))[:2])
        for t in (3, 4, 5):
            assert list(rounds[t].sources) == kept
            assert sorted(rows[me][t]) == sorted([me, *kept])
            assert sum(rows[me][t].values()) == pytest.approx(1.0)


def test_pruned_edges_carry_no_update() -> None:
    peers = make(hyper(prune_round=1, prune_to=2), 5)
    traffic = run_rounds(peers, complete(5), 4)
    for rounds in traffic:
        for t, one in enumerate(rounds):
            # Sent to receivers only, and received completely.
            assert {j for j, kinds in one.sent.items() if "Update" in kinds} == set(one.receivers)
            assert {j for j, kinds in one.received.items() if "Update" in kinds} == set(one.sources)
            assert one.missing == {}
            if t < 2:
                assert messages(one.sent, "Update") == 4
    for t in (2, 3):
        edges = sum(len(rounds[t].sources) for rounds in traffic)
        assert edges == 5 * 2
        assert sum(messages(rounds[t].sent, "Update") for rounds in traffic) == edges
        assert sum(payload(rounds[t].sent) for rounds in traffic) == edges * 4 * NUMBERS
    assert any(set(rounds[2].sources) != set(rounds[2].receivers) for rounds in traffic)  # some edges are one-way


def test_pruning_to_zero_leaves_local_training() -> None:
    peers = make(hyper(prune_round=0, prune_to=0))
    traffic = run_rounds(peers, LINE, 3)
    assert [[one.sources for one in rounds[1:]] for rounds in traffic] == [[(), ()]] * 3
    assert all(peer.weights() == {peer.me: 1.0} for peer in peers)
    assert sum(payload(one.sent) for rounds in traffic for one in rounds[1:]) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("given", [{"prune_round": None}, {"prune_round": 0, "prune_to": 4}, {"prune_round": 99}])
def test_unpruned_sources_are_kept_to_the_end(given: Mapping[str, Any]) -> None:
    peers = make(hyper(prune_to=0, **given) if "prune_to" not in given else hyper(**given), 4)
    traffic = run_rounds(peers, complete(4), 3)
    assert all(len(one.sources) == 3 for rounds in traffic for one in rounds)


# ---- bytes and memory ----------------------------------------------------------------------------------------


def test_round_costs_one_model_per_directed_edge() -> None:
    peers = make(hyper())
    traffic = run_rounds(peers, LINE, 2)
    assert [[messages(one.sent) for one in rounds] for rounds in traffic] == [[1, 1], [2, 2], [1, 1]]
    assert sum(payload(one.sent) for rounds in traffic for one in rounds) == 2 * 4 * 4 * NUMBERS
    (layout,) = peers[0].layouts()
    assert {key: str(spec) for (_, key), spec in layout.tensors.items()} == {
        "head.weight": "float32[3, 4]",
        "head.bias": "float32[3]",
    }


@pytest.mark.exhaustive
def test_bfloat16_halves_bytes_and_changes_little() -> None:
    full, half = make(hyper(), 4), make(hyper(precision="bfloat16"), 4)
    start = theta(full[0].model)
    traffic = {name: run_rounds(peers, complete(4), 3) for name, peers in (("full", full), ("half", half))}
    total = {name: sum(payload(one.sent) for peer in peers for one in peer) for name, peers in traffic.items()}
    assert total["full"] == 2 * total["half"]
    for one, other in zip(full, half, strict=True):
        moved = np.abs(theta(one.model) - start).max()
        assert 0 < np.abs(theta(one.model) - theta(other.model)).max() < 0.01 * moved


@pytest.fixture
def spools(monkeypatch: pytest.MonkeyPatch) -> list[Spool]:
    """The spools that the algorithms of the test create."""
    made: list[Spool] = []

    def create() -> Spool:
        made.append(Spool())
        return made[-1]

    monkeypatch.setattr(base, "Spool", create)
    return made


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_spooled_updates_are_bit_identical(precision: str, spools: list[Spool]) -> None:
    digests = []
    for spool in (False, True):
        peers = make(hyper(precision=precision, spool=spool, prune_round=1, prune_to=2), 4)
        run_rounds(peers, complete(4), 3)
        digests.append([digest(peer.state_dict()) for peer in peers])
        assert sum(made.size > 0 for made in spools) == (4 if spool else 0)
    assert digests[0] == digests[1]


def test_spool_files_hold_at_most_two_rounds(spools: list[Spool]) -> None:
    peers = make(hyper(spool=True), 4)
    run_rounds(peers, complete(4), 6)
    # Neighbors may be one round ahead.
    assert all(0 < spool.size <= 2 * 3 * 4 * NUMBERS for spool in spools)


def test_spooled_update_reads_back_unchanged() -> None:
    (peer,) = make(hyper(spool=True), 1)
    body = Update(parameters_of(peer.model))
    spooled = peer.on_receive(body)
    assert isinstance(spooled, Update)
    assert not isinstance(spooled.values, dict)
    assert {name: tensor.tolist() for name, tensor in spooled.values.items()} == {
        name: tensor.tolist() for name, tensor in body.values.items()
    }
