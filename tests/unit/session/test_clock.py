"""Runs on a simulated clock: the bits of other runs, seconds computed by hand, and peers that are down."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from p2pfl.algorithms.dpsgd import DPSGD
from p2pfl.messaging.schema import Body
from p2pfl.models.cost import flops
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import Result, RunFolder
from p2pfl.run_folder.replay import order_of
from p2pfl.session import metrics
from p2pfl.session.build import load_data
from p2pfl.simulation.simulate import simulate
from tests.conftest import tree
from tests.golden.runs import RUNS

PAIR: dict[str, Any] = {
    "peers": 2,
    "data": {"partition": {"name": "iid"}},
    "algorithm": {"name": "dpsgd", "batch": 1000, "local_epochs": 1},
    "eval_every": 100,
}
"""Two peers, each of which trains for one batch in each round."""
UNEVEN: dict[str, Any] = {
    "devices": {"lognormal": {"median": 1e8, "ratio": 20}},
    "network": {"latency": 0.3, "bandwidth": 2e5, "interface": 3e5},
}
"""Speeds, links and interfaces at which the peers are far apart, and never beyond a deadline."""
QUICK = ("dpsgd, el-local", "fedproto, some take part", "mapl, with a budget")


def on_clock(run: Run, folder: RunFolder | None = None) -> list[Result]:
    return simulate(run, folder, clock=True)


def seconds_of_training(run: Run, peer: int, speed: float) -> float:
    """Return how long one epoch takes."""
    dataset, subsets = load_data(run)
    each = flops("tiny-mixer", dataset.channels, dataset.size, dataset.classes)
    assert each.training > 2 * each.forward
    return len(subsets[peer].train) * each.training / speed


def records(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for files in folder.peers() for record in metrics.read(files.metrics)]


def speeds(tmp_path: Path, *values: float) -> dict[str, Any]:
    path = tmp_path / "speeds.csv"
    path.write_text("peer,speed\n" + "".join(f"{peer},{value}\n" for peer, value in enumerate(values)))
    return {"file": str(path)}


def trace(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["peer,down,up", *lines]))
    return str(path)


# ---- bits


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUNS]
)
def test_rounds_end_with_the_bits_of_other_simulated_runs(name: str, simulated: Callable[[str], RunFolder]) -> None:
    run = from_dict(tree(**{**copy.deepcopy(RUNS[name]), "time": UNEVEN}))
    expected = [files.result() for files in simulated(name).peers()]
    assert [result.digest for result in on_clock(run)] == [result.digest for result in expected if result]


def test_equal_runs_write_equal_records(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    changes = {"availability": {"churn": {"up": 3.0, "down": 1.0}}, **UNEVEN}
    run = make_run(rounds=6, peers=5, graph="ring", time=changes, transport={"deadline": 2.0, "give_up": 0.7})
    found = []
    for name in ("one", "two"):
        results = on_clock(run, folder := prepare(tmp_path / name, run))
        found.append([{**record, "cost": None} for record in records(folder)])
        found[-1] += [{"digest": result.digest, "rounds": result.rounds_done} for result in results]
    assert found[0] == found[1]
    assert any(record.get("missing") for record in found[0])


# ---- rounds that do not wait for one another

APART: dict[str, Any] = {"rounds": 5, "peers": 5, "graph": "ring", "time": UNEVEN}


def test_rounds_with_staleness_0_end_with_the_bits_of_rounds_that_wait(make_run: Any) -> None:
    waiting, stale = (on_clock(make_run(**APART, synchrony=synchrony)) for synchrony in ("rounds", {"staleness": 0}))
    assert [result.digest for result in stale] == [result.digest for result in waiting]


def test_rounds_that_do_not_wait_take_fewer_seconds_and_can_be_replayed(
    make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    run = make_run(**APART, synchrony="none")
    results = on_clock(run, folder := prepare(tmp_path / "run", run))
    slowest = max(result.seconds["total"] for result in on_clock(make_run(**APART)))
    assert sum(result.seconds["total"] < 0.8 * slowest for result in results) >= 3
    again = prepare(tmp_path / "again", run)
    for files in folder.peers():
        shutil.copyfile(order_of(files), order_of(again.peer(files.peer)))
    assert [result.digest for result in simulate(run, again)] == [result.digest for result in results]


# ---- seconds


def test_training_takes_its_flop_over_the_speed_of_the_device(make_run: Any, tmp_path: Path) -> None:
    run = make_run(rounds=2, **PAIR, time={"devices": speeds(tmp_path, 1e9, 2e8), "network": {"latency": 0.0}})
    fast, slow = on_clock(run)
    assert fast.seconds["training"] == pytest.approx(2 * seconds_of_training(run, 0, 1e9))
    assert slow.seconds["training"] == pytest.approx(2 * seconds_of_training(run, 1, 2e8))
    assert slow.seconds["waiting"] == pytest.approx(0.0, abs=1e-2)
    assert slow.seconds["total"] == pytest.approx(slow.seconds["training"] + slow.seconds["waiting"])


def test_a_message_takes_its_bytes_over_the_bandwidth_and_the_latency(
    make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    run = make_run(rounds=1, **PAIR, time={"network": {"latency": 1.5, "bandwidth": 1e4}})
    on_clock(run, folder := prepare(tmp_path / "run", run))
    for record in records(folder):
        (_, payload, header) = record["sent"][str(1 - record["peer"])]["Parameters"]
        seconds, begin = record["seconds"], 100 / 1e4  # the Begin of the round, and gaps between tensors
        assert seconds["waiting"] == pytest.approx(1.5 + (payload + header) / 1e4, abs=begin)
        assert record["elapsed"] == pytest.approx(seconds["training"] + seconds["waiting"], abs=1e-3)


def test_peers_are_charged_no_more_cpu_time_than_there_was(make_run: Any) -> None:
    before = process_time()
    results = on_clock(make_run(time=UNEVEN))
    assert sum(result.cost["cpu_seconds"] for result in results) <= process_time() - before


def test_evaluation_takes_time_only_if_asked(make_run: Any) -> None:
    free, timed = (
        on_clock(make_run(rounds=1, **PAIR, time={"evaluation": evaluation}))[0].seconds["evaluating"]
        for evaluation in (False, True)
    )
    assert free == 0.0
    assert timed > 0.0


def test_speeds_are_drawn_with_exact_median_and_ratio(make_run: Any) -> None:
    run = make_run(time={"devices": {"lognormal": {"median": 3e8, "ratio": 10}}})
    drawn = sorted(run.file.time.devices.speeds(101, seed=5))
    assert drawn[-1] / drawn[0] == pytest.approx(10)
    assert drawn[50] == pytest.approx(3e8)
    assert drawn != sorted(run.file.time.devices.speeds(101, seed=6))


# ---- deadlines and absent peers


def test_a_slow_peer_misses_the_deadline_of_the_others(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    """The fast peer waits for the deadline in each round, and the slow one never waits."""
    time = {"devices": speeds(tmp_path, 1e9, 1e6), "network": {"latency": 0.0}}
    run = make_run(rounds=2, **PAIR, time=time, transport={"deadline": 0.5})
    on_clock(run, folder := prepare(tmp_path / "run", run))
    fast, slow = ([record for record in records(folder) if record["peer"] == peer] for peer in (0, 1))
    assert [record["missing"] for record in fast] == [{"Parameters": [1]}] * 2
    assert [record["seconds"]["waiting"] for record in fast] == pytest.approx([0.5, 0.5])
    assert [record["seconds"]["waiting"] for record in slow] == pytest.approx([0.0, 0.0], abs=1e-3)


def test_a_peer_that_is_down_is_declared_dead_and_skips_rounds_when_it_is_back(
    make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    run = make_run(**PAIR)
    epoch = seconds_of_training(run, 0, 1e8)
    away = f"1,{epoch / 2},{20.5 * epoch}"  # in the middle of its first round
    time = {
        "devices": {"speed": 1e8},
        "network": {"latency": 0.0, "bandwidth": 1e12},
        "availability": trace(tmp_path, away),
    }
    run = make_run(rounds=25, **PAIR, time=time, transport={"give_up": 2.5 * epoch, "deadline": 100 * epoch})
    on_clock(run, folder := prepare(tmp_path / "run", run))
    there, absent = ([record for record in records(folder) if record["peer"] == peer] for peer in (0, 1))
    assert there[0]["elapsed"] == pytest.approx(3 * epoch, abs=1e-3)  # give_up after it was gone
    assert [record["missing"] for record in there[:18]] == [{"Parameters": [1]}] * 18
    assert absent[0]["elapsed"] == pytest.approx(21 * epoch, abs=1e-3)  # the other half of its epoch
    assert [record["t"] for record in absent[:2]] == [0, 17]  # its neighbor was in round 18, and keeps two
    assert not any(record["missing"] for record in (*absent[1:], *there[18:]))


def test_the_deadline_of_a_peer_that_is_down_waits_for_it(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    """It has waited for 0.4 of 1 s when it goes down for 10 s, and waits for the rest of the 1 s when it is back."""
    time = {
        "devices": speeds(tmp_path, 1e12, 1e2),
        "network": {"latency": 0.0},
        "availability": trace(tmp_path, "0,0.4,10.4"),
    }
    run = make_run(rounds=1, **PAIR, time=time, transport={"deadline": 1.0})
    on_clock(run, folder := prepare(tmp_path / "run", run))
    (record,) = (record for record in records(folder) if record["peer"] == 0)
    assert record["missing"] == {"Parameters": [1]}
    assert record["seconds"]["waiting"] == pytest.approx(11.0, abs=1e-3)


def test_a_message_in_transit_is_sent_again_when_its_receiver_is_back(
    make_run: Any, prepare: Any, tmp_path: Path
) -> None:
    time = {
        "devices": {"speed": 1e12},
        "network": {"latency": 1.0, "bandwidth": 1e12},
        "availability": trace(tmp_path, "1,0.5,4.0"),
    }
    run = make_run(rounds=1, **PAIR, time=time, transport={"deadline": 100, "give_up": 50})
    on_clock(run, folder := prepare(tmp_path / "run", run))
    assert [record["elapsed"] for record in records(folder)] == pytest.approx([5.0, 5.0], abs=1e-2)
    assert not any(record["missing"] for record in records(folder))


def test_a_message_in_transit_to_a_peer_that_finishes_is_of_no_use(make_run: Any, tmp_path: Path) -> None:
    """The fast peer ends after two deadlines. The slow one knows that a second after its first message left."""
    slow = 1e9 * seconds_of_training(make_run(**PAIR), 1, 1e9) / 4.0  # 4 s for an epoch
    time = {"devices": speeds(tmp_path, 1e12, slow), "network": {"latency": 3.0}}
    ended, last = on_clock(make_run(rounds=2, **PAIR, time=time, transport={"deadline": 1.0}))
    assert ended.seconds["total"] == pytest.approx(2.0, abs=0.1)
    assert (ended.missing, last.missing) == (2, 0)


def test_a_finished_peer_has_lost_nothing_when_it_is_back(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    """The fast peer has finished and been down before the slow one computes its second round."""
    speed = 1e9 * seconds_of_training(make_run(**PAIR), 1, 1e9) / 4.0  # 4 s for an epoch
    time = {
        "devices": speeds(tmp_path, 1e12, speed),
        "network": {"latency": 0.1},
        "availability": trace(tmp_path, "0,3,3.5"),
    }
    run = make_run(rounds=2, **PAIR, time=time, transport={"deadline": 1.0})
    on_clock(run, folder := prepare(tmp_path / "run", run))
    assert "neighbor finished peer=0" in folder.peer(1).log.read_text()
    assert not any("messages lost" in files.log.read_text() for files in folder.peers())


def test_an_error_in_what_receives_a_message_ends_the_run(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_receive(self: DPSGD, body: Body) -> Body:
        raise ZeroDivisionError("on arrival")

    monkeypatch.setattr(DPSGD, "on_receive", on_receive)
    with pytest.raises(ZeroDivisionError, match="on arrival"):
        on_clock(make_run())


@pytest.mark.parametrize(("queue", "waits"), [(1, True), (64, False)])
def test_a_sender_waits_for_a_link_with_too_many_entries(
    make_run: Any, tmp_path: Path, queue: int, waits: bool
) -> None:
    """It waits 0.01 s for a slow neighbor in each round, and needs much longer to send it a model."""
    time = {"devices": speeds(tmp_path, 1e15, 1e2), "network": {"latency": 0.0, "bandwidth": 1e4}}
    fast, _ = on_clock(make_run(rounds=6, **PAIR, time=time, transport={"queue": queue, "deadline": 0.01}))
    assert (fast.seconds["sending"] > 0.0) == waits
