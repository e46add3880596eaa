"""Users' models are tried out before a run: what is refused, what is remarked, and on which batches."""

from __future__ import annotations

import pytest

from p2pfl import api
from p2pfl.errors import ModelWarning, PluginError, RunFileError
from p2pfl.run_file.load import load
from p2pfl.session.build import check_models, load_data
from p2pfl.simulation.simulate import simulate
from tests.plugin_fixtures import Project
from tests.run_file_texts import SMALLEST

NETS = """\
import random

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(in_channels, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(16, num_classes)
        self.add()

    def add(self):
        pass

    def forward(self, x):
        return self.fc(self.body(x))


class HeadFirst(Net):
    def add(self):
        self.block = nn.Linear(16, 16)

    def forward(self, x):
        z = self.body(x)
        return self.fc(z + self.block(z))


class Squeezes(Net):
    def forward(self, x):
        return self.fc(self.body(x).squeeze())


class EvenOnly(Net):
    def forward(self, x):
        if len(x) % 2:
            raise ValueError("odd")
        return super().forward(x)


class Frozen(Net):
    def add(self):
        self.requires_grad_(False)


class Detached(Net):
    def forward(self, x):
        return self.fc(self.body(x).detach())


class Attributes(Net):
    total = 0

    def add(self):
        self.steps, self.seen, self.mean = 0, {"sizes": []}, np.zeros(1)
        self.generator = random.Random(1)
        self.register_buffer("lost", torch.zeros(()), persistent=False)
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.seen["sizes"].append(len(x))
            self.mean += 1
            self.generator.random()
            self.lost += 1
            self.kept += 1
            type(self).total += 1
        return super().forward(x)


class Cyclic(Net):
    def add(self):
        self.links = []
        self.links.append(self.links)


class Cached(Net):
    def forward(self, x):
        self.features = self.body(x)
        return self.fc(self.features)


class Extra(Net):
    def add(self):
        self.steps = 0

    def forward(self, x):
        self.steps += self.training
        return super().forward(x * min(1.0, self.steps / 4))

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


class Unstorable(Net):
    def get_extra_state(self):
        return {"names": {"a"}}

    def set_extra_state(self, state):
        pass


class FromNumPy(Net):
    def add(self):
        with torch.no_grad():
            self.fc.weight.copy_(torch.from_numpy(np.random.rand(10, 16)))

    def forward(self, x):
        return super().forward(x + float(np.random.rand()) * self.training)
"""

RUN = (
    SMALLEST.replace("tiny-cnn", "my_nets.Net")
    .replace("per_peer: 20", "per_peer: 21")
    .replace("fedavg", "{name: fedavg, batch: 16}")
)


def remarks(project: Project, name: str, run: str = RUN) -> list[str]:
    checked = load(project(run.replace("my_nets.Net", f"my_nets.{name}"), my_nets=NETS))
    return list(check_models(checked, *load_data(checked)))


@pytest.mark.parametrize("name", ["Net", "Cached", "Cyclic", "Extra"])
def test_usual_models_are_not_remarked(name: str, project: Project) -> None:
    assert remarks(project, name) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Frozen", r"models\.name: 'my_nets.Frozen' has nothing to train: none of its parameters has requires_grad"),
        ("Squeezes", r"returns \[16\] instead of \[1, 16\] in evaluation of a batch of 1 images .*squeeze\(1\)"),
        (
            "Unstorable",
            "get_extra_state of the module returns a value of type set, which a checkpoint cannot contain",
        ),
    ],
)
def test_model_that_cannot_work_is_refused_at_its_line(name: str, message: str, project: Project) -> None:
    with pytest.raises(RunFileError, match=rf"mine\.yaml:6: .*{message}"):
        remarks(project, name)


def test_batches_of_the_sizes_that_peers_have_are_tried(project: Project) -> None:
    line = NETS[: NETS.index('raise ValueError("odd")')].count("\n") + 1
    failure = rf"my_nets\.py:{line}: 'my_nets.EvenOnly' fails in training on a batch of 5 images of 1x8x8 \(peer 0\)"
    with pytest.raises(PluginError, match=failure):
        remarks(project, "EvenOnly")
    dropped = RUN.replace("batch: 16", "batch: 16, drop_last: true")
    with pytest.raises(PluginError, match=r"fails in evaluation of a batch of \d+ images"):
        remarks(project, "EvenOnly", dropped)


def test_attributes_that_checkpoints_lack_are_remarked_and_buffers_are_not(project: Project) -> None:
    (remark,) = remarks(project, "Attributes")
    assert "attributes that training changes are not in its state (steps, seen, mean and 3 more)" in remark


def test_parameters_without_a_gradient_and_unseeded_numbers_are_remarked(project: Project) -> None:
    (remark,) = remarks(project, "Detached")
    assert "no gradient reaches body.0.weight, body.0.bias: training does not change these parameters" in remark
    (remark,) = remarks(project, "FromNumPy")
    assert "two equal steps of training differ, as if it drew random numbers from NumPy or Python" in remark


def test_head_that_is_not_declared_last_is_remarked_unless_it_is_named(project: Project) -> None:
    (remark,) = remarks(project, "HeadFirst")
    assert remark.endswith("its head is 'fc', whose output it returns, not 'block'; `head` can name another")
    assert remarks(project, "HeadFirst:fc") == []


@pytest.mark.parametrize("algorithm", ["fedavg", "dfml", "def-kt", "ditto", "fedsim"])
def test_extra_state_stays_with_its_peer_and_is_resumed(algorithm: str, project: Project) -> None:
    text = RUN.replace("my_nets.Net", "my_nets.Extra").replace("name: fedavg", f"name: {algorithm}")
    results = simulate(load(project(text, my_nets=NETS)))
    assert len(results) == 2


def test_python_warns_before_there_is_a_run_folder(project: Project, tmp_path: object) -> None:
    run = api.load(project(RUN.replace("my_nets.Net", "my_nets.Detached"), my_nets=NETS))
    with pytest.warns(ModelWarning, match="no gradient reaches") as caught:
        run.partition()
    assert caught[0].filename == __file__
    with pytest.raises(ModelWarning):  # warnings are errors in tests
        run.simulate(tmp_path / "run")  # type: ignore[operator]
    assert not (tmp_path / "run").exists()  # type: ignore[operator]


def test_trial_changes_no_results(project: Project) -> None:
    run = load(project(RUN, my_nets=NETS))
    before = [result.digest for result in simulate(run)]
    check_models(run, *load_data(run))
    assert [result.digest for result in simulate(run)] == before
