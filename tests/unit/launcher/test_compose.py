"""`p2pfl compose`: contents of the compose file. scripts/check-compose runs it with a Docker engine."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.backends.compose import BUILD, ComposeFile
from launcher.backends.container_files import CONFIG, DECODED, FILES, RUN
from p2pfl.run_file.load import load
from p2pfl.run_folder.key_files import write_new
from tests.launcher_fixtures import Invoke

PROJECT = Path(__file__).parents[3]
TOY = "name: toy\nrounds: 3\npeers: 12\ngraph: ring\nalgorithm: local\ndata: {dataset: digits}\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(TOY)
    return Path("toy.yaml")


def load_compose(settings: ComposeFile) -> Any:
    return yaml.safe_load(settings.render())


def test_the_compose_file_of_the_project_is_up_to_date(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.chdir(PROJECT)
    outcome = invoke("compose", "topologies/mesh8.yaml")
    assert outcome.exit_code == 0
    assert outcome.stdout == Path("docker-compose.yml").read_text(), (
        "generate it again: p2pfl compose topologies/mesh8.yaml > docker-compose.yml"
    )


def test_every_peer_has_a_cpu_and_a_gpu_service(file: Path) -> None:
    services = load_compose(ComposeFile(file))["services"]
    peers = [f"peer-{peer}" for peer in range(12)]
    gpus = [f"gpu-{peer}" for peer in range(12)]
    assert list(services) == ["keys", "data", *peers, *gpus, "gpu"]
    for number, (peer, gpu) in enumerate(zip(peers, gpus, strict=True)):
        assert services[peer]["environment"] == services[gpu]["environment"]
        assert services[peer]["environment"]["P2PFL_ME"] == number
        assert services[peer]["volumes"] == services[gpu]["volumes"]
        assert services[gpu]["networks"] == {"mesh": {"aliases": [peer]}}
        assert services[gpu]["command"] == ["--set=device=cuda"]
        assert "profiles" not in services[peer]
        assert services[gpu]["profiles"] == ["gpu"]
        (device,) = services[gpu]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert services["gpu"]["depends_on"] == gpus


def test_peers_mount_only_their_own_volumes(file: Path) -> None:
    services = load_compose(ComposeFile(file))["services"]
    for peer in range(12):
        for kind, others in (("keys", {"keys"}), ("run", set())):
            mounting = {name for name, service in services.items() if mounts(service, f"{kind}-{peer}")}
            assert mounting == {f"peer-{peer}", f"gpu-{peer}"} | others
        assert f"keys-{peer}:/keys:ro" in services[f"peer-{peer}"]["volumes"]
        assert f"decoded:{DECODED}:ro" in services[f"peer-{peer}"]["volumes"]
        assert services[f"peer-{peer}"]["networks"] == ["mesh"]
    assert services["keys"]["volumes"][11] == "keys-11:/keys/11"
    assert load_compose(ComposeFile(file))["networks"] == {"mesh": {"internal": True}}


def mounts(service: Any, volume: str) -> bool:
    return any(isinstance(mount, str) and mount.partition(":")[0] == volume for mount in service.get("volumes", []))


def test_restricts_containers(file: Path) -> None:
    for name, service in load_compose(ComposeFile(file))["services"].items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is True
        assert service["init"] is True
        assert {"cpus", "mem_limit", "pids_limit"} <= set(service)
        assert service.get("cap_add", []) == (["CHOWN"] if name == "keys" else [])
        assert service.get("user") == ("root" if name == "keys" else None)
        if name.startswith(("peer-", "gpu-")):
            assert service["restart"] == "on-failure:10"
            assert set(service["depends_on"]) == {"keys", "data"}
            assert "healthcheck" not in service  # that of the image


@pytest.mark.parametrize("sets", [[], ["data.dataset=mnist"]])
def test_declares_exactly_the_volumes_in_use(file: Path, sets: list[str]) -> None:
    tree = load_compose(ComposeFile(file, sets))
    mounted = [mount for service in tree["services"].values() for mount in service.get("volumes", [])]
    named = [
        re.fullmatch(r"(?:\$\{P2PFL_DATA:-)?([\w-]+)\}?:/.*", mount) for mount in mounted if isinstance(mount, str)
    ]
    assert {found and found[1] for found in named} == set(tree["volumes"])


def test_peers_find_the_run_file_and_each_other(file: Path) -> None:
    service = load_compose(ComposeFile(file))["services"]["peer-3"]
    (bound,) = [mount for mount in service["volumes"] if isinstance(mount, dict)]
    target = service["environment"]["P2PFL_FILE"]
    assert bound == {"type": "bind", "source": "./toy.yaml", "target": target, "read_only": True}
    run = load(file, environment=ComposeFile(file).environment)
    assert run.config_hash() == load(file).config_hash()
    assert run.file.transport.book(run.peers).address_of(11) == "tcp://peer-11:5711"


def test_keeps_absolute_paths(file: Path) -> None:
    service = load_compose(ComposeFile(file.absolute()))["services"]["data"]
    assert service["volumes"][0]["source"] == str(file.absolute())


def test_passes_changes_to_all_readers_of_the_run_file(file: Path) -> None:
    tree = load_compose(ComposeFile(file, ["rounds=2", "name=other"]))
    services = tree["services"]
    assert services["peer-0"]["command"] == ["--set=rounds=2", "--set=name=other"]
    assert services["gpu-0"]["command"] == ["--set=rounds=2", "--set=name=other", "--set=device=cuda"]
    assert "--set=rounds=2" in services["data"]["entrypoint"]
    assert (
        ComposeFile(file, ["rounds=2"]).render().splitlines()[1]
        == "# Generated by `p2pfl compose toy.yaml --set=rounds=2`."
    )


def test_escapes_dollar_signs(file: Path) -> None:
    renamed = file.rename("to$y.yaml")
    service = load_compose(ComposeFile(renamed))["services"]["peer-0"]
    assert service["environment"]["P2PFL_FILE"] == "/etc/p2pfl/to$$y.yaml"
    assert service["volumes"][0]["source"] == "./to$$y.yaml"


# ---- data


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sets", "source", "network"),
    [
        ([], None, None),
        (["data.dataset=mnist"], "${P2PFL_DATA:-files}", ["default"]),
        (["data.dataset=mnist", "data.download=false"], "${P2PFL_DATA:-files}", None),
        (["data.dataset=mnist", "data.root=/mnt/images"], "/mnt/images", ["default"]),
        (["data.dataset={name: folder, path: photos}"], "${P2PFL_DATA:-files}", ["default"]),
    ],
)
def test_downloads_dataset_files_once(
    file: Path, sets: list[str], source: str | None, network: list[str] | None
) -> None:
    tree = load_compose(ComposeFile(file, sets))
    data, peer = tree["services"]["data"], tree["services"]["peer-0"]
    if source == "/mnt/images":
        bind = {"type": "bind", "source": source, "target": FILES, "bind": {"create_host_path": True}}
        assert {**bind, "read_only": False} in data["volumes"]
        assert {**bind, "read_only": True} in peer["volumes"]
    else:
        assert (f"{source}:{FILES}" in data["volumes"]) == (source is not None)
        assert (f"{source}:{FILES}:ro" in peer["volumes"]) == (source is not None)
    assert data.get("networks") == network
    assert data.get("network_mode") == (None if network else "none")
    assert ("files" in tree["volumes"]) == (source == "${P2PFL_DATA:-files}")
    assert (f"--set=data.root={FILES}" in peer.get("command", [])) == (source == "/mnt/images")


def test_a_folder_of_files_may_have_any_name(file: Path) -> None:
    name = '/mnt/a:b "c" \\ $d'
    tree = load_compose(ComposeFile(file, ["data.dataset=mnist", f"data.root={json.dumps(name)}"]))
    (source,) = {
        volume["source"]
        for service in tree["services"].values()
        for volume in service.get("volumes", [])
        if isinstance(volume, dict) and volume["target"] == FILES
    }
    assert source == name.replace("$", "$$")  # compose substitutes no variable


def test_mounts_a_graph_file(file: Path) -> None:
    Path("edges.txt").write_text("".join(f"{peer} {(peer + 1) % 12}\n" for peer in range(12)))
    services = load_compose(ComposeFile(file, ["graph={name: file, path: edges.txt}"]))["services"]
    for name in ("data", "peer-0", "gpu-0"):
        assert services[name]["volumes"][1] == {
            "type": "bind", "source": "./edges.txt", "target": "/etc/p2pfl/edges.txt", "read_only": True,
        }  # fmt: skip


def test_mounts_every_file_of_a_list_of_graphs(file: Path) -> None:
    Path("edges.txt").write_text("".join(f"{peer} {(peer + 1) % 12}\n" for peer in range(12)))
    Path("moves.csv").write_text("0,0,1\n")
    graphs = "[{name: file, path: edges.txt}, {name: trace, path: moves.csv, repeat: true}]"
    sets = [f"graph={{name: list, graphs: {graphs}}}", "algorithm=dpsgd", "models=tiny-cnn"]
    volumes = load_compose(ComposeFile(file, sets))["services"]["peer-0"]["volumes"]
    assert {"./edges.txt", "./moves.csv"} <= {volume["source"] for volume in volumes if isinstance(volume, dict)}


# ---- keys


@pytest.fixture
def keys(file: Path) -> Path:
    pairs = {peer: (secrets.token_bytes(32), secrets.token_bytes(32)) for peer in range(12)}
    write_new(Path("keys"), pairs)
    for path in Path("keys").iterdir():
        if os.geteuid() == 0:
            os.chown(path, 1234, -1)
    return Path("keys")


def test_passes_existing_keys_as_secrets(file: Path, keys: Path) -> None:
    tree = load_compose(ComposeFile(file, keys=keys))
    assert "keys" not in tree["services"]
    assert tree["secrets"] == {
        "public": {"file": "./keys/public.yaml"},
        **{f"key-{peer}": {"file": f"./keys/{peer:02d}.key"} for peer in range(12)},
    }
    assert tree["services"]["gpu-3"]["secrets"] == [
        {"source": "public", "target": "/keys/public.yaml"},
        {"source": "key-3", "target": "/keys/03.key"},
    ]
    assert set(tree["services"]["peer-3"]["depends_on"]) == {"data"}
    assert not any(volume.startswith("keys") for volume in tree["volumes"])
    owner = str((keys / "00.key").stat().st_uid)
    assert tree["services"]["data"]["build"]["args"]["UID"] == owner


def test_rejects_a_folder_with_missing_keys(file: Path, keys: Path, invoke: Invoke) -> None:
    (keys / "11.key").unlink()
    outcome = invoke("compose", file, "--keys", keys)
    assert outcome.exit_code == 1
    assert "11.key: not found" in outcome.stderr
    assert outcome.stdout == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_rejects_keys_owned_by_root(file: Path, keys: Path, invoke: Invoke) -> None:
    os.chown(keys / "00.key", 0, -1)
    outcome = invoke("compose", file, "--keys", keys)
    assert outcome.exit_code == 1
    assert "owned by root" in outcome.stderr


# ---- unsupported settings


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            "transport: {hosts: {0: alpha}}",
            r"toy\.yaml:7: transport\.hosts: remove it: containers find each other by name",
        ),
        ("transport: {public_keys: {0: ab}}", r"toy\.yaml:7: transport\.public_keys: no key of peer 1, 2"),
        ("transport: {insecure: true}", r"toy\.yaml:7: transport\.insecure: conflicts with transport\.keys"),
    ],
)
def test_rejects_unsupported_transport_settings(file: Path, invoke: Invoke, line: str, problem: str) -> None:
    file.write_text(f"{TOY}{line}\n")
    outcome = invoke("compose", file)
    assert outcome.exit_code == 2
    assert re.search(problem, outcome.stderr)
    assert outcome.stdout == ""


def test_public_keys_require_private_keys(file: Path, keys: Path, invoke: Invoke) -> None:
    lines = "".join(f"    {line}\n" for line in (keys / "public.yaml").read_text().splitlines())
    file.write_text(f"{TOY}transport:\n  public_keys:\n{lines}")
    outcome = invoke("compose", file)
    assert outcome.exit_code == 2
    assert "transport.public_keys: pass the folder of keys as --keys" in outcome.stderr
    assert invoke("compose", file, "--keys", keys).exit_code == 0


def test_mounts_files_beside_the_run_file_where_peers_look_for_them(file: Path, keys: Path) -> None:
    (file.parent / "mine.npz").write_bytes(b"")
    (file.parent / "split.json").write_text("[]")
    sets = ("data.dataset={name: npz, path: mine.npz}", "data.partition={name: indices, file: split.json}")
    services = load_compose(ComposeFile(file, sets, keys=keys))["services"]
    for service in ("data", "peer-0", "peer-3"):
        mounted = {
            mount["source"]: mount["target"] for mount in services[service]["volumes"] if isinstance(mount, dict)
        }
        assert mounted["./mine.npz"] == f"{CONFIG}/mine.npz"
        assert mounted["./split.json"] == f"{CONFIG}/split.json"
        assert not any(str(mount).endswith(f":{FILES}:ro") for mount in services[service]["volumes"])


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_mounts_a_pretrained_encoder(
    file: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory, where: str
) -> None:
    encoder = (file.parent if where == "beside" else tmp_path_factory.mktemp("other")) / "learned"
    encoder.mkdir()
    name = "learned" if where == "beside" else str(encoder)
    sets = ("models=tiny-cnn", "algorithm.name=meta-l2c", f"algorithm.encoder={name}")
    services = load_compose(ComposeFile(file, sets, keys=keys))["services"]
    mounted = {mount["source"]: mount["target"] for mount in services["peer-1"]["volumes"] if isinstance(mount, dict)}
    expected = ("./learned", f"{CONFIG}/learned") if where == "beside" else (name, name)
    assert expected in mounted.items()


def test_mounts_a_dataset_with_an_absolute_path_there(file: Path, keys: Path) -> None:
    services = load_compose(ComposeFile(file, ("data.dataset={name: folder, path: /elsewhere}",), keys=keys))[
        "services"
    ]
    mounted = {mount["source"]: mount["target"] for mount in services["peer-1"]["volumes"] if isinstance(mount, dict)}
    assert {path: target for path, target in mounted.items() if path.startswith("/elsewhere")} == {
        "/elsewhere/train": "/elsewhere/train",
        "/elsewhere/test": "/elsewhere/test",
    }


# ---- the image


def test_only_the_first_service_builds_the_image(file: Path, keys: Path) -> None:
    for settings, first in ((ComposeFile(file), "keys"), (ComposeFile(file, keys=keys), "data")):
        services = load_compose(settings)["services"]
        assert [name for name, service in services.items() if "build" in service] == [first]
        assert {service["image"] for service in services.values()} == {"${P2PFL_IMAGE:-p2pfl}"}
        assert {service["pull_policy"] for service in services.values()} == {"never"}


def test_does_not_build_a_given_image(file: Path) -> None:
    services = load_compose(ComposeFile(file, image="registry.example.org/p2pfl:1"))["services"]
    assert {service["image"] for service in services.values()} == {"registry.example.org/p2pfl:1"}
    assert not any({"build", "pull_policy"} & set(service) for service in services.values())


def test_the_dockerfile_has_the_same_folders_and_defaults() -> None:
    text = (PROJECT / "Dockerfile").read_text()
    (made,) = re.findall(r"install -d -o p2pfl -g p2pfl -m 0755 (.*?) \\?\n", text)
    assert {RUN, FILES, DECODED} <= set(made.split())
    for name, given in BUILD.items():
        default = re.fullmatch(r"\$\{\w+:?-(.*)\}", given)
        assert default is not None
        assert re.search(rf"^ARG {name}={re.escape(default[1])}$", text, re.MULTILINE)
