"""`p2pfl models`, `model` and `data show` with models of users."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from p2pfl.api import open_run
from p2pfl.run_file.load import load
from p2pfl.run_folder.new_run import create
from p2pfl.simulation.simulate import simulate
from tests.launcher_fixtures import Invoke
from tests.plugin_fixtures import Project

NETS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, in_channels, width=4):
        super().__init__()
        self.fc = nn.Linear(4 * width, num_classes)
        self.body = nn.Sequential(nn.Conv2d(in_channels, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(2))
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        return self.fc(self.body(x).flatten(1))


class Words(nn.Module):
    def __init__(self, classes, vocab_size, vocabulary=3):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, vocabulary)
        self.fc = nn.Linear(vocabulary, classes)

    def forward(self, x):
        return self.fc(self.embed(x).mean(1)) * float(torch.ones(1).item())


class Vectors(nn.Sequential):
    def __init__(self, num_classes, in_features):
        super().__init__(nn.Linear(in_features, num_classes))
"""

RUN = """\
name: own
peers: 2
rounds: 2
graph: complete
data: {dataset: digits, partition: {name: iid, per_peer: 20}}
models: my_nets.Net(width=2)
algorithm: {name: fedavg, batch: 16}
device: cpu
"""


@pytest.fixture
def file(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = project(RUN, my_nets=NETS)
    monkeypatch.chdir(path.parent)
    return path


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("my_nets.Net(width=2):fc", ["--channels", 1, "--size", "8x9"], 20 + 4 + 90),
        ("my_nets.Words", ["--inputs", "tokens", "--channels", 7, "--size", 5], 21 + 40),
        ("my_nets.Vectors", ["--inputs", "vectors", "--channels", 7], 80),
        ("conv1d-4", ["--inputs", "series", "--channels", 2, "--size", 9], 44 + 50),
    ],
)
@pytest.mark.usefixtures("file")
def test_models_describes_what_a_run_accepts(
    name: str, options: list[object], parameters: int, invoke: Invoke
) -> None:
    outcome = invoke("models", name, *options, "--json")
    assert outcome.exit_code == 0, outcome.stderr
    (member,) = json.loads(outcome.stdout)["members"]
    assert member.get("parameters") == parameters, member


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "8x"], "'8x' is not a number, nor two such as 28x32"),
        (["--inputs", "series", "--size", "8x8"], "series have 1 number, not 2"),
    ],
)
def test_models_refuses_other_sizes(options: list[str], message: str, invoke: Invoke) -> None:
    outcome = invoke("models", "mlp-4", *options)
    assert outcome.exit_code == 2
    assert message in outcome.stderr


def test_data_show_warns_of_what_a_resumed_run_would_lose(file: Path, invoke: Invoke) -> None:
    outcome = invoke("data", "show", file)
    assert outcome.exit_code == 0
    (line,) = [line for line in outcome.stderr.splitlines() if "steps" in line]
    assert line.startswith(
        "warning: 'my_nets.Net(width=2)': attributes that training changes are not in its state (ste"
    )


@pytest.mark.exhaustive
def test_weights_of_a_peer_load_into_the_class_of_the_user(file: Path, tmp_path: Path, invoke: Invoke) -> None:
    folder = create(load(file), tmp_path / "run")
    outcome = invoke("model", folder.root, "--peer", 1, "-o", tmp_path / "net.pt")
    assert outcome.exit_code == 1
    assert "peer 1 has written no checkpoint yet" in outcome.stderr
    simulate(load(folder.run_file), folder)

    outcome = invoke("model", folder.root, "--peer", 1, "-o", tmp_path / "net.pt")
    assert outcome.stdout == f"{tmp_path}/net.pt: weights of peer 1; rounds completed: 2\n"
    recorded = open_run(folder.root).model(1)
    weights = torch.load(tmp_path / "net.pt", weights_only=True)
    net = sys.modules["my_nets"].Net(num_classes=10, in_channels=1, width=2)
    net.load_state_dict(weights)
    assert list(open_run(folder.root).weights(1)) == list(weights)
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(net.eval()(x), recorded(x))

    outcome = invoke("model", folder.root, "--peer", 0, "-o", tmp_path / "net.pt")
    assert outcome.exit_code == 2
    assert "exists; choose another file, or add --force" in outcome.stderr
    assert invoke("model", folder.root, "--peer", 0, "-o", tmp_path / "net.pt", "--force").exit_code == 0
    changed = torch.load(tmp_path / "net.pt", weights_only=True)["body.1.running_mean"]
    assert not torch.equal(changed, weights["body.1.running_mean"])
