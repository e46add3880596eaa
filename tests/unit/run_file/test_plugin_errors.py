"""One line for each mistake in a plug-in: in its code, during a run, and in the run file's list."""

from __future__ import annotations

import re

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.errors import PluginError, RunFileError
from p2pfl.models import BACKBONES
from p2pfl.run_file.load import load
from p2pfl.simulation.simulate import simulate
from tests.plugin_fixtures import HELPERS, METHOD, PARTS, RUN, Project

pytestmark = pytest.mark.usefixtures("nothing_stays_registered")

TEXTS = {"my_method": METHOD, "my_parts": PARTS, "helpers": HELPERS}

MISTAKES = [
    ("my_method", "self.model.parameters())", "self.model.parameters()", "self.hyper.make", "SyntaxError: .+"),
    (
        "my_method",
        "from torch import",
        "from tohrch import",
        "from tohrch",
        "ModuleNotFoundError: No module named 'toh",
    ),
    (
        "my_method",
        "import Body, Layout",
        "import Bdoy, Layout",
        "import Bdoy",
        "ImportError: cannot import name 'Bdoy'",
    ),
    (
        "my_method",
        '@plugins.algorithm("head-mean")',
        "",
        "from __future__",
        "registers nothing; put a decorator such as @plugins",
    ),
    ("my_method", '"head-mean"', '"dpsgd"', "@plugins", "the name 'dpsgd' is taken: it is built in; choose"),
    (
        "my_method",
        '@plugins.algorithm("head-mean")',
        "@plugins.algorithm",
        "@plugins",
        'write the name: @plugins\\.algorithm\\("my',
    ),
    (
        "my_method",
        "@dataclass(frozen=True)\nclass Hy",
        "class Hy",
        "@plugins",
        "Hyper has fields, so it needs the dec",
    ),
    ("my_method", "(frozen=True)\nclass Hyper", "\nclass Hyper", "@dataclass\n", "TypeError: cannot inherit non-"),
    (
        "my_method",
        "    Hyper = Hyper\n",
        "    Hyper = dict\n",
        "@plugins",
        "HeadMean.Hyper must be a dataclass derived",
    ),
    (
        "my_method",
        "async def round",
        "round = None\n\n    async def rnd",
        "@plugins",
        "HeadMean.round must be `async def`",
    ),
    (
        "my_method",
        "(self, t: int, net: Net)",
        "(self, net: Net)",
        "async def",
        "round\\(self, .* should take \\(self, t,",
    ),
    ("my_method", "    def layouts(", "    def layuots(", "@plugins", "HeadMean must define layouts\\(self\\)"),
    ("my_method", "Algorithm[Hyper]", "dict", "@plugins", "HeadMean must be a class derived from p2pfl.algorithms"),
    (
        "my_method",
        "own_weight: float",
        "own_weight: Tensor",
        "@plugins",
        "Hyper.own_weight: Tensor is not a type for a run file; use bool, ",
    ),
    ("my_method", "from torch import Tensor", "raise ValueError('no\\nGPU')", "raise", "ValueError: no GPU"),
    ("my_method", "from torch import Tensor", "raise SystemExit", "raise", "SystemExit"),
    ("my_parts", "peers, seed, base", "peers, base", "def edges_of", "edges_of\\(self, peers, base\\) should take"),
    (
        "my_parts",
        "channels, size, features",
        "channels, size",
        "@plugins.backbone",
        "my_cnn\\(channels, size\\) should",
    ),
    ("my_parts", '"my-cnn"', '"my cnn"', "@plugins.backbone", "'my cnn' is not a name: it should consist of letters"),
    ("my_parts", '"two-layers"', '"two-layers", 3', "@plugins.head", "TypeError: head\\(\\) takes 1 positional"),
    ("helpers", "return", "retrun", "retrun", "SyntaxError: invalid syntax"),
]
"""File, replaced text and replacement, text in the line to blame, message."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "old", "new", "blamed", "message"), MISTAKES)
def test_mistake_is_answered_in_one_line_with_file_and_line(
    file: str, old: str, new: str, blamed: str, message: str, project: Project
) -> None:
    text = TEXTS[file].replace(old, new, 1)
    assert text != TEXTS[file]
    line = text[: text.index(blamed)].count("\n") + 1
    with pytest.raises(PluginError) as caught:
        load(project(**{file: text}))
    shown = str(caught.value)
    assert "\n" not in shown
    assert re.search(rf"project/{file}\.py:{line}: {message}", shown), shown
    assert "head-mean" not in ALGORITHMS
    assert "my-cnn" not in BACKBONES


RUNNING = [
    ("my_parts", "return pairs(peers)", "return pairs(peers, seed)", "TypeError: pairs\\(\\) takes 1 positional"),
    (
        "my_parts",
        "nn.Linear(16, features)",
        "nn.Linear(16, 8)",
        "'my-cnn' maps a batch of 2 .* to .2, 8. instead of ",
    ),
    ("my_parts", "nn.Linear(16, features)", "nn.Linear(9, 16)", "'my-cnn' fails for images of 1x8x8: RuntimeError: "),
    ("my_parts", "return nn.Sequential(*layers)", "return layers", "'my-cnn' must return a torch.nn.Module, not tup"),
    ("my_parts", "in enumerate(train)]", "in enumerat(train)]", "NameError: name 'enumerat' is not defined"),
    ("my_method", "self.optimizer = self.hyper.make_", "self.hyper.", "TypeError: .str. object is not"),
    (
        "my_method",
        "Head(parameters_of(self.model.linear_head)))",
        "Head({1, 2}))",
        "TypeError: Head.values: cannot send",
    ),
    ("my_method", "weights = {**dict.fromkeys(heads, 1.0)", "weights = {**heads[7]", "KeyError: 7"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("file", "old", "new", "message"), RUNNING)
def test_error_during_a_run_names_file_and_line(
    file: str, old: str, new: str, message: str, project: Project
) -> None:
    text = TEXTS[file].replace(old, new, 1)
    assert text != TEXTS[file]
    with pytest.raises(PluginError, match=rf"project/{file}\.py:\d+: .*{message}") as caught:
        simulate(load(project(**{file: text})))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("my_metod.py", r"no file 'my_metod.py' in /.*project; did you mean 'my_method.py'\?"),
        ("lab.heads", r"no module 'lab.heads' in /.*project, and none is installed"),
        ("{name: my_method.py, sha: 1}", "unknown key 'sha'; known: name, sha256, version; did you mean 'sha256'?"),
        ("my-method.py", "'my-method.py' is not a module name"),
    ],
)
def test_missing_plugin_is_reported_at_the_line_of_the_run_file(entry: str, message: str, project: Project) -> None:
    file = project(RUN.replace("my_method.py", entry))
    (file.parent / "my-method.py").write_text(METHOD)
    with pytest.raises(RunFileError, match=rf"mine\.yaml:4: plugins\.0(\.sha)?: {message}"):
        load(file)


def test_file_with_the_name_of_a_library_is_refused(project: Project) -> None:
    file = project(RUN.replace("my_method.py", "yaml.py"), yaml=METHOD)
    with pytest.raises(PluginError, match=r"yaml\.py:1: 'yaml' is also the name of a library; rename the file"):
        load(file)
