"""What the check of `p2pfl k8s` in a real cluster computes before it starts one: images, configuration, cleanup."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from benchmarks.kubernetes import __main__ as command
from benchmarks.kubernetes import cluster, configuration, images, node
from benchmarks.kubernetes.scenarios import OPTIONS, PEERS, RUN_FILE
from launcher.backends.kubernetes.manifests import Manifests


def archive(path: Path, manifest: Any) -> Path:
    content = json.dumps(manifest).encode()
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("tag", "full"),
    [
        ("p2pfl:latest", "docker.io/library/p2pfl:latest"),
        ("someone/p2pfl:1", "docker.io/someone/p2pfl:1"),
        ("registry.example.org/p2pfl:1", "registry.example.org/p2pfl:1"),
        ("localhost:5000/p2pfl:1", "localhost:5000/p2pfl:1"),
        ("localhost/p2pfl:1", "localhost/p2pfl:1"),
    ],
)
def test_image_has_the_name_under_which_containerd_imports_it(tmp_path: Path, tag: str, full: str) -> None:
    file = archive(tmp_path / "image.tar", [{"Config": "abc.json", "RepoTags": [tag], "Layers": []}])
    assert images.name(file) == full
    assert images.digest(file) == "abc.json"


def test_archives_without_a_named_image_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(click.ClickException, match="text: expected an archive of one image, as `docker save"):
        images.name(tmp_path / "text")
    with pytest.raises(click.ClickException, match="expected an archive of one image"):
        images.name(archive(tmp_path / "two.tar", [{"RepoTags": ["a"]}, {"RepoTags": ["b"]}]))
    with pytest.raises(click.ClickException, match="has no name; use `docker save NAME`"):
        images.name(archive(tmp_path / "unnamed.tar", [{"Config": "abc.json", "RepoTags": None}]))


def test_pause_image_holds_the_program_under_its_digest(tmp_path: Path) -> None:
    program = tmp_path / "catatonit"
    program.write_bytes(b"a program")
    program.chmod(0o755)
    images.write_pause(tmp_path / "pause.tar", configuration.PAUSE, program)
    assert images.name(tmp_path / "pause.tar") == configuration.PAUSE
    with tarfile.open(tmp_path / "pause.tar") as tar:
        files = {member.name: tar.extractfile(member) for member in tar}
        contents = {name: file.read() for name, file in files.items() if file is not None}
    settings = json.loads(contents["config.json"])
    assert settings["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(contents['layer.tar']).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(contents["layer.tar"])) as layer:
        (member,) = layer
        file = layer.extractfile(member)
        assert file is not None
        assert (f"/{member.name}", file.read()) == (settings["config"]["Entrypoint"][0], b"a program")
        assert member.mode == 0o755


def test_every_claim_of_the_manifests_has_a_volume(tmp_path: Path) -> None:
    folders = [tmp_path / str(peer) for peer in range(PEERS)]
    volumes = [volume["spec"] for volume in configuration.volumes("calm", folders)]
    (peers,) = [each for each in Manifests(RUN_FILE, "p2pfl", name="calm").build() if each["kind"] == "StatefulSet"]
    (template,) = peers["spec"]["volumeClaimTemplates"]
    claim = template["spec"]
    names = [f"{template['metadata']['name']}-calm-{peer}" for peer in range(peers["spec"]["replicas"])]
    assert [volume["claimRef"] for volume in volumes] == [{"namespace": "calm", "name": name} for name in names]
    assert [volume["local"]["path"] for volume in volumes] == [str(folder) for folder in folders]
    for volume in volumes:
        assert volume["accessModes"] == claim["accessModes"]
        assert volume["capacity"] == claim["resources"]["requests"]
        assert volume.get("storageClassName") == claim.get("storageClassName")


def test_requests_of_all_peers_fit_on_a_node_of_one_cpu() -> None:
    ((_, cpus),) = [option.split("=") for option in OPTIONS if option.startswith("--cpus")]
    assert cpus.endswith("m")
    assert PEERS * int(cpus[:-1]) < 1000


def test_containerd_serves_pods_only_with_cri(tmp_path: Path) -> None:
    importing, serving = (
        tomllib.loads(configuration.containerd(tmp_path / "store", tmp_path / "network", with_cri=with_cri))
        for with_cri in (False, True)
    )
    assert (importing["disabled_plugins"], serving["disabled_plugins"]) == ([configuration.CRI], [])
    assert serving["plugins"][configuration.CRI]["cni"]["conf_dir"] == str(tmp_path / "network")
    assert importing["root"] == serving["root"] == str(tmp_path / "store")


def test_kubelet_stays_below_its_control_group_and_evicts_nothing(tmp_path: Path) -> None:
    settings = yaml.safe_load(configuration.kubelet(tmp_path, "p2pfl-k8s-7"))
    assert settings["cgroupRoot"] == "/p2pfl-k8s-7"
    assert set(settings["evictionHard"].values()) == {"0%"}
    assert settings["containerRuntimeEndpoint"] == f"unix://{configuration.SOCKET}"


def test_lists_all_that_is_missing_and_exits_with_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(configuration, "PLUGINS", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [text.split()[0] for text in cluster.missing()] == [*cluster.PROGRAMS, f"{tmp_path}/bridge", "the"]
    done = CliRunner().invoke(command.main, [])
    assert done.exit_code == 3
    assert "etcd (from Debian's etcd-server)" in done.output


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    for controller in ("cpu", "memory", "unified"):
        for name in ("kubepods/pod7/container", "other"):
            (tmp_path / controller / node.CGROUP.format(4_000_000_000) / name).mkdir(parents=True)
        (tmp_path / controller / "another").mkdir()
    (tmp_path / "cpuacct").symlink_to("cpu")
    return tmp_path


def test_control_groups_have_a_hierarchy_per_controller_or_one(groups: Path) -> None:
    assert node.hierarchies(groups) == [groups / "cpu", groups / "memory", groups / "unified"]
    (groups / "cgroup.controllers").touch()
    assert node.hierarchies(groups) == [groups]


def test_removes_control_groups_of_checks_that_were_killed(groups: Path) -> None:
    mine = groups / "cpu" / node.CGROUP.format(os.getpid())
    mine.mkdir()
    node.remove_cgroups_of_killed(groups)
    assert sorted(path.name for path in (groups / "cpu").iterdir()) == sorted(["another", mine.name])
    assert [path.name for path in (groups / "memory").iterdir()] == ["another"]
    assert [path.name for path in (groups / "unified").iterdir()] == ["another"]


def test_reports_control_groups_that_stay(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "ENDS_WITHIN", 0.0)
    name = node.CGROUP.format(4_000_000_000)
    (groups / "cpu" / name / "process").touch()  # as a process in it does, a file prevents the removal
    with pytest.raises(click.ClickException, match=f"control groups are left: {groups / 'cpu' / name}"):
        node.remove_cgroups(name, groups)
