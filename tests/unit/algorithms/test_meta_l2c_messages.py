"""meta-L2C's messages: pruning, every byte, spooled messages, codes of pretrained encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pfl.algorithms.meta_l2c import Hyper
from p2pfl.options import OptionErrors
from p2pfl.session import checkpoint
from p2pfl.tensors import digest
from tests.bodies import complete
from tests.meta_l2c_peers import CODE, ENCODER, LINE, NUMBERS, hyper, make, random_encoder
from tests.support import Traffic, messages, payload, run_rounds

# ---- pruning and bytes ---------------------------------------------------------------------------------------


def total(traffic: Sequence[Sequence[Traffic]], t: int, kind: str) -> int:
    return sum(messages(rounds[t].sent, kind) for rounds in traffic)


@pytest.mark.exhaustive
def test_round_costs_two_models_per_directed_edge_and_two_encoders_per_tree_edge() -> None:
    peers = make(hyper(), 4)
    traffic = run_rounds(peers, complete(4), 2)
    for t in range(2):
        assert total(traffic, t, "Progress") == 4 * 3
        assert total(traffic, t, "EncoderParameters") == 2 * 3
        paid = sum(payload(rounds[t].sent) for rounds in traffic)
        assert paid == 4 * (12 * 2 * NUMBERS + 2 * 3 * ENCODER)


@pytest.mark.exhaustive
def test_encoder_still_travels_after_pruning() -> None:
    """On a complete graph the allreduce tree has all edges of peer 0, most of which are pruned here."""
    peers = make(hyper(prune_round=1, prune_to=1), 5)
    rows: list[dict[int, dict[int, float]]] = [{} for _ in peers]
    encoders: list[list[str]] = [[] for _ in peers]

    def after(peer: Any, t: int) -> None:
        rows[peer.me][t] = dict(peer.weights())
        encoders[peer.me].append(digest(peer.encoder.state_dict()))

    traffic = run_rounds(peers, complete(5), 6, after=after)
    for me, rounds in enumerate(traffic):
        at_t0 = rows[me][1]
        (kept,) = sorted((j for j in at_t0 if j != me), key=lambda j: (-at_t0[j], j))[:1]
        assert [len(rows[me][t]) for t in range(6)] == [5, 5, 2, 2, 2, 2]
        assert all(list(rows[me][t]) == sorted([me, kept]) for t in range(2, 6))
        for t, one in enumerate(rounds):
            assert one.missing == {}
            if t >= 2:
                assert one.sources == (kept,)
                assert {j for j, kinds in one.received.items() if "Progress" in kinds} == {kept}
    for t in range(6):
        assert total(traffic, t, "EncoderParameters") == 2 * 4
        assert total(traffic, t, "Progress") == 5 * (4 if t < 2 else 1)
    assert all(digests == encoders[0] for digests in encoders)
    assert len(set(encoders[0])) == 6
    silent = {(i, j) for i in range(5) for j in range(5) if i != j and j not in rows[i][5] and i not in rows[j][5]}
    assert any(0 in edge for edge in silent)  # the tree has edges on which nothing else is sent


def test_bfloat16_halves_model_bytes() -> None:
    peers = make(hyper(precision="bfloat16"), 3)
    traffic = run_rounds(peers, complete(3), 1)
    assert sum(payload(rounds[0].sent) for rounds in traffic) == 6 * 2 * 2 * NUMBERS + 4 * 2 * 2 * ENCODER


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "given", [{}, {"precision": "bfloat16"}, {"frozen": True}, {"frozen": True, "send_codes": True}]
)
def test_spooled_messages_are_bit_identical(given: Mapping[str, Any], tmp_path: Path) -> None:
    given = dict(given)
    if given.pop("frozen", False):
        given.update(encoder=trained(tmp_path), train_encoder=False)
    digests = []
    for spool in (False, True):
        peers = make(hyper(spool=spool, prune_round=1, prune_to=2, **given), 4)
        run_rounds(peers, complete(4), 3)
        digests.append([digest(peer.state_dict()) for peer in peers])
    assert digests[0] == digests[1]


# ---- pretrained encoders -------------------------------------------------------------------------------------


def trained(folder: Path) -> Path:
    """Write the checkpoint of a peer whose encoder distinguishes changes; return its path."""
    path = folder / "checkpoint.pt"
    checkpoint.save(path, {"run": "0" * 16, "peer": 0, "algorithm": {"encoder": random_encoder(5).state_dict()}})
    return path


@pytest.mark.exhaustive
def test_frozen_encoder_is_neither_changed_nor_sent(tmp_path: Path) -> None:
    path = trained(tmp_path)
    peers = make(hyper(encoder=path, train_encoder=False), 4)
    traffic = run_rounds(peers, complete(4), 2)
    for peer in peers:
        assert digest(peer.encoder.state_dict()) == digest(random_encoder(5).state_dict())
        weights = list((peer.weights() or {}).values())
        assert max(weights) > min(weights) + 1e-3
        assert peer.diagnostics() == {}
    assert {kind for rounds in traffic for one in rounds for kinds in one.sent.values() for kind in kinds} == {
        "Progress"
    }


@pytest.mark.exhaustive
def test_codes_replace_changes_bit_identically_for_half_the_bytes(tmp_path: Path) -> None:
    path, outcomes, sent = trained(tmp_path), [], []
    for codes in (False, True):
        peers = make(hyper(encoder=path, train_encoder=False, send_codes=codes, prune_round=1, prune_to=2), 4)
        traffic = run_rounds(peers, complete(4), 4)
        outcomes.append([digest(peer.state_dict()) for peer in peers])
        sent.append([sum(payload(rounds[t].sent) for rounds in traffic) for t in range(4)])
    assert outcomes[0] == outcomes[1]
    edges = [12, 12, 8, 8]
    assert sent == [[4 * n * 2 * NUMBERS for n in edges], [4 * n * (NUMBERS + CODE) for n in edges]]


def test_loaded_encoder_can_be_trained_further(tmp_path: Path) -> None:
    peers = make(hyper(encoder=trained(tmp_path)))
    assert digest(peers[2].encoder.state_dict()) == digest(random_encoder(5).state_dict())
    run_rounds(peers, LINE, 1)
    assert digest(peers[2].encoder.state_dict()) != digest(random_encoder(5).state_dict())


def test_frozen_encoder_needs_a_path_and_codes_need_a_frozen_encoder() -> None:
    with pytest.raises(OptionErrors, match="train_encoder: false needs a trained encoder"):
        Hyper.parse({"train_encoder": False})
    with pytest.raises(OptionErrors, match="send_codes needs train_encoder: false"):
        Hyper.parse({"send_codes": True, "encoder": "x"})


def test_encoder_path_is_absolute_in_resolved_run_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    plain = Hyper.parse({"encoder": "runs/x"}).to_dict()
    assert plain["encoder"] == str(tmp_path / "runs" / "x")
    monkeypatch.chdir("/")
    assert Hyper.parse(plain).to_dict() == plain
