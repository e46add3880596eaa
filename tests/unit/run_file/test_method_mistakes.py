"""Mistakes in the methods of a plug-in's algorithm: one line that says what the method should return."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2pfl.errors import PluginError
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session import metrics
from p2pfl.simulation.simulate import simulate
from tests.plugin_fixtures import METHOD, Project


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        ("cross_entropy(self.model(x), labels)", "not a tensor"),
        ("None", "not None"),
        ("{}", "but the dict is empty"),
        ("{'ce': cross_entropy(self.model(x), labels, reduction='none')}", r"but 'ce' is a tensor of shape \[16\]"),
        ("{'ce': 1.0}", "but 'ce' is of type float"),
        ("{'ce': cross_entropy(self.model(x), labels).detach()}", "but none has a gradient"),
    ],
)
def test_wrong_result_of_loss_is_reported_with_its_line(returned: str, wrong: str, project: Project) -> None:
    text = METHOD.replace("from torch import", "from torch.nn.functional import cross_entropy\nfrom torch import", 1)
    text += f"\n    def loss(self, x, labels):\n        return {returned}\n"
    expected = (
        rf"my_method\.py:{line_of(text, 'def loss')}: peer 0: round 0: loss should return its terms by name, "
        rf'scalar tensors, such as {{"ce": tensor}}, {wrong}'
    )
    with pytest.raises(PluginError) as caught:
        simulate(load(project(my_method=text)))
    assert re.search(expected, str(caught.value)), caught.value


RETURNED = [
    (
        "layouts",
        "self",
        "Layout.of(Head(parameters_of(self.model.linear_head)))",
        "should .* list .*, not of type Layout",
    ),
    ("layouts", "self", "None", r"a list with a Layout\.of\(body\) for each kind of message, not None"),
    ("layouts", "self", "[Head(parameters_of(self.model.linear_head))]", "not the body itself, of type Head"),
    ("weights", "self", "[0.5, 0.5]", "should return a dict of weights by peer, or None, not of type list"),
    ("weights", "self", "{99: 1.0}", "should be by peer, but 99 is not one: the peers are 0 to 3"),
    ("weights", "self", "{self.me: float('nan')}", r"should be finite, but the weight of peer \d is nan"),
    ("weights", "self", "{self.me: 'all'}", r"weights by peer, or None, but \d is of type str"),
    ("diagnostics", "self", "{'q': 'text'}", "should return a dict of numbers by name, but 'q' is of type str"),
    ("diagnostics", "self", "None", "should return a dict of numbers by name, not None"),
    ("extra_metrics", "self, whole", "None", "should return a list of ExtraMetric, not None"),
    ("extra_metrics", "self, whole", "[self.model]", "should return a list of ExtraMetric, not of type Model"),
    (
        "predict",
        "self, x",
        "self.model(x).argmax(1)",
        r"class scores, float \[B, K\], here \[\d+, 10\], not int64 \[\d+\]",
    ),
]
"""Method, parameters, what it returns, message."""


@pytest.mark.parametrize(("method", "parameters", "returned", "message"), RETURNED)
def test_wrong_result_of_a_method_is_reported_with_its_line(
    method: str, parameters: str, returned: str, message: str, project: Project, tmp_path: Path
) -> None:
    base = METHOD[: METHOD.index("    def layouts")] if method == "layouts" else METHOD
    text = f"{base}\n    def {method}({parameters}):\n        return {returned}\n"
    run = load(project(my_method=text))
    folder = RunFolder.create(tmp_path / "run", range(run.peers))
    folder.write_info({"id": "0" * 16})
    with pytest.raises(PluginError) as caught:
        simulate(run, folder)
    where = "" if method == "layouts" else r"peer \d: round 0: "
    expected = rf"my_method\.py:{line_of(text, f'def {method}')}: {where}{method} .*{message}$"
    assert re.search(expected, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            "def setup(self) -> None:",
            "def setup(self) -> None:\n        self.model = nn.Linear(2, 4)",
            "def setup",
            "self.model should remain the network that the run file names, not of type Linear",
        ),
        (
            "    def setup",
            "    def __init__(self, hyper):\n        self.hyper = hyper\n\n    def setup",
            "def __init__",
            r"__init__\(self, hyper\) should take \(self, hyper, context\)",
        ),
        (
            "    def setup",
            "    def __init__(self, hyper, context):\n        self.hyper = hyper\n\n    def setup",
            "def __init__",
            r"__init__ should call super\(\)\.__init__\(hyper, context\)",
        ),
        (
            "    def setup",
            "    state = 'model'\n\n    def setup",
            "def setup",
            r"state should be a tuple of names, \('model',\), not a string",
        ),
        (
            "    def layouts(self)",
            "    def weights(self, t):\n        return None\n\n    def layouts(self)",
            "def weights",
            r"weights\(self, t\) should take \(self\)",
        ),
    ],
)
def test_mistake_before_round_0_is_reported_with_its_line(
    old: str, new: str, line: str, message: str, project: Project
) -> None:
    text = METHOD.replace(old, new).replace("from torch import", "from torch import nn\nfrom torch import", 1)
    with pytest.raises(PluginError, match=rf"my_method\.py:{line_of(text, line)}: {message}"):
        simulate(load(project(my_method=text)))


@pytest.mark.exhaustive
def test_numbers_of_numpy_and_torch_are_recorded(project: Project, tmp_path: Path) -> None:
    text = METHOD.replace("from torch import", "import numpy as np\nimport torch\nfrom torch import", 1)
    text += "\n    def weights(self):\n        return {np.int64(self.me): torch.tensor(0.5)}\n"
    text += "\n    def diagnostics(self):\n        return {'q': np.float32(2)}\n"
    run = load(project(my_method=text))
    folder = RunFolder.create(tmp_path / "run", range(run.peers))
    folder.write_info({"id": "0" * 16})
    results = simulate(run, folder)
    record = metrics.read(folder.peer(1).metrics)[0]
    assert (record["weights"], record["diagnostics"]) == ({"1": 0.5}, {"q": 2.0})
    assert results[1].weights == {"1": 0.5}


@pytest.mark.parametrize("name", ["ce", "distance"])
def test_the_first_round_with_a_diverged_loss_is_logged(name: str, project: Project, tmp_path: Path) -> None:
    text = (
        METHOD
        + f"""
    def loss(self, x, labels):
        factor = float("nan") if self.t > 0 and self.me == 1 else 1.0
        return {{"{name}": factor * self.label_loss(self.model(x), labels)["ce"]}}
"""
    )
    text = text.replace("        self.train_or", "        self.t = t\n        self.train_or")
    run = load(project(my_method=text))  # of 3 rounds
    folder = RunFolder.create(tmp_path / "run", range(run.peers))
    folder.write_info({"id": "0" * 16})
    simulate(run, folder)
    logged = [re.findall(r"training loss diverged.*", folder.peer(me).log.read_text()) for me in range(3)]
    assert logged == [[], [f"training loss diverged t=1 terms={name}"], []]
