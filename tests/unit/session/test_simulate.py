"""All peers in one process: bit-identical runs, and errors of peers."""

from __future__ import annotations

from pathlib import Path
from time import process_time
from typing import Any

import pytest
import torch
import torch.utils.deterministic

from p2pfl.algorithms.dpsgd import DPSGD, Parameters
from p2pfl.errors import Deadlock, RunFileError
from p2pfl.messaging.net import Net
from p2pfl.models import build
from p2pfl.options import OptionErrors
from p2pfl.run_file.load import from_dict
from p2pfl.session import build as session_build
from p2pfl.session.build import load_data
from p2pfl.session.determinism import deterministic
from p2pfl.simulation.simulate import simulate

memory: Any = torch.utils.deterministic


def digests(run: Any) -> list[str]:
    return [result.digest for result in simulate(run)]


@pytest.fixture(scope="module")
def unchanged(make_run: Any) -> list[str]:
    """The digests of the run that other tests change."""
    return digests(make_run())


@pytest.mark.exhaustive
def test_equal_runs_are_bit_identical(make_run: Any, unchanged: list[str]) -> None:
    assert digests(make_run()) == unchanged


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["local", "dpsgd", "dfml"])
def test_peers_are_charged_no_more_cpu_time_than_there_was(method: str, make_run: Any) -> None:
    before = process_time()
    results = simulate(make_run(rounds=6, algorithm={"name": method, "lr": 0.01}))
    spent = process_time() - before
    assert 0.1 * spent < sum(result.cost["cpu_seconds"] for result in results) <= spent


def test_peers_end_with_different_models(unchanged: list[str]) -> None:
    assert len(set(unchanged)) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change",
    [
        {"slots": 1},
        {"slots": 3},
        {"chaos": {"link": {"delay": 0.5}, "kill": {"times": 2}, "straggler": {"peer": 1, "factor": 3}}},
        {"transport": {"deadline": 5}},
        {"eval_every": 2},
        {"checkpoint_every": 1},
        {"out": "x"},
    ],
    ids=str,
)
def test_result_does_not_depend_on_local_settings(make_run: Any, change: Any, unchanged: list[str]) -> None:
    assert digests(make_run(**change)) == unchanged


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "change", [{"seed": 4}, {"rounds": 4}, {"graph": "ring"}, {"algorithm": {"name": "dpsgd", "lr": 0.01}}], ids=str
)
def test_result_depends_on_the_inputs(make_run: Any, change: Any, unchanged: list[str]) -> None:
    assert digests(make_run(**change)) != unchanged


@pytest.mark.exhaustive
def test_run_folder_does_not_change_the_result(make_run: Any, prepare: Any, tmp_path: Path) -> None:
    run = make_run()
    folder = prepare(tmp_path / "run", run)
    assert [result.digest for result in simulate(run, folder)] == digests(run)


@pytest.mark.exhaustive
def test_leaves_the_global_state_of_torch_alone(make_run: Any) -> None:
    torch.manual_seed(1)
    expected = digests(make_run(data={"augment": "mapl"}))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert digests(make_run(data={"augment": "mapl"})) == expected
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert memory.fill_uninitialized_memory


@pytest.mark.parametrize("fill", [True, False])
def test_new_tensors_are_filled_only_if_asked_for(fill: bool) -> None:
    with deterministic(fill=fill):
        assert memory.fill_uninitialized_memory is fill
        with deterministic():
            assert memory.fill_uninitialized_memory is fill
    assert memory.fill_uninitialized_memory


@pytest.mark.exhaustive
def test_calls_on_round_for_each_peer_and_round(make_run: Any) -> None:
    seen: list[tuple[int, int]] = []
    simulate(make_run(rounds=2), on_round=lambda peer, t: seen.append((peer, t)))
    assert sorted(seen) == [(peer, t) for peer in range(4) for t in range(2)]


@pytest.mark.exhaustive
def test_raises_the_error_of_the_failing_peer(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = DPSGD.round

    async def round(self: DPSGD, t: int, net: Net) -> None:
        if self.me == 2 and t == 1:
            raise ZeroDivisionError("in the second round of peer 2")
        await original(self, t, net)

    monkeypatch.setattr(DPSGD, "round", round)
    with pytest.raises(ZeroDivisionError, match="in the second round of peer 2"):
        simulate(make_run())


def test_deadlock_names_the_waiting_peers(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def round(self: DPSGD, t: int, net: Net) -> None:
        await net.gather(Parameters)  # nobody has sent any

    monkeypatch.setattr(DPSGD, "round", round)
    with pytest.raises(Deadlock, match="peer 0 waits for Parameters of peer 1 in round 0; peer 0 waits for"):
        simulate(make_run(rounds=1))


@pytest.mark.parametrize(("given", "resolved"), [({}, False), (False, False), (True, True)])
@pytest.mark.parametrize("algorithm", ["local", "l2c"])
def test_masked_test_has_one_default_and_run_yaml_tells_it(
    make_run: Any, algorithm: str, given: Any, resolved: bool
) -> None:
    changes = {} if given == {} else {"masked_test": given}
    run = make_run(algorithm=algorithm, **changes)
    assert run.resolved()["masked_test"] is resolved
    assert from_dict(run.resolved()).file.masked_test is resolved


@pytest.mark.exhaustive
def test_masked_test_changes_only_the_evaluation(make_run: Any) -> None:
    partition = {"name": "clusters", "clusters": 2, "per_class": 20, "test_per_class": 10}
    data = {"partition": partition}
    plain, masked = (simulate(make_run(data=data, masked_test=which)) for which in (False, True))
    assert [result.digest for result in plain] == [result.digest for result in masked]
    assert all((a.loss or 0.0) > (b.loss or 0.0) for a, b in zip(plain, masked, strict=True))
    assert all(a.correct <= b.correct for a, b in zip(plain, masked, strict=True))
    for a, b in zip(plain, masked, strict=True):
        assert (a.masked_accuracies, a.unmasked_accuracies) == (b.masked_accuracies, b.unmasked_accuracies)
        assert (a.accuracy, b.accuracy) == (a.unmasked_accuracies["personal"], a.masked_accuracies["personal"])


NETS = """
import math
import numpy as np
import torch
from p2pfl import plugins
from torch import nn

@plugins.head("numpy-head")
def orthogonal(features, classes):
    layer = nn.Linear(features, classes)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(np.linalg.qr(layer.weight.detach().numpy().T)[0].T))
    return layer

@plugins.backbone("numpy-net", features=8)
def net(channels, size, features):
    return nn.Sequential(nn.Flatten(), orthogonal(channels * math.prod(size), features))
"""


def test_models_are_checked_with_the_data_on_the_meta_device(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []

    def recorded(*given: Any) -> Any:
        model = build(*given)
        devices.extend(parameter.device.type for parameter in model.parameters())
        return model

    monkeypatch.setattr(session_build, "build", recorded)
    run = make_run(models="tiny4", algorithm="local")
    dataset, _ = load_data(run)
    assert devices == []  # a peer builds its model only
    session_build.check_models(run, dataset)
    assert set(devices) == {"meta"}
    run = make_run(models="htfe4", algorithm="local")
    with pytest.raises(RunFileError, match=r"models\.name: images of 8x8 are too small for 2 unpadded 5x5"):
        session_build.check_models(run, load_data(run)[0])


@pytest.mark.parametrize("models", ["numpy-net", "tiny-cnn+numpy-head"])
def test_models_of_users_are_checked_on_the_cpu(models: str, make_run: Any, tmp_path: Path) -> None:
    """They may do anything while they are built, e.g. use NumPy."""
    (tmp_path / "nets.py").write_text(NETS)
    run = make_run(models=models, algorithm="local", plugins=[str(tmp_path / "nets.py")])
    session_build.check_models(run, load_data(run)[0])


def test_images_too_small_for_the_model_are_a_run_file_error(make_run: Any) -> None:
    with pytest.raises(RunFileError, match=r"models\.name: images of 8x8 are too small for four poolings; use"):
        simulate(make_run(models="l2c-conv4"))


def test_invalid_options_for_the_model_are_a_run_file_error(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def setup(self: Any) -> None:
        raise OptionErrors([(("batch",), "too large"), (("lr",), "too small")])

    run = make_run(algorithm={"name": "local", "batch": 16})
    monkeypatch.setattr(run.algorithm, "setup", setup)
    with pytest.raises(RunFileError) as info:
        simulate(run)
    assert [(problem.key, problem.message) for problem in info.value.problems] == [
        ("algorithm.batch", "too large"),
        ("algorithm.lr", "too small"),
    ]


def test_algorithm_that_needs_validation_samples_requires_them(
    make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition: dict[str, Any] = {"name": "fraction", "fraction": [0.1, 0.1, 0.1, 0.003]}
    run = make_run(algorithm="local", data={"partition": partition})
    monkeypatch.setattr(run.algorithm, "needs_validation", True)
    with pytest.raises(RunFileError, match=r"partition\.validation: local .* 4 of 4 peers have none \(0, 1, 2, 3\);"):
        simulate(run)
    run = make_run(algorithm="local", data={"partition": {**partition, "validation": 0.1}})
    with pytest.raises(RunFileError, match=r"1 of 4 peers have none \(3\); hold out .* so that each peer has one"):
        simulate(run)
