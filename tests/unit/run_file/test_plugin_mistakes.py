"""What plug-ins return is checked: a mistake is answered in one line with the plug-in's file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from p2pfl.errors import PluginError, RunFileError
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from p2pfl.session.build import load_data
from p2pfl.simulation.simulate import simulate
from tests.plugin_fixtures import METHOD, PARTS, RUN, Project

SQUARES = '''\
import numpy as np
import torch

from p2pfl import plugins
from p2pfl.data import DatasetArrays, Loader


@plugins.dataset("squares")
class Squares(Loader):
    """Points in a square."""

    def read(self, root):
        x = np.random.default_rng(0).uniform(-1, 1, (90, 2)).astype(np.float32)
        y = (x[:, 0] > 0).astype(np.int64)
        return DatasetArrays(x, y, x, y, classes=2, mirror=False)
'''

SPLIT = "[Subset(mine, mine[:0], test[peer]) for peer, mine in enumerate(train)]"

RETURNED = [
    ("my_parts", "return pairs(peers)", "return None", "graph: edges_of should return edges, .* not NoneType"),
    ("my_parts", "return pairs(peers)", "return [(0, 1, 2)]", r"graph: an edge should be a pair .* not \(0, 1, 2\)"),
    ("my_parts", "return pairs(peers)", "return [(1, 1)]", "graph: edge 1-1 connects a peer to itself"),
    ("my_parts", "return pairs(peers)", "return [(3, 4)]", "graph: edge 3-4: no peer 4; the 4 peers are 0 to 3"),
    (
        "my_parts",
        SPLIT,
        "train[:3]",
        "data.partition: split should return a list with a Subset for each of .*, not 3 i",
    ),
    ("my_parts", SPLIT, "7", "data.partition: split should return a list with a Subset for each of .*, not int"),
    ("my_parts", SPLIT, "train", "data.partition: .* Subset objects; peer 0's is ndarray"),
    (
        "my_parts",
        "mine[:0], test",
        "mine[:0], 9 * test",
        "data.partition: test indices of peer 1 range from 207 to 40",
    ),
    ("my_parts", "mine[:0], test", "[], test", r"data.partition: validation .* an array int64 \[N\], not list"),
    ("my_parts", "mine[:0], test", "1.0 * mine, test", r"data.partition: validation .* not float64 \[23\]"),
    (
        "squares",
        "return Da",
        "return x, y  # Da",
        "data.dataset: squares: read should return DatasetArrays, not tuple",
    ),
    ("squares", "(x, y, x, y,", "(torch.tensor(x), y, x, y,", "data.dataset: squares: .* NumPy arrays, not Tensor"),
    (
        "squares",
        "np.int64",
        "float",
        r"data.dataset: squares: training labels are float64 \[90\]; expected int64 \[N\]",
    ),
    ("squares", "x, y, classes", "x[:9], y, classes", "data.dataset: squares: 9 test inputs but 90 labels"),
]
"""File, replaced text and replacement, message."""


@pytest.mark.parametrize(("file", "old", "new", "message"), RETURNED)
def test_wrong_result_is_reported_with_the_line_of_the_method(
    file: str, old: str, new: str, message: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    texts = {"my_parts": PARTS, "squares": SQUARES}
    text = texts[file].replace(old, new)
    assert text != texts[file]
    method = {"squares": "def read", "my_parts": "def edges_of" if "graph" in message else "def split"}[file]
    line = text[: text.index(method)].count("\n") + 1
    run = RUN
    if file == "squares":
        run = run.replace("plugins: [", "plugins: [squares.py, ").replace("digits", "squares")
        run = run.replace("my-cnn", "mlp-8")
    with pytest.raises(RunFileError) as caught:
        load_data(load(project(run, **{file: text})))
    shown = str(caught.value)
    assert "\n" not in shown
    assert re.search(rf"project/mine\.yaml:\d+: {message}.*; see /.*project/{file}\.py:{line}$", shown), shown


def test_state_that_setup_does_not_set_is_reported_at_setup(project: Project) -> None:
    line = METHOD[: METHOD.index("def setup")].count("\n") + 1
    run = load(project(my_method=METHOD.replace("self.optimizer =", "self.optimiser =")))
    with pytest.raises(
        PluginError, match=rf"my_method\.py:{line}: setup should set self\.optimizer, which the attrib"
    ):
        simulate(run)


def test_message_that_layouts_does_not_list_is_reported_where_it_is_sent(project: Project) -> None:
    line = METHOD[: METHOD.index("net.exchange")].count("\n") + 1
    text = METHOD.replace(
        "Layout.of(Head(parameters_of(self.model.linear_head)", "Layout.of(Head(parameters_of(self.model)"
    )
    assert text != METHOD
    with pytest.raises(PluginError) as caught:
        simulate(load(project(my_method=text)))
    shown = str(caught.value)
    assert re.search(rf"my_method\.py:{line}: peer 0: round 0: Head: unexpected tensors .*layouts should list", shown)


@pytest.mark.parametrize(
    ("method", "assigned", "place"),
    [
        (
            "def setup",
            "self.seen = {'peers': [1, object()]}",
            r"peer \d: self\.seen\['peers'\]\[1\] is of type object",
        ),
        ("async def round", "self.seen = np.mean([t, 1])", r"peer \d: round 0: self\.seen is of type numpy\.float64"),
    ],
)
def test_state_that_no_checkpoint_can_contain_is_an_error_at_once(
    method: str, assigned: str, place: str, project: Project, tmp_path: Path
) -> None:
    text = METHOD.replace(
        "    def setup(", "    seen = 0\n    state = ('model', 'optimizer', 'seen')\n\n    def setup("
    )
    text = text.replace("from torch import", "import numpy as np\nfrom torch import", 1)
    begin, end = text[: text.index(f"    {method}")], text[text.index(f"    {method}") :]
    signature, _, body = end.partition("\n")
    run = load(project(my_method=f"{begin}{signature}\n        {assigned}\n{body}"))
    folder = RunFolder.create(tmp_path / "run", range(run.peers))
    folder.write_info({"id": "0" * 16})
    line = begin.count("\n") + 1
    with pytest.raises(PluginError, match=rf"my_method\.py:{line}: {place}, which a checkpoint cannot contain"):
        simulate(run, folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", ["raise SystemExit('enough')", "exit('enough')"])
def test_end_of_the_program_in_a_round_is_an_error_of_its_line(error: str, project: Project, tmp_path: Path) -> None:
    """A SystemExit that leaves a task would end the event loop of all simulated peers."""
    text = METHOD.replace(
        "        local =", f"        if (t, self.me) == (1, 2):\n            {error}\n        local ="
    )
    line = text[: text.index(error)].count("\n") + 1
    run = load(project(my_method=text))
    folder = RunFolder.create(tmp_path / "run", range(run.peers))
    folder.write_info({"id": "0" * 16})
    expected = rf"my_method\.py:{line}: peer 2: round 1: SystemExit: enough"
    with pytest.raises(PluginError, match=expected):
        simulate(run, folder)
    log = folder.peer(2).log.read_text()
    assert "Traceback" in log
    assert f"my_method.py:{line}: round 1: SystemExit: enough" in log


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("own_weight: flaot = 1.0", "Hyper: the type of a field is unknown: name 'flaot' is not defined"),
        ("own_weight: Tensor = None", "Hyper.own_weight: Tensor is not a type for a run file; use bool, int, float"),
        ("own_weight: float = 'half'", r"Hyper.own_weight: the default should be a number \(found 'half'\)"),
    ],
)
def test_wrong_hyperparameter_is_named(field: str, message: str, project: Project) -> None:
    text = METHOD.replace("own_weight: float = 1.0", field)
    line = text[: text.index("@plugins")].count("\n") + 1
    with pytest.raises(PluginError, match=rf"my_method\.py:{line}: {message}"):
        load(project(my_method=text))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("plugins: [my_method.py, my_parts.py]\n", "", "; if a plug-in registers it, list it in `plugins`"),
        ("my_method.py, ", "", r"; no plug-in \(my_parts\) registers it"),
    ],
)
def test_name_of_a_plugin_that_is_not_listed(old: str, new: str, message: str, project: Project) -> None:
    run = RUN.replace("my-cnn", "tiny-cnn").replace(old, new)
    with pytest.raises(RunFileError, match=rf"algorithm\.name: unknown 'head-mean'; known: .*{message}"):
        load(project(run))
