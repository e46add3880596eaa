"""Runs without training (``time.train: false``): the messages and seconds of trained runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from p2pfl.algorithms import ALGORITHMS
from p2pfl.algorithms.dpsgd import Parameters
from p2pfl.errors import RunFileError
from p2pfl.messaging.wire import encode
from p2pfl.run_file.load import from_dict
from p2pfl.run_file.run import Run
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics
from p2pfl.session.session import Session
from p2pfl.simulation import simulate as simulation
from p2pfl.simulation.untrained import SMALL, SharedBodies, SharedMemory
from tests.conftest import tree
from tests.golden.runs import RUNS
from tests.unit.session.test_clock import UNEVEN

WITHOUT_LEARNED_RECEIVERS = {
    name: {**changes, "algorithm": {**changes["algorithm"], **off}}
    for name, changes in RUNS.items()
    if not ALGORITHMS[changes["algorithm"]["name"]].sends_training
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
"""The small run of each method. What is pruned, whom FedFomo asks, and FedKD's ranks depend on what was learned."""
QUICK = (
    "dpsgd, steps",  # sends before it trains
    "dpsgd, el-local",  # another graph in every round
    "fedproto, some take part",  # several architectures
    "dfml",  # requests and replies
    "def-kt",  # pairs
    "mapl, with a budget",  # a sum over all peers, by which the run ends
)


COMPARED = ("peer", "t", "seconds", "elapsed", "sent", "received", "missing", "sources", "receivers")
"""What does not depend on values in the records."""


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    records = [record for files in folder.peers() for record in metrics.read(files.metrics)]
    return [{key: record[key] for key in COMPARED} for record in records]


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in WITHOUT_LEARNED_RECEIVERS
    ],
)
def test_messages_and_seconds_are_those_of_a_trained_run(name: str, prepare: Any, tmp_path: Path) -> None:
    found = []
    for train in (True, False):
        run = from_dict(tree(**copy.deepcopy(WITHOUT_LEARNED_RECEIVERS[name]), time={**UNEVEN, "train": train}))
        folder = prepare(tmp_path / str(train), run)
        simulation.simulate(run, folder, clock=True)
        found.append(rounds(folder))
    trained, without = found
    assert without == trained
    assert any(record["seconds"]["training"] > 0 for record in without)


@pytest.mark.exhaustive
def test_a_pruned_run_has_as_many_messages_as_a_trained_one() -> None:
    """How many neighbors remain does not depend on what was learned, only which ones."""
    runs = [from_dict(tree(**copy.deepcopy(RUNS["l2c, pruned"]), time={"train": train})) for train in (True, False)]
    sent = [[result.sent for result in simulation.simulate(run, clock=True)] for run in runs]
    counts = [sum(sum(kinds["Update"]) for peer in each for kinds in peer.values()) for each in sent]
    assert counts[0] == counts[1]


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """The sessions of the next runs."""
    found: list[Session] = []

    class Kept(Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr(simulation, "Session", Kept)
    return found


def test_models_of_the_same_architecture_share_memory_and_are_not_trained(
    make_run: Callable[..., Run], sessions: list[Session]
) -> None:
    ditto = {"name": "ditto", "batch": 16, "momentum": 0.9}
    run = make_run(peers=4, rounds=2, models="tiny-cnn", algorithm=ditto, time={"train": False})
    results = simulation.simulate(run, clock=True)
    tensors = [list(session.algorithm.module_tensors().values()) for session in sessions]
    first = tensors[0]
    assert len(first) == 2 * len(
        list(chain(sessions[0].algorithm.model.parameters(), sessions[0].algorithm.model.buffers()))
    )
    pointers = {tensor.data_ptr() for tensor in chain(*tensors)}
    assert len(pointers) == len(first) / 2  # of all eight models
    assert not any(session.algorithm.optimizer.state for session in sessions)
    assert {result.digest for result in results} == {results[0].digest}
    assert [result.accuracy for result in results] == [None] * 4
    assert all(result.seconds["training"] > 0 for result in results)


def test_architectures_share_only_tensors_of_the_same_form(
    make_run: Callable[..., Run], sessions: list[Session]
) -> None:
    run = make_run(peers=8, rounds=1, models="tiny4", algorithm="fedproto", time={"train": False})
    simulation.simulate(run, clock=True)
    by_model: dict[str, set[tuple[int, ...]]] = {}
    for session in sessions:
        model = session.algorithm.model
        by_model.setdefault(model.name, set()).add(tuple(x.data_ptr() for x in model.parameters()))
    assert [len(found) for found in by_model.values()] == [1] * 4
    assert len(set.union(*by_model.values())) == 4


def body(value: float, n: int = 100) -> Parameters:
    return Parameters({"w": torch.full((n,), value)})


def test_bodies_of_the_same_form_share_memory() -> None:
    memory = SharedMemory()
    stores = [SharedBodies(memory, None), SharedBodies(memory, None)]

    def stored(store: SharedBodies, message: Parameters) -> Tensor:
        encoded = encode(message)
        return store.map(store.write(encoded), encoded.size)

    one, two = (stored(store, body(value)) for store, value in zip(stores, (1.0, 2.0), strict=True))
    assert one.data_ptr() == two.data_ptr()
    assert torch.equal(two.view(torch.float32), torch.ones(100))  # the first message stands for all
    assert stored(stores[0], body(3.0, n=101)).data_ptr() != one.data_ptr()


def test_small_bodies_are_real() -> None:
    store = SharedBodies(SharedMemory(), None)
    places = [store.write(encode(body(value, SMALL // 4))) for value in (1.0, 2.0)]
    assert [float(store.map(place, SMALL).view(torch.float32)[0]) for place in places] == [1.0, 2.0]


def test_messages_in_transit_take_the_memory_of_one(make_run: Callable[..., Run], sessions: list[Session]) -> None:
    received: set[int] = set()
    run = make_run(peers=5, rounds=3, models="tiny-cnn", graph="ring", time={"train": False})

    def look(peer: int, t: int) -> None:
        for session in sessions:
            session.endpoint.mailbox.on_discard = lambda message: None
            queues = session.endpoint.mailbox._queues.values()
            received.update(m.stored.data_ptr() for queue in queues for m in queue if m.stored is not None)

    simulation.simulate(run, None, look, clock=True)
    assert len(received) == 1


# ---- what is refused


def test_without_a_clock_it_is_refused(make_run: Callable[..., Run]) -> None:
    with pytest.raises(RunFileError, match=r"time\.train: false leaves training out.*simulate --clock"):
        simulation.simulate(make_run(time={"train": False}))


@pytest.mark.parametrize("name", [name for name, method in ALGORITHMS.items() if method.sends_training])
def test_methods_that_send_what_training_computes_are_refused(make_run: Callable[..., Run], name: str) -> None:
    with pytest.raises(RunFileError, match=rf"time\.train: {name} sends what its training computes"):
        make_run(algorithm=name, time={"train": False})


@pytest.mark.parametrize("attacker", [0, 1])
def test_bodies_of_attackers_stand_for_none_of_others(make_run: Callable[..., Run], attacker: int) -> None:
    attack = {"name": "noise", "std": 1e38, "peers": [attacker]}
    algorithm = {"name": "dpsgd", "order": "atc"}
    run = make_run(algorithm=algorithm, graph="ring", models="tiny-cnn", time={"train": False}, adversaries=[attack])
    for result in simulation.simulate(run, clock=True):
        from_attacker = sum(kind[0] for kind in result.received.get(str(attacker), {}).values())
        assert result.skipped.get("messages", 0) == from_attacker


def test_such_a_run_has_other_settings(make_run: Callable[..., Run]) -> None:
    plain = make_run()
    assert make_run(time={"train": True}).config_hash() == plain.config_hash()
    assert make_run(time={"train": False}).config_hash() != plain.config_hash()
