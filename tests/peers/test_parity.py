"""The strongest test of this project: processes that talk over sockets, with random delays, end with the bits and
the byte counts of `simulate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pfl import metrics
from p2pfl.simulate import simulate

MAPL = {"name": "mapl", "warmup": 1, "batch": 16, "lr": 0.01, "projector_hidden": 16}
L2C = {"local_epochs": 1, "batch": 16}
TASKS = {"name": "groups", "groups": 2, "per_class": 10, "validation": 0.3}

STYLES = {"name": "styles", "per_peer": 30}
FEDSTYLE = {
    "name": "fedstyle",
    "batch": 16,
    "local_epochs": 1,
    "style_epochs": 2,
    "probe_epochs": 3,
    "probe_samples": 50,
    "probe_peers": 2,
}

RUNS: dict[str, dict[str, Any]] = {
    "local": {"algorithm": {"name": "local", "batch": 16}, "peers": 4, "models": "tiny4"},
    "dpsgd, steps": {
        "algorithm": {"name": "dpsgd", "batch": 16, "local_steps": 2, "momentum": 0.9},
        "graph": "ring",
        "peers": 5,
    },
    "dpsgd, epochs": {
        "algorithm": {"name": "dpsgd", "batch": 16, "local_epochs": 1},
        "graph": {"name": "erdos-renyi", "p": 0.6},
        "peers": 6,
        "models": "tiny-cnn",
    },
    "fedavg, some take part": {
        "algorithm": {"name": "fedavg", "batch": 16, "participation": 0.5},
        "graph": {"name": "regular", "degree": 3},
        "peers": 6,
        "models": "tiny-cnn",
    },
    "lg-fedavg": {"algorithm": {"name": "lg-fedavg", "batch": 16}, "peers": 5, "graph": "ring", "models": "tiny4"},
    "dfedavgm": {"algorithm": {"name": "dfedavgm", "batch": 16}, "peers": 5, "graph": "star"},
    "fedproto, some take part": {
        "algorithm": {"name": "fedproto", "participation": 0.5},
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny4",
        "peers": 6,
    },
    "fedtgp": {
        "algorithm": {"name": "fedtgp", "prototype_epochs": 10},
        "data": {"partition": {"name": "dirichlet"}},
        "models": "tiny4",
    },
    "fedstyle, some take part": {
        "algorithm": {**FEDSTYLE, "participation": 0.5},
        "data": {
            "dataset": {"name": "styled", "of": "digits", "styles": 2},
            "partition": STYLES,
            "augment": "simclr",
        },
        "graph": {"name": "regular", "degree": 3},
        "models": "tiny-cnn",
    },
    "fedstyle, simsiam": {
        "algorithm": {**FEDSTYLE, "loss": "simsiam", "train_generator": True, "style_epochs": 1},
        "graph": "ring",
        "models": "tiny-residual",
        "rounds": 2,
    },
    # With such steps some weights are soon 0, and not on both sides at once: half-open edges, then silent ones.
    "mapl, pruned": {
        "algorithm": {**MAPL, "graph_lr": 2.0, "graph_steps": 3},
        "data": {
            "augment": "mapl",
            "partition": {"name": "clusters", "clusters": 2, "per_class": [3, 20], "test_per_class": 5},
        },
        "models": "tiny4",
        "peers": 6,
        "rounds": 5,
    },
    "dfml": {
        "algorithm": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "period": 3, "mutual_batch_models": 2},
        "graph": {"name": "erdos-renyi", "p": 0.6},
        "data": {"augment": "mapl"},
        "models": "tiny4",
        "peers": 6,
        "rounds": 6,
    },
    # Dropout at the aggregator.
    "dfml, bridge": {
        "algorithm": {"name": "dfml", "batch": 16, "mutual_epochs": 2, "supervision": "ce"},
        "graph": "bridge",
        "models": "dfml-vit-32",
        "rounds": 5,
    },
    "fedavg-dec": {"algorithm": {"name": "fedavg-dec", "batch": 16}, "models": "tiny4", "peers": 6, "rounds": 5},
    "fedprox-dec": {"algorithm": {"name": "fedprox-dec", "batch": 16}, "models": "tiny4", "peers": 6, "rounds": 5},
    "mapl, with a budget": {
        "algorithm": {**MAPL, "prune": False, "message_budget": 30},
        "graph": "ring",
        "models": "tiny4",
        "rounds": 50,
    },
    "mapl, two join late": {
        "algorithm": {**MAPL, "graph_lr": 5.0},
        "models": "tiny4",
        "peers": 5,
        "rounds": 5,
        "joins_at": {4: 1, 2: 3},
    },
    "meta-l2c, one joins late": {
        "algorithm": {"name": "meta-l2c", **L2C, "prune_round": 1, "prune_to": 1},
        "data": {"partition": TASKS},
        "graph": "ring",
        "peers": 5,
        "rounds": 4,
        "joins_at": {0: 2},
    },
    "mapl+": {
        "algorithm": {**MAPL, "name": "mapl+", "graph_lr": 4.0, "graph_steps": 2},
        "models": "tiny-cnn",
        "peers": 5,
    },
    "mapl, official": {"algorithm": {**MAPL, "preset": "official"}, "graph": "star", "models": "tiny4"},
    "l2c, pruned": {
        "algorithm": {"name": "l2c", **L2C, "prune_round": 1, "prune_to": 1},
        "data": {"partition": TASKS},
        "peers": 6,
        "rounds": 5,
    },
    "l2c, on disk": {
        "algorithm": {"name": "l2c", **L2C, "precision": "bfloat16", "spool": True},
        "data": {"partition": TASKS},
        "graph": "ring",
        "peers": 5,
    },
    # The tree of the allreduce has all edges of peer 0; on most of them nothing else is said in the end.
    "meta-l2c, pruned": {
        "algorithm": {"name": "meta-l2c", **L2C, "prune_round": 1, "prune_to": 1},
        "data": {"partition": TASKS},
        "peers": 6,
        "rounds": 5,
    },
}


def outcome(results: Any) -> list[tuple[Any, ...]]:
    """What must be equal. Times are not."""
    return [
        (r.peer, r.phase, r.rounds_done, r.digest, r.out, r.inn, r.accuracy, r.best, r.weights, r.missing, r.measures)
        for r in results
    ]


def records(folder: Any, peer: int) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key != "seconds"}
        for record in metrics.read(folder.peer(peer).metrics)
    ]


@pytest.mark.parametrize("name", RUNS)
def test_sockets_end_with_the_bits_and_byte_counts_of_simulate(
    name: str, make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    run = make_run(**RUNS[name], chaos={"link": {"jitter": 0.02}})
    sockets, simulated = prepare(tmp_path / "sockets", run), prepare(tmp_path / "simulated", run)
    expected = outcome(simulate(run, simulated))
    codes = warm.run(sockets)
    assert outcome(place.result() for place in sockets.peers()) == expected, _logs(sockets)
    assert codes == dict.fromkeys(range(run.peers), 0)
    for peer in range(run.peers):
        assert records(sockets, peer) == records(simulated, peer)
        warnings = [line for line in sockets.peer(peer).log.read_text().splitlines() if "WARNING" in line]
        # All has arrived when a peer closes; if a neighbour gets no turn to say so, nothing is lost by that. Nor if
        # it has nothing to say, and leaves before it was greeted.
        slow = (
            "did not confirm our last messages",
            "it left, or was cut off, in its handshake",
            "it wants keys, or does not speak our protocol",
        )
        assert [line for line in warnings if not line.endswith(slow)] == []
        assert sockets.peer(peer).output.read_text() == ""


def _logs(folder: Any) -> str:
    return "\n".join(place.log.read_text() for place in folder.peers())


def test_pruning_and_budget_are_at_work_in_these_runs(make_run: Any) -> None:
    """Otherwise the cases above would show less than they claim."""
    run = make_run(**RUNS["mapl, pruned"])
    pruned = simulate(run)
    kinds = {kind for result in pruned for kinds in result.out.values() for kind in kinds}
    assert kinds == {"Head", "Prototypes", "Listening"}
    heads = sum(kinds.get("Head", [0])[0] for result in pruned for kinds in result.out.values())
    assert 30 < heads < 30 * (run.rounds - 1)  # 30 directed edges
    budget = simulate(make_run(**RUNS["mapl, with a budget"]))
    assert [result.rounds_done for result in budget] == [4] * 4  # 8 messages a round
    tree = [result.peer for result in budget if any("Spent" in kinds for kinds in result.out.values())]
    assert tree == [0, 1, 2, 3]


def test_pruned_edges_of_l2c_are_half_open_or_carry_the_encoder_alone(make_run: Any) -> None:
    """As above, for the two methods of that paper."""
    pruned = simulate(make_run(**RUNS["l2c, pruned"]))
    sent = [kinds for result in pruned for kinds in result.out.values()]
    assert {kind for kinds in sent for kind in kinds} == {"Update", "Listening"}
    assert sum(kinds["Update"][0] for kinds in sent) == 2 * 30 + 3 * 6
    pruned = simulate(make_run(**RUNS["meta-l2c, pruned"]))
    on_the_tree = [result.out["0"] for result in pruned if "0" in result.out]
    assert [kinds["EncoderParameters"][0] for kinds in on_the_tree] == [5] * 5
    assert sum(kinds["Progress"][0] < 5 for kinds in on_the_tree) >= 3
    assert any("Listening" in kinds for result in pruned for kinds in result.out.values())


def test_two_runs_over_sockets_are_equal_whatever_the_slots(
    make_run: Any, prepare: Any, warm: Any, tmp_path: Path
) -> None:
    outcomes = []
    for slots in (1, 4):
        folder = prepare(tmp_path / f"{slots}", make_run(slots=slots, chaos={"link": {"jitter": 0.01}}))
        assert set(warm.run(folder).values()) == {0}
        outcomes.append(outcome(place.result() for place in folder.peers()))
    assert outcomes[0] == outcomes[1]


def test_the_plain_command_does_the_same(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run(peers=2, rounds=2, models="tiny4", algorithm={**MAPL})
    folder = prepare(tmp_path / "run", run)
    command = [sys.executable, "-m", "peers", "--run"]
    # The folder and the file in it name the same run.
    with (
        subprocess.Popen([*command, str(folder.root), "--me", "0"]) as first,
        subprocess.Popen([*command, str(folder.run_file), "--me", "1"]) as second,
    ):
        assert (first.wait(200), second.wait(200)) == (0, 0)
    assert outcome(place.result() for place in folder.peers()) == outcome(simulate(run))
