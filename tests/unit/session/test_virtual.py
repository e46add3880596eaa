"""Runs in virtual time: the bytes of a real run, and times that can be computed by hand."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.base import Algorithm
from p2pfl.errors import RunFileError
from p2pfl.messaging.deadline import Deadline
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.simulation.machine import Machine, load
from p2pfl.simulation.prediction import Prediction, predict
from p2pfl.simulation.simulate import simulate
from p2pfl.simulation.virtual import VirtualRun, run_virtually
from p2pfl.simulation.virtual_loop import VirtualLoop
from tests.conftest import tree
from tests.golden.runs import RUNS

FREE: dict[str, Any] = {
    **dict.fromkeys(("round_seconds", "send_seconds", "receive_seconds", "start_seconds", "peer_start_seconds"), 0.0),
    **{f"{name}_seconds_per_byte": 0.0 for name in ("write", "send", "receive", "local")},
    **dict.fromkeys(("latency_within", "latency_between", "evaluation_seconds", "waiting_cpu"), 0.0),
    **dict.fromkeys(("bandwidth_between", "journal_rate"), 1e18),
    "cores": 4,
    "training_seconds": 1.0,
}
"""A machine on which nothing takes time but training: one second for a batch."""
EPOCHS: dict[str, Any] = {"algorithm": {"name": "dpsgd", "batch": 1000, "local_epochs": 1}}
"""One batch, and then one message to each neighbor."""
WITHOUT_LEARNED_RECEIVERS = {
    name: {**changes, "algorithm": {**changes["algorithm"], **off}}
    for name, changes in RUNS.items()
    for off in [
        {"prune_round": None}
        if "l2c" in name
        else {"exploration": 1.0, "exploration_decay": 0.0}
        if "fedfomo" in name
        else {"energy_start": 1.0, "energy_end": 1.0}
        if "fedkd" in name
        else {"threshold": 1e9}
        if "flt" in name
        else {"prune": False}
        if changes["algorithm"]["name"] in ("mapl", "mapl+") and "official" not in name
        else {}
    ]
}
"""The small run of each method; what is pruned, whom FedFomo asks, and FedKD's ranks depend on what was learned."""
QUICK = ("dpsgd, el-local", "fedproto, some take part", "mapl, with a budget")


def executed(make_run: Callable[..., Run], machine: dict[str, Any] | None = None, **changes: Any) -> VirtualRun:
    return run_virtually(make_run(**changes), Machine(**{**FREE, **(machine or {})}))


def seconds(virtual: VirtualRun) -> float:
    return max(peer.ends[-1] for peer in virtual.peers)


# ---- messages


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNS]
)
def test_bytes_by_edge_and_kind_equal_those_of_a_real_run(name: str, simulated: Callable[[str], RunFolder]) -> None:
    changes = copy.deepcopy(WITHOUT_LEARNED_RECEIVERS[name])
    virtual = run_virtually(from_dict(tree(**changes)), Machine(**FREE))
    same = changes == RUNS[name]
    real: list[Any]
    real = [files.result() for files in simulated(name).peers()] if same else simulate(from_dict(tree(**changes)))
    assert [{str(to): kinds for to, kinds in sorted(peer.sent.items())} for peer in virtual.peers] == [
        result.sent for result in real
    ]
    assert [len(peer.rounds) for peer in virtual.peers] == [
        result.rounds_done - joined
        for result, joined in zip(
            real, [changes.get("joins_at", {}).get(me, 0) for me in range(len(real))], strict=True
        )
    ]


@pytest.mark.exhaustive
def test_a_pruned_run_has_the_bytes_of_a_real_one(simulated: Callable[[str], RunFolder]) -> None:
    """How many neighbors remain does not depend on what was learned, only which ones."""
    virtual = run_virtually(from_dict(tree(**RUNS["l2c, pruned"])), Machine(**FREE))
    real: list[Any] = [files.result() for files in simulated("l2c, pruned").peers()]
    counted = [
        [sum(entry[1] for kinds in sent.values() for entry in kinds.values()) for sent in each]
        for each in ([peer.sent for peer in virtual.peers], [result.sent for result in real])
    ]
    assert sum(counted[0]) == sum(counted[1])


def test_every_method_has_a_dry_round() -> None:
    assert not [name for name, method in ALGORITHMS.items() if method.dry_round is Algorithm.dry_round]


def test_a_method_without_dry_round_is_an_error_at_its_line(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    monkeypatch.setattr(run.algorithm, "dry_round", Algorithm.dry_round)
    with pytest.raises(RunFileError, match="algorithm: dpsgd does not define dry_round"):
        run_virtually(run, Machine(**FREE))


# ---- time


@pytest.mark.parametrize(("slots", "expected"), [(4, 3.0), (2, 6.0), (1, 12.0)])
def test_peers_queue_for_the_compute_slots_of_their_host(
    make_run: Callable[..., Run], slots: int, expected: float
) -> None:
    virtual = executed(make_run, slots=slots)
    assert seconds(virtual) == pytest.approx(expected, abs=1e-3)  # 3 rounds of 4 peers
    assert [peer.seconds["training"] for peer in virtual.peers] == [3.0] * 4


def test_hosts_have_slots_of_their_own(make_run: Callable[..., Run]) -> None:
    assert seconds(executed(make_run, {"hosts": 4, "cores": 1})) == pytest.approx(3.0, abs=1e-3)
    assert seconds(executed(make_run, {"hosts": 2, "cores": 1})) == pytest.approx(6.0, abs=1e-3)


def test_messages_travel_between_hosts(make_run: Callable[..., Run]) -> None:
    apart, together = {"hosts": 4, "latency_between": 0.25}, {"latency_between": 0.25, "latency_within": 0.125}
    assert seconds(executed(make_run, apart, **EPOCHS)) == pytest.approx(3 * 1.25, abs=1e-3)
    assert seconds(executed(make_run, together, **EPOCHS)) == pytest.approx(3 * 1.125, abs=1e-3)
    delayed = {**EPOCHS, "chaos": {"link": {"delay": 0.5}}}
    assert seconds(executed(make_run, **delayed)) == pytest.approx(3 * 1.5, abs=1e-3)


def test_training_hides_messages_sent_before_it(make_run: Callable[..., Run]) -> None:
    assert seconds(executed(make_run, {"hosts": 4, "latency_between": 0.25})) == pytest.approx(3.0, abs=1e-3)


def test_the_bodies_of_a_host_queue_for_its_interface(make_run: Callable[..., Run]) -> None:
    def entry(virtual: VirtualRun) -> list[int]:
        return virtual.peers[0].sent[1]["Parameters"]

    messages, payload, header = entry(executed(make_run, **EPOCHS))
    size = (payload + header) / messages
    virtual = executed(make_run, {"hosts": 4, "bandwidth_between": size}, **EPOCHS)
    assert seconds(virtual) == pytest.approx(3 * (1.0 + 3.0), rel=0.01)  # three bodies, one after the other
    assert virtual.crossing[0] == pytest.approx(9 * size, rel=0.01)


def test_messages_take_cpu_time_in_the_slot(make_run: Callable[..., Run]) -> None:
    virtual = executed(make_run, {"send_seconds": 0.5, "receive_seconds": 0.25, "cores": 1}, peers=2, rounds=4)
    spent = sum(peer.seconds["messages"] for peer in virtual.peers)
    assert spent >= 0.75 * 2 * 4  # two peers send in four rounds, besides what opens and ends rounds
    assert seconds(virtual) == pytest.approx(8.0 + spent, abs=1.0)  # one core does everything


def test_a_peer_takes_cpu_time_also_while_it_waits(make_run: Callable[..., Run]) -> None:
    assert seconds(executed(make_run, {"waiting_cpu": 0.1})) == pytest.approx(3.3, abs=1e-3)


def test_slow_peers_delay_their_neighbors(make_run: Callable[..., Run]) -> None:
    assert seconds(executed(make_run, {"slow": {1: 3.0}})) == pytest.approx(9.0, abs=1e-3)
    chaos = {"straggler": {"peer": 1, "factor": 3}}
    assert seconds(executed(make_run, chaos=chaos)) == pytest.approx(9.0, abs=1e-3)


def test_a_deadline_ends_waits(make_run: Callable[..., Run]) -> None:
    changes = {**EPOCHS, "transport": {"deadline": 5.0, "give_up": 1.0}}
    virtual = executed(make_run, {"slow": {0: 100.0}}, **changes)
    assert virtual.peers[1].rounds == pytest.approx([6.0] * 3, abs=1e-3)
    assert [peer.missing for peer in virtual.peers] == [0, 3, 3, 3]


def test_neighbors_of_a_peer_that_dies_continue_after_give_up(make_run: Callable[..., Run]) -> None:
    virtual = executed(make_run, {"dies": {1: 1}}, graph="ring")
    assert [len(peer.rounds) for peer in virtual.peers] == [3, 1, 3, 3]
    assert virtual.peers[0].rounds == pytest.approx([1.0, 60.0, 1.0], abs=1e-3)
    assert [peer.missing for peer in virtual.peers] == [2, 0, 2, 0]


def test_a_peer_that_joins_after_its_death_never_takes_part(make_run: Callable[..., Run]) -> None:
    virtual = executed(make_run, {"dies": {1: 0}}, joins_at={1: 1})
    assert [len(peer.rounds) for peer in virtual.peers] == [3, 0, 3, 3]


def test_late_joiners_wait_for_their_round(make_run: Callable[..., Run]) -> None:
    virtual = executed(make_run, joins_at={2: 2})
    assert len(virtual.peers[2].rounds) == 1
    assert virtual.peers[2].ends == pytest.approx([3.0], abs=0.2)  # after a Begin that waited for 0.1 s


def test_equal_runs_are_equal(make_run: Callable[..., Run]) -> None:
    one, two = (executed(make_run, {"hosts": 2, "cores": 1, "send_seconds": 0.1}, **EPOCHS) for _ in range(2))
    assert one.peers == two.peers


def test_a_wait_in_virtual_time_takes_one_timer() -> None:
    turns = []

    async def wait() -> bool:
        return await Deadline(600.0).allows(asyncio.Event().wait())

    for stall in (float("inf"), None):
        loop = VirtualLoop(stall=stall)
        assert not loop.run_until_complete(wait())
        assert loop.time() == pytest.approx(600.0)
        turns.append(50_000 - loop._turns_left)
        loop.close()
    assert turns[0] < 10 < 300 < turns[1] < 500  # checks 10 s apart at first, and 1 s apart in the last minute


def test_timers_are_due_after_a_year_too() -> None:
    loop = VirtualLoop(max_turns=1000)  # a wait takes one for each day
    for seconds in (3e7, 1.0, 1e-3):
        loop.run_until_complete(asyncio.sleep(seconds))
    assert loop.time() == pytest.approx(3e7 + 1.001)
    loop.close()


# ---- predictions


def predicted(make_run: Callable[..., Run], machine: dict[str, Any] | None = None, **changes: Any) -> Prediction:
    return predict(executed(make_run, machine, **changes))


def test_predicts_times_and_footprints(make_run: Callable[..., Run]) -> None:
    found = predicted(make_run, {"hosts": 2, "cores": 1, "peer_start_seconds": 0.5, "start_seconds": 1.0})
    assert (found.started, found.seconds) == pytest.approx((2.0, 8.0), abs=0.6)
    assert found.host["tasks"].max == 2 * found.peer["tasks"].max == 18
    assert found.peer["connections"].max == 6
    assert found.sent.max == 3 * found.edges.max
    assert found.kinds["Parameters"][0] == 3 * 4 * 3
    assert 0.8 < found.cpu <= 1.0


def test_names_the_limit_that_is_exceeded_first(make_run: Callable[..., Run]) -> None:
    found = predicted(make_run, {"memory": 4.5e8, "host_memory": 4e8, "peer_memory": 2e7, "tasks": 90})
    first, second, *_ = found.limits
    assert (first.name, first.exceeded, first.peers) == ("memory of a host", True, 2)
    assert (second.name, second.exceeded, second.peers) == ("processes and threads of a host", False, 10)


def test_open_files_limit_the_peers_of_graphs_whose_degree_grows(make_run: Callable[..., Run]) -> None:
    machine = {"descriptors": 135, "peer_descriptors": 35, "neighbor_descriptors": 5}
    complete, ring = (predicted(make_run, machine, graph=graph) for graph in ("complete", "ring"))
    found = [next(limit for limit in each.limits if "open files" in limit.name) for each in (complete, ring)]
    assert [(limit.needed, limit.peers) for limit in found] == [(50, 21), (45, None)]


# ---- the machine's file


def test_a_machine_file_has_defaults_of_this_host(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("")
    assert load(file, 4) == Machine()
    file.write_text("hosts: 2\ntraining_seconds: {tiny-cnn: 0.5}\nslow: {3: 2}\n")
    assert load(file, 4) == Machine(hosts=2, training_seconds={"tiny-cnn": 0.5}, slow={3: 2.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: 2\ncroes: 2\n", "machine.yaml:2: croes: unknown key 'croes'; known: hosts, cores"),
        ("cores: 0\n", "machine.yaml:1: cores: should be"),
        ("latency_within: -1\n", "machine.yaml:1: latency_within: should be"),
        ("cores: 2\nslow:\n  7: 2\n", "machine.yaml:3: slow.7: no peer 7; the 4 peers are 0 to 3"),
        ("hosts: 5\n", "machine.yaml:1: hosts: 5, but there are only 4 peers"),
        ("- 1\n", "machine.yaml: not a mapping"),
        ("cores: [\n", "machine.yaml:2: invalid YAML"),
    ],
)
def test_mistakes_in_a_machine_file_are_located(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(text)
    with pytest.raises(RunFileError) as caught:
        load(file, 4)
    assert message in str(caught.value)


def test_a_missing_machine_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"machine\.yaml: cannot be read: No such file"):
        load(tmp_path / "machine.yaml", 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method",
    [
        "dpsgd",
        "dfml",
        "fedclassavg",
        "fedprox-dec",
        "fedprox-ssl",
        "fedstyle",
    ],
)
def test_measures_what_the_machine_does_not_say(make_run: Callable[..., Run], method: str) -> None:
    machine = Machine(**{**FREE, "training_seconds": None, "evaluation_seconds": {"other": 1.0}})
    run = make_run(algorithm={"name": method, "batch": 8}, rounds=1, models="tiny-mixer")
    (found,) = run_virtually(run, machine).computing.values()
    assert found.measured
    assert 0.0 < found.batch < 5.0
    assert 0.0 < found.sample < 1.0


@pytest.mark.parametrize(("method", "seconds"), [("dpsgd", 1.0), ("fml", 0.5)])
def test_a_batch_is_measured_for_one_model(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, method: str, seconds: float
) -> None:
    """The dry rounds of methods that train two count both."""
    clock = count()
    monkeypatch.setattr("p2pfl.simulation.machine.process_time", lambda: float(next(clock) * torch.get_num_threads()))
    machine = Machine(**{**FREE, "training_seconds": None})
    options = {"meme": "tiny-mixer"} if method == "fml" else {}
    run = make_run(algorithm={"name": method, "batch": 8, **options}, rounds=1, models="tiny-mixer")
    (found,) = run_virtually(run, machine).computing.values()
    assert found.batch == seconds
