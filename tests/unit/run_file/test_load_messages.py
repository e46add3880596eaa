"""The message of each problem in a run file: file, line, key and known values."""

from __future__ import annotations

import pytest

from p2pfl.algorithms import ALGORITHMS
from p2pfl.data import DATASETS, PARTITIONS
from p2pfl.graphs import GRAPHS
from p2pfl.run_file.schema import Transport
from tests.run_file_texts import GRAPH_NAMES, MODEL_NAMES, TOP, changed, hyper_names, problems

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        pytest.param(
            "{name: mapl, warmup: 2}",
            "mapel",
            f"run.yaml:10: algorithm.name: unknown 'mapel'; known: {', '.join(ALGORITHMS)}; did you mean 'mapl'?",
            id="unknown algorithm",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: rings}",
            f"run.yaml:5: graph.name: unknown 'rings'; known: {GRAPH_NAMES}; did you mean 'ring'?",
            id="unknown graph",
        ),
        pytest.param(
            "dataset: digits",
            "dataset: letters",
            f"run.yaml:7: data.dataset.name: unknown 'letters'; known: {', '.join(DATASETS)}; "
            "if a plug-in registers it, list it in `plugins`",
            id="unknown dataset",
        ),
        pytest.param(
            "models: tiny4",
            "models: tiny5",
            f"run.yaml:9: models.name: unknown 'tiny5'; known: {MODEL_NAMES}; did you mean 'tiny4'?",
            id="unknown models",
        ),
        pytest.param(
            "device: cpu",
            "device: gpu",
            "run.yaml:11: device: unknown 'gpu'; known: auto, cpu, cuda; did you mean 'cuda'?",
            id="unknown device",
        ),
        pytest.param(
            "warmup: 2",
            "preset: offical",
            "run.yaml:10: algorithm.preset: unknown 'offical'; known: default, paper, official; "
            "did you mean 'official'?",
            id="unknown preset",
        ),
        pytest.param(
            "seed: 1",
            "sed: 1",
            f"run.yaml:2: sed: unknown key 'sed'; known: {TOP}; did you mean 'seed'?",
            id="unknown key",
        ),
        pytest.param(
            "  dataset: digits",
            "  dataset: digits\n  rot: x",
            "run.yaml:8: data.rot: unknown key 'rot'; known: dataset, partition, augment, root, download; "
            "did you mean 'root'?",
            id="unknown key in data",
        ),
        pytest.param(
            "models: tiny4",
            "models: {name: tiny4, width: 3}",
            "run.yaml:9: models.width: unknown key 'width'; known: name, module, args, head, members, features",
            id="unknown key in models",
        ),
        pytest.param(
            "device: cpu",
            "transport:\n  give_upp: 1",
            "run.yaml:12: transport.give_upp: unknown key 'give_upp'; known: "
            f"{', '.join(Transport.model_fields)}; did you mean 'give_up'?",
            id="unknown key in transport",
        ),
        pytest.param(
            "device: cpu",
            "gpu: {peers: 1}",
            "run.yaml:11: gpu.peers: unknown key 'peers'; known: peers_per_gpu, memory_fraction, mps, cuda_graphs",
            id="unknown key in gpu",
        ),
        pytest.param(
            "warmup: 2",
            "epochs: 2",
            f"run.yaml:10: algorithm.epochs: unknown key 'epochs'; known: {hyper_names('mapl')}; "
            "did you mean 'local_epochs'?",
            id="another word for a key",
        ),
        pytest.param(
            "warmup: 2",
            "warmpu: 2",
            f"run.yaml:10: algorithm.warmpu: unknown key 'warmpu'; known: {hyper_names('mapl')}; "
            "did you mean 'warmup'?",
            id="unknown key in algorithm",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: ring, degree: 2}",
            "run.yaml:5: graph.degree: unknown key 'degree'; known: allow_disconnected",
            id="unknown key in graph",
        ),
        pytest.param(
            "clusters: 2",
            "cluters: 2",
            f"run.yaml:8: data.partition.cluters: unknown key 'cluters'; known: "
            f"{', '.join(PARTITIONS['clusters'].known())}; did you mean 'clusters'?",
            id="unknown key in partition",
        ),
        pytest.param("rounds: 3\n", "", "run.yaml: rounds: missing; it has no default", id="missing key"),
        pytest.param(
            "  dataset: digits\n",
            "",
            "run.yaml:6: data.dataset: missing; it has no default",
            id="missing key in a section",
        ),
        pytest.param(
            "name: mapl, ",
            "",
            f"run.yaml:10: algorithm.name: missing; known: {', '.join(ALGORITHMS)}",
            id="missing name of a named thing",
        ),
        pytest.param(
            "graph: ring",
            "graph: {type: ring, degree: [2]}",
            f"run.yaml:5: graph.name: missing; known: {', '.join(GRAPHS)}; "
            "did you mean 'name: ring' by 'type: ring'?",
            id="name of a named thing under another key",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: regular}",
            "run.yaml:5: graph.degree: missing; it has no default",
            id="missing parameter",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: six",
            "run.yaml:3: rounds: should be an integer (found 'six')",
            id="word for int",
        ),
        pytest.param(
            "rounds: 3", "rounds: 3.5", "run.yaml:3: rounds: should be an integer (found 3.5)", id="float for int"
        ),
        pytest.param(
            "rounds: 3", "rounds: [3]", "run.yaml:3: rounds: should be an integer (found [3])", id="list for int"
        ),
        pytest.param("rounds: 3", "rounds:", "run.yaml:3: rounds: should be an integer (found None)", id="nothing"),
        pytest.param(
            "name: good",
            "name: 20",
            "run.yaml:1: name: should be a string; put it in quotes (found 20)",
            id="int for text",
        ),
        pytest.param(
            "warmup: 2",
            "lr: fast",
            "run.yaml:10: algorithm.lr: should be a number (found 'fast')",
            id="word for number",
        ),
        pytest.param(
            "warmup: 2",
            "cgl: maybe",
            "run.yaml:10: algorithm.cgl: should be true or false (found 'maybe')",
            id="bool",
        ),
        pytest.param(
            "warmup: 2",
            "betas: 0.5",
            "run.yaml:10: algorithm.betas: should be a list (found 0.5)",
            id="number for list",
        ),
        pytest.param(
            "warmup: 2",
            "betas: [0.5, 0.9, 0.9]",
            "run.yaml:10: algorithm.betas: should have at most 2 items (found [0.5, 0.9, 0.9])",
            id="long list",
        ),
        pytest.param(
            "warmup: 2",
            "betas: [0.5, 1.5]",
            "run.yaml:10: algorithm.betas.1: should be less than 1 (found 1.5)",
            id="item of a list",
        ),
        pytest.param(
            "device: cpu",
            "transport: [1]",
            "run.yaml:11: transport: should be a mapping (found [1])",
            id="list for section",
        ),
        pytest.param(
            "graph: ring",
            "graph: 3",
            "run.yaml:5: graph: should be a name, or a mapping with a name and its parameters (found 3)",
            id="number for a named thing",
        ),
        pytest.param(
            "models: tiny4",
            "models: 3",
            "run.yaml:9: models: should be a name, or a mapping with a name and its parameters (found 3)",
            id="number for models",
        ),
        pytest.param(
            "rounds: 3", "rounds: -3", "run.yaml:3: rounds: should be greater than 0 (found -3)", id="negative rounds"
        ),
        pytest.param(
            "peers: 4",
            "peers: 99999999999",
            "run.yaml:4: peers: should be less than or equal to 100000 (found 99999999999)",
            id="too many peers",
        ),
        pytest.param(
            "seed: 1",
            "seed: -1",
            "run.yaml:2: seed: should be greater than or equal to 0 (found -1)",
            id="negative seed",
        ),
        pytest.param(
            "device: cpu",
            "transport: {deadline: .inf}",
            "run.yaml:11: transport.deadline: should be a finite number (found inf)",
            id="infinite",
        ),
        pytest.param(
            "device: cpu",
            "transport:\n  host: 0.0.0.0",
            "run.yaml:12: transport.host: '0.0.0.0' is reachable from other hosts: create keys with "
            "`p2pfl keys new 4` and set transport.keys to their folder, or allow unencrypted connections with "
            "transport.insecure: true",
            id="beyond this host without keys",
        ),
        pytest.param(
            "device: cpu",
            "transport: {keys: keys, insecure: true}",
            "run.yaml:11: transport.insecure: conflicts with transport.keys; remove one of the two",
            id="keys and insecure",
        ),
        pytest.param(
            "device: cpu",
            "transport: {public_keys: {0: x}}",
            "run.yaml:11: transport.public_keys: needs transport.keys too, the folder with the private keys",
            id="public keys only",
        ),
        pytest.param(
            "device: cpu",
            f"transport: {{keys: k, public_keys: {{0: {'a' * 64}, 1: {'b' * 64}, 2: {'b' * 64}, 3: {'c' * 64}}}}}",
            "run.yaml:11: transport.public_keys: peers 1 and 2 have the same key; each could impersonate the other",
            id="a key of two",
        ),
        pytest.param(
            "device: cpu",
            "transport: {keys: keys, public_keys: {0: 12}}",
            "run.yaml:11: transport.public_keys.0: should be a string; put it in quotes (found 12)",
            id="no keys",
        ),
        pytest.param(
            "warmup: 2",
            "lr: .nan",
            "run.yaml:10: algorithm.lr: should be a finite number (found nan)",
            id="not a number",
        ),
        pytest.param(
            "name: good",
            "name: a b/c",
            "run.yaml:1: name: should start with a letter or digit and contain only letters, digits, '.', '_' and "
            "'-' (found 'a b/c')",
            id="name that is no file name",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: edges, edges: [[0, 1], [2, 3]]}",
            "run.yaml:5: graph: not connected; it has the components 0 1 | 2 3; add edges, or set "
            "allow_disconnected: true",
            id="disconnected graph",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: edges, edges: [[0, 4]]}",
            "run.yaml:5: graph: edge 0-4: no peer 4; the 4 peers are 0 to 3",
            id="edge to nobody",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: file, path: no.txt}",
            "run.yaml:5: graph: no.txt: cannot be read: No such file or directory",
            id="graph file missing",
        ),
        pytest.param(
            "{name: mapl, warmup: 2}",
            "dpsgd",
            "run.yaml:9: models.name: dpsgd averages or replaces whole models, so all peers need the same "
            "architecture, but 'tiny4' has tiny-cnn, tiny-mixer, tiny-residual, tiny-wide; choose one of these",
            id="homogeneous algorithm with a mixed group",
        ),
        pytest.param(
            "models: tiny4",
            "models: {name: htc4, features: 64}",
            "run.yaml:9: models.name: mapl compares or averages the weights of linear heads, but the heads of "
            "htfe-resnet34+fc128, htfe-resnet34+fc256, htfe-resnet34+fc512 have several layers; "
            "choose models without '+'",
            id="linear heads asked of heads with several layers",
        ),
        pytest.param(
            "models: tiny4",
            "models: dfml-h1-cnn",
            "run.yaml:9: models.features: mapl needs the same number of features on all peers, but the backbones of "
            "'dfml-h1-cnn' differ in it; set one for all, e.g. 512",
            id="equal features asked of backbones with their own",
        ),
        pytest.param(
            "{name: mapl, warmup: 2}",
            "{name: local, lr: 0}",
            "run.yaml:10: algorithm.lr: should be greater than 0 (found 0)",
            id="hyper-parameter out of range",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: 3\nrounds: 4",
            "run.yaml:4: rounds: duplicate key, first given in line 3",
            id="duplicate key",
        ),
        pytest.param(
            "warmup: 2",
            "warmup: 2, warmup: 3",
            "run.yaml:10: algorithm.warmup: duplicate key, first given in line 10",
            id="duplicate key in a section",
        ),
        pytest.param(
            "rounds: 3",
            "rounds: [3",
            "run.yaml:4: invalid YAML: expected ',' or ']', but got ':'",
            id="bracket",
        ),
        pytest.param(
            "rounds: 3", "rounds: a: b", "run.yaml:3: invalid YAML: mapping values are not allowed here", id="colon"
        ),
        pytest.param(
            "rounds: 3",
            "\trounds: 3",
            r"run.yaml:3: invalid YAML: found character '\t' that cannot start any token",
            id="tab",
        ),
        pytest.param(
            "rounds: 3", "rounds: *three", "run.yaml:3: invalid YAML: found undefined alias 'three'", id="alias"
        ),
        pytest.param(
            "rounds: 3",
            "rounds: !!python/name:os.system",
            "run.yaml:3: invalid YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/name:os.system'",
            id="python object",
        ),
        pytest.param(
            "rounds: 3", "---\nrounds: 3", "run.yaml:3: invalid YAML: but found another document", id="two documents"
        ),
        pytest.param(
            "rounds: 3",
            "rounds: \0",
            "run.yaml: invalid YAML: unacceptable character #x0000: special characters are not allowed in "
            '"<unicode string>", position 27',
            id="control character",
        ),
        pytest.param(
            "dataset: digits",
            "dataset: {name: table, path: a.csv, label: y, test: 5}",
            "run.yaml:7: data.dataset.test: should be less than 1, or a path (found 5)",
            id="number or path",
        ),
        pytest.param(
            "device: cpu",
            "checkpoint_every: 0",
            "run.yaml:11: checkpoint_every: should be greater than 0, or 'auto' (found 0)",
            id="number or word",
        ),
        pytest.param(
            "{name: clusters, clusters: 2}",
            "{name: fraction, fraction: [0.5, x]}",
            "run.yaml:8: data.partition.fraction.1: should be a number (found 'x')",
            id="item of a list or a number",
        ),
        pytest.param(
            "device: cpu",
            "transport: {deadline: 10m}",
            "run.yaml:11: transport.deadline: should be a number of seconds (found '10m')",
            id="number with a unit",
        ),
        pytest.param(
            "device: cpu",
            "transport: {max_message: 1GB}",
            "run.yaml:11: transport.max_message: should be a number of bytes (found '1GB')",
            id="integer with a unit",
        ),
        pytest.param(
            "graph: ring",
            "graph: {name: list, graphs: [3]}",
            "run.yaml:5: graph.graphs.0: should be a string, or a mapping (found 3)",
            id="text or mapping",
        ),
        pytest.param(
            "device: cpu",
            "chaos: {partition: {groups: [[0, 1]], round: 1}}",
            "run.yaml:11: chaos.partition.0.groups: should have at least 2 items (found [[0, 1]])",
            id="short list",
        ),
        pytest.param(
            "warmup: 2",
            "warmup: 2, lr: 0,05",
            "run.yaml:10: algorithm.lr: '0,05' is not a number; use a decimal point: 0.05",
            id="decimal comma",
        ),
        pytest.param(
            "rounds: 3",
            "rounds:3",
            "run.yaml:3: invalid YAML: a space is missing after the colon of 'rounds:3'",
            id="no space after a colon",
        ),
        pytest.param(
            "  dataset: digits",
            "  dataset:digits",
            "run.yaml:7: invalid YAML: a space is missing after the colon of 'dataset:digits'",
            id="no space after the first colon of a section",
        ),
        pytest.param("rounds: 3", "3: 3", "run.yaml:3: 3: a key should be a string; put it in quotes", id="key"),
    ],
)
def test_error_gives_file_line_key_and_known_values(old: str, new: str, seen: str) -> None:
    # Without `rounds:`, that key is missing too.
    expected = [seen] + ["run.yaml: rounds: missing; it has no default"] * (new == "3: 3")
    assert sorted(problems(changed(old, new))) == sorted(expected)
