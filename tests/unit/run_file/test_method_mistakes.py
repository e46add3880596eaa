"""Mistakes in the methods of a plug-in's algorithm: one line that says what the method should return."""

from __future__ import annotations

import re

import pytest

from p2pfl.errors import PluginError
from p2pfl.run_file.load import load
from p2pfl.session.simulate import simulate
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
