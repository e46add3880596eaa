"""Runs over sockets with random delays end with the same bits and byte counts as `simulate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate
from tests.golden.runs import MAPL, RUNS


def outcome(results: Any) -> list[tuple[Any, ...]]:
    """Return everything that must be equal, so no times."""
    return [
        (
            r.peer,
            r.phase,
            r.rounds_done,
            r.digest,
            r.sent,
            r.received,
            r.accuracy,
            r.best,
            r.weights,
            r.missing,
            r.extra_metrics,
        )
        for r in results
    ]


def results(folder: Any) -> list[Any]:
    return [files.result() for files in folder.peers()]


def records(folder: Any, peer: int) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in record.items() if key not in metrics.MEASURED}
        for record in metrics.read(folder.peer(peer).metrics)
    ]


SSL = ("fedstyle", "fedavg-ssl", "fedper-ssl", "fedrep-ssl", "fedprox-ssl", "apfl-ssl", "ditto-ssl")
CONVERSATIONS: dict[str, tuple[str, ...]] = {
    "local": ("local",),  # nothing is sent
    "dpsgd, steps": ("dpsgd", "dfedavgm", "sgp", "swift"),  # one body to all neighbors, several times a round
    # One exchange a round, in which not everybody sends.
    "fedavg, some take part": (
        *("fedavg", "lg-fedavg", "fedsim", "pfedsim", "fedclassavg", "fedgen", "ditto", "fml"),
        *SSL,
    ),
    "mapl, pruned": ("mapl", "mapl+", "meta-l2c"),  # several kinds; edges are dropped, in one direction or in both
    "mapl, with a budget": ("mapl",),  # sums over the tree end the run early
    "flt, one joins late": ("flt", "meta-l2c"),  # averages over the tree; a peer joins; senders are chosen
    "fedtgp": ("fedproto", "fedtgp", "feddistill"),  # bodies of the classes that a peer has
    "fedfomo": ("fedfomo",),  # questions, answers to some, and a late joiner
    "cga": ("cga",),  # answers in the round of the question
    "gossip": ("gossip",),  # one body to a random neighbor
    "ad-psgd": ("ad-psgd",),  # pairs that ask and answer
    "divshare, one joins late": ("divshare",),  # several kinds, each to random neighbors
    "def-kt": ("def-kt",),  # pairs: each sends to one, or receives from one
    # To an aggregator and back; every receiver's body has another layout.
    "heterofl": ("dfml", "fedavg-dec", "fedprox-dec", "fml-dec", "heterofl", "fedrolex"),
    "fedkd, some take part": ("fedkd",),  # the layout of a body is known only within limits
    "l2c, on disk": ("l2c",),  # bodies in 16 bits, which stay on the disk of the receiver
}
"""One run for each shape of conversation, and the methods that have it.

With equal shapes, methods differ in what they compute, which the golden runs pin; their runs over sockets are slow
tests. A new method of one of these shapes is added to its line; all runs of a method that has no line use sockets.
test_time_varying_graphs.py has other graphs in other rounds.
"""
KNOWN = {method for methods in CONVERSATIONS.values() for method in methods}
OVER_TCP = ("mapl, pruned", "l2c, pruned", "fedavg, some take part")


def test_each_shape_of_conversation_is_that_of_its_run() -> None:
    assert set(ALGORITHMS) >= KNOWN
    assert all(RUNS[name]["algorithm"]["name"] in methods for name, methods in CONVERSATIONS.items())


def is_quick(name: str) -> bool:
    return name in CONVERSATIONS or RUNS[name]["algorithm"]["name"] not in KNOWN


@pytest.mark.parametrize(
    ("name", "same_host"),
    [
        pytest.param(name, same_host, marks=[] if quick else [pytest.mark.slow])
        for name, same_host, quick in (
            *((name, True, is_quick(name)) for name in RUNS),
            *((name, False, name == "fedavg, some take part") for name in OVER_TCP),
        )
    ],
)
def test_sockets_match_simulate_in_bits_and_byte_counts(
    name: str, same_host: bool, make_run: Any, prepare: Any, warm: Any, simulated: Any, tmp_path: Path
) -> None:
    settings = {**RUNS[name], "transport": {**RUNS[name].get("transport", {}), "same_host": same_host}}
    run = make_run(**settings, chaos={"link": {"jitter": 0.02}})
    sockets, expected = prepare(tmp_path / "sockets", run), simulated(name)
    codes = warm.run(sockets)
    assert outcome(results(sockets)) == outcome(results(expected)), _logs(sockets)
    assert codes == dict.fromkeys(range(run.peers), 0)
    for peer in range(run.peers):
        assert records(sockets, peer) == records(expected, peer)
        warnings = [line for line in sockets.peer(peer).log.read_text().splitlines() if "WARNING" in line]
        # Harmless: a closing neighbor may not confirm, or not complete a handshake that it no longer needs.
        harmless = ("final messages unacknowledged", "connection refused: ")
        assert [line for line in warnings if not any(text in line for text in harmless)] == []
        assert sockets.peer(peer).output.read_text() == ""


def _logs(folder: Any) -> str:
    return "\n".join(files.log.read_text() for files in folder.peers())


def test_mapl_runs_prune_edges_and_spend_a_budget(make_run: Any, simulated: Any) -> None:
    """Show that the runs above cover pruning and budgets."""
    run = make_run(**RUNS["mapl, pruned"])
    pruned = results(simulated("mapl, pruned"))
    kinds = {kind for result in pruned for kinds in result.sent.values() for kind in kinds}
    assert kinds == {"Head", "Prototypes"}
    heads = sum(kinds.get("Head", [0])[0] for result in pruned for kinds in result.sent.values())
    assert 30 < heads < 30 * (run.rounds - 1)  # 30 directed edges
    budget = results(simulated("mapl, with a budget"))
    assert [result.rounds_done for result in budget] == [4] * 4  # 8 messages a round
    tree = [result.peer for result in budget if any("Spent" in kinds for kinds in result.sent.values())]
    assert tree == [0, 1, 2, 3]


def test_l2c_prunes_one_direction_and_meta_l2c_sends_only_the_encoder(simulated: Any) -> None:
    """Show that the runs above cover pruning by L2C and meta-L2C."""
    pruned = results(simulated("l2c, pruned"))
    sent = [kinds for result in pruned for kinds in result.sent.values()]
    assert {kind for kinds in sent for kind in kinds} == {"Update"}
    assert sum(kinds["Update"][0] for kinds in sent) == 2 * 30 + 3 * 6
    pruned = results(simulated("meta-l2c, pruned"))
    on_the_tree = [result.sent["0"] for result in pruned if "0" in result.sent]
    assert [kinds["EncoderParameters"][0] for kinds in on_the_tree] == [5] * 5
    assert sum(kinds["Progress"][0] < 5 for kinds in on_the_tree) >= 3


def test_number_of_slots_does_not_change_the_result(make_run: Any, prepare: Any, warm: Any, tmp_path: Path) -> None:
    outcomes = []
    for slots in (1, 4):
        folder = prepare(tmp_path / f"{slots}", make_run(slots=slots, chaos={"link": {"jitter": 0.01}}))
        assert set(warm.run(folder).values()) == {0}
        outcomes.append(outcome(results(folder)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.usefixtures("fast_children")
def test_peers_command_is_bit_identical_to_simulate(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run(peers=2, rounds=2, models="tiny4", algorithm={**MAPL})
    folder = prepare(tmp_path / "run", run)
    command = [sys.executable, "-m", "peers", "--run"]
    # --run takes the folder or the file in it.
    with (
        subprocess.Popen([*command, str(folder.root), "--me", "0"]) as first,
        subprocess.Popen([*command, str(folder.run_file), "--me", "1"]) as second,
    ):
        assert (first.wait(200), second.wait(200)) == (0, 0)
    assert outcome(results(folder)) == outcome(simulate(run))
