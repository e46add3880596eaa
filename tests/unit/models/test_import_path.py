"""Models by import path: names, splitting, what is filled in, and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from p2pfl import rng
from p2pfl.errors import ModelError, PluginError, RunFileError
from p2pfl.models import MODELS, build
from p2pfl.models.cost import cost
from p2pfl.models.import_path import ImportPath, parse
from p2pfl.plugins import loading
from p2pfl.run_file.load import load
from p2pfl.run_folder.new_run import create
from p2pfl.session.build import load_data
from p2pfl.session.checkpoint import read
from p2pfl.simulation.simulate import simulate
from tests.plugin_fixtures import Project

NETS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes, channels, width=4, bias=True):
        super().__init__()
        first = nn.Conv2d(channels, width, 3)
        self.body = nn.Sequential(first, nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc = nn.Linear(4 * width, num_classes, bias)
        self.spare = nn.Identity()

    def forward(self, x):
        return self.fc(self.body(x))


class Deep(Net):
    def __init__(self, num_classes, channels):
        super().__init__(num_classes, channels)
        self.fc = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, num_classes))


class Probabilities(Net):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Fixed(Net):
    def __init__(self):
        super().__init__(7, 1)


class Wrong(Net):
    def forward(self, x):
        return self.fc(self.body(x)[:, :3])


class Ambiguous(Net):
    def __init__(self, num_classes, in_channels, channels=6, classes=3, in_features=5, size=7):
        super().__init__(num_classes, in_channels, channels)
        self.given = channels, classes, in_features, size


class Defaults(Net):
    def __init__(self, classes=2, channels=3, size=(32, 32), in_features=3):
        super().__init__(classes, channels)
        self.given = channels, classes, in_features, size


class Wide(Net):
    def __init__(self, num_classes, channels=64):
        super().__init__(num_classes, 1, channels)


class Loads(Net):
    def __init__(self, num_classes, in_channels, weights):
        super().__init__(num_classes, in_channels)
        self.body[0].load_state_dict(torch.load(weights, weights_only=True))


class Convolutional(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Conv2d(1, classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def not_a_net():
    return 3
"""

RUN = """\
name: nets
peers: 3
rounds: 2
data: {dataset: digits, partition: {name: iid, per_peer: 20}}
models: my_nets.Net
algorithm: {name: fedproto, batch: 16}
device: cpu
"""

# ---- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path", "arguments", "head"),
    [
        ("my_nets.Net", "my_nets.Net", {}, None),
        ("my_nets.Net(width=32)", "my_nets.Net", {"width": 32}, None),
        ("a.b.Net( kind='x:y', widths=[1,(2)] ):fc.2", "a.b.Net", {"kind": "x:y", "widths": [1, 2]}, "fc.2"),
        ("my_nets.Net:fc", "my_nets.Net", {}, "fc"),
    ],
)
def test_names_are_import_paths_with_arguments_and_head(name: str, path: str, arguments: object, head: str) -> None:
    spec = parse(name)
    assert spec == ImportPath(path, arguments, head)  # type: ignore[arg-type]
    assert parse(spec.name) == spec


@pytest.mark.parametrize(
    "name",
    ["tiny-cnn", "Net", "my_nets.Net(32)", "my_nets.Net(width=x)", "my_nets.Net(**{})", "a.b(c=1", "a.b:", "a..b"],
)
def test_other_names_are_no_import_paths(name: str) -> None:
    assert parse(name) is None
    assert "my_nets" not in name or name not in MODELS


# ---- building --------------------------------------------------------------------------------------------------


@pytest.fixture
def nets(project: Project) -> None:
    """The module ``my_nets`` can be imported."""
    load(project(RUN, my_nets=NETS))


@pytest.mark.usefixtures("nets")
def test_last_linear_layer_is_the_head_and_the_rest_the_backbone() -> None:
    model = build("my_nets.Net(width=8)", 0, 1, (8, 8), 10)
    assert (model.name, model.features, model.linear_head.weight.shape) == ("my_nets.Net(width=8)", 32, (10, 32))
    x = torch.rand(5, 1, 8, 8)
    model.eval()
    assert model.backbone(x).shape == (5, 32)
    assert torch.equal(model(x), model.head(model.backbone(x)))
    assert sorted(model.state_dict()) == [
        "backbone.body.0.bias",
        "backbone.body.0.weight",
        "head.bias",
        "head.weight",
    ]


@pytest.mark.usefixtures("nets")
def test_head_can_be_named_and_have_several_layers() -> None:
    assert build("my_nets.Deep", 0, 1, (8, 8), 10).features == 8
    model = build("my_nets.Deep:fc", 0, 1, (8, 8), 10)
    assert model.features == 16
    with pytest.raises(ModelError, match=r"'my_nets.Deep:fc' has a head of several layers"):
        _ = model.linear_head


@pytest.mark.usefixtures("nets")
def test_number_of_features_can_be_changed() -> None:
    model = build("my_nets.Net", 0, 1, (8, 8), 10, features=6)
    assert model.backbone(torch.rand(5, 1, 8, 8)).shape == (5, 6)
    assert model.linear_head.weight.shape == (10, 6)
    with pytest.raises(ModelError, match=r"has 16 features, and its head cannot be replaced by one for 6"):
        build("my_nets.Deep:fc", 0, 1, (8, 8), 10, features=6)


@pytest.mark.usefixtures("nets")
def test_dataset_fills_parameters_but_not_defaults_that_mean_something_else() -> None:
    given = {name: build(f"my_nets.{name}", 0, 1, (8, 9), 10).backbone.given for name in ("Ambiguous", "Defaults")}
    assert given == {"Ambiguous": (6, 3, 5, 7), "Defaults": (1, 10, 3, (8, 9))}
    assert build("my_nets.Wide", 0, 1, (8, 8), 10).features == 256
    assert build("torch.nn.Linear(out_features=4)", 0, 6, (), 4).features == 6


LOADS = "{module: my_nets.Loads, args: {weights: w.pt}}"


def test_files_in_arguments_are_found_beside_the_run_file_and_hosts_agree(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        file = project(
            RUN.replace("my_nets.Net", "{module: my_nets.Loads, args: {weights: w.pt}}"), folder, my_nets=NETS
        )
        with torch.no_grad():
            torch.save({"weight": torch.full((4, 1, 3, 3), 0.5), "bias": torch.zeros(4)}, folder / "w.pt")
        monkeypatch.chdir(tmp_path)
        run = load(file)
        assert run.file.models.texts == (f"my_nets.Loads(weights={str(folder / 'w.pt')!r})",)
        assert (
            float(build(run.file.models.group, 0, 1, (8, 8), 10).state_dict()["backbone.body.0.weight"].min()) == 0.5
        )
        hashes.append(run.config_hash())
        assert load(create(run, folder / "run").run_file).config_hash() == hashes[-1]
    assert hashes[0] == hashes[1]
    (folder / "w.pt").unlink()
    with pytest.raises(PluginError, match=r"FileNotFoundError: .*'w.pt'; a path in `args` starts from the folder of"):
        load_data(load(file))


@pytest.mark.usefixtures("nets")
def test_weights_depend_on_the_seed_alone_and_checks_draw_nothing() -> None:
    weights = []
    for seed in (1, 1, 2):
        with rng.torch_seeded(seed, "model"):
            weights.append((build("my_nets.Net", 0, 1, (8, 8), 10).state_dict(), torch.rand(1)))
    (first, after), (again, after_again), (other, _) = weights
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert torch.equal(after, after_again)
    assert not torch.equal(first["head.weight"], other["head.weight"])


@pytest.mark.exhaustive
def test_networks_of_torchvision_get_the_number_of_classes() -> None:
    found = cost("torchvision.models.resnet18", 3, (32, 32), 10)
    assert (found.features, found.parameters) == (512, 11_181_642)
    assert cost("torchvision.models.mobilenet_v2(width_mult=0.5)", 3, (32, 32), 7).head_bytes == 4 * 7 * 1281


# ---- runs ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("models", "names"),
    [
        ("{module: my_nets.Net, args: {width: 8}}", {"my_nets.Net(width=8)"}),
        ("my_nets.Net(width=8)", {"my_nets.Net(width=8)"}),
        ("[{module: my_nets.Net, args: {width: 16}}, tiny-cnn]", {"my_nets.Net(width=16)", "tiny-cnn"}),
        ("{members: [my_nets.Net, tiny-mixer], features: 8}", {"my_nets.Net", "tiny-mixer"}),
    ],
)
def test_run_trains_imported_models_and_its_folder_repeats_it(
    models: str, names: set[str], project: Project, tmp_path: object
) -> None:
    run = load(project(RUN.replace("my_nets.Net", models), my_nets=NETS))
    assert [plugin.name for plugin in run.plugins] == ["my_nets"]
    folder = create(run, tmp_path / "run")  # type: ignore[operator]
    results = simulate(run, folder)
    assert {result.model for result in results} == names
    again = load(folder.run_file)
    assert (again.resolved(), again.config_hash()) == (run.resolved(), run.config_hash())
    assert [result.digest for result in simulate(again)] == [result.digest for result in results]
    saved = read(folder.peer(0).checkpoint)["algorithm"]["model"]
    assert "head.weight" in saved


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("models", "key", "message"),
    [
        ("my_nets.Nte", "models.name", r"module 'my_nets' has no class 'Nte'; it has Ambiguous, Convolutional, De"),
        ("my_nest.Net", "models.module", r"no module 'my_nest' in .*, and none is installed; did you mean 'my_n"),
        ("my_nets.Net:fcc", "models.name", r"has no part 'fcc' to be its head; its parts are body, fc, spare"),
        ("my_nets.Net:spare", "models.name", "its part 'spare' has nothing to train; name its last"),
        ("my_nets.Probabilities", "models.name", "the output is not the output of its head 'fc'"),
        ("my_nets.Fixed", "models.name", r"maps 2 images of 1x8x8 to \[2, 7\] instead of \[2, 10\]; give it a param"),
        ("my_nets.Convolutional", "models.name", "has no linear layer; name its head"),
        ("my_nets.not_a_net", "models.name", "makes int, not a torch.nn.Module"),
        ("my_nets.Net(width='x')", "models.name", r"cannot be built: TypeError"),
        ("{module: my_nets.Net, args: {breadth: 3}}", "models.module", "unexpected keyword argument 'breadth'; "),
        ("{module: Net}", "models", "'Net' is not the import path of a class; expected e.g. my_nets.Net"),
        ("{name: tiny4, module: my_nets.Net}", "models", "set only one of name, module and members"),
        ("{name: tiny4, args: {width: 3}}", "models", "args and head need a module"),
        ("[my_nets.Net, tiny-cnn]", "models.features", "my_nets.Net has 16, tiny-cnn has 64; set one for all"),
        ("[my_nets.Net, tiny-cn]", "models.members.1", "unknown 'tiny-cn'; .* did you mean 'tiny-cnn'"),
        ("{module: torchvision.models.resnet18, args: {weights: DEFAULT}}", "models.module", "load them in a module"),
        ("torchvision.models.resnet18", "models.name", r"fails for images of 1x8x8: RuntimeError: .*3 channels"),
    ],
)  # fmt: skip
def test_unsuitable_model_is_reported_at_its_line(models: str, key: str, message: str, project: Project) -> None:
    with pytest.raises(RunFileError) as caught:
        load_data(load(project(RUN.replace("my_nets.Net", models), my_nets=NETS)))
    text = str(caught.value)
    assert re.search(rf"(mine\.yaml:5: {re.escape(key)}: .*|my_nets\.py:\d+: .*){message}", text), text
    assert "\n" not in text


def test_error_in_the_forward_pass_names_the_line_of_the_module(project: Project) -> None:
    line = NETS[: NETS.index("return self.fc(self.body(x)[:, :3])")].count("\n") + 1
    with pytest.raises(PluginError, match=rf"my_nets\.py:{line}: 'my_nets.Wrong' fails for images of 1x8x8: Runtime"):
        load_data(load(project(RUN.replace("my_nets.Net", "my_nets.Wrong"), my_nets=NETS)))


def test_method_that_needs_linear_heads_rejects_others(project: Project) -> None:
    text = RUN.replace("my_nets.Net", "my_nets.Deep:fc").replace("fedproto", "lg-fedavg")
    with pytest.raises(
        RunFileError, match=r"mine\.yaml:5: models\.name: 'my_nets.Deep:fc' has a head of several layers"
    ):
        load_data(load(project(text, my_nets=NETS)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device: cpu", "device: gpu0", "run.yaml:{line}: device: unknown 'gpu0'; known: auto, cpu, cuda"),
        ("rounds: 2", "rounds: zwei", "run.yaml:{line}: rounds: should be an integer (found 'zwei')"),
        ("rounds: 2", "foo: 1\nrounds: 2", "run.yaml:{line}: foo: unknown key 'foo'; "),
        ("features:", "feature:", "run.yaml:{line}: models.feature: unknown key 'feature'; "),
    ],
)
def test_mistake_in_a_run_folder_is_not_blamed_on_the_module_of_its_models(
    old: str, new: str, message: str, project: Project, tmp_path: Path
) -> None:
    folder = create(load(project(RUN, my_nets=NETS)), tmp_path / "run")
    text = folder.run_file.read_text()
    assert old in text
    loading.activate([])  # as in a new process
    folder.run_file.write_text(text.replace(old, new))
    with pytest.raises(RunFileError) as caught:
        load(folder.run_file)
    line = text[: text.index(old)].count("\n") + 1
    assert message.format(line=line) in str(caught.value)
    assert "registers" not in str(caught.value)
