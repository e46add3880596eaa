"""`p2pfl k8s`: contents of the manifests, and their validity by the JSON schemas of several Kubernetes versions."""

from __future__ import annotations

import base64
import re
import secrets
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launcher.backends.kubernetes.manifests import MAX_CONFIG, Manifests
from launcher.errors import ManifestError
from p2pfl.errors import KeysError, RunFileError
from p2pfl.run_file.load import load
from p2pfl.run_folder.key_files import write_new
from tests.launcher_fixtures import Invoke

TOY = "name: toy\nrounds: 3\npeers: 12\ngraph: ring\nalgorithm: local\ndata: {dataset: digits}\n"
PLUGIN = """\
from p2pfl import plugins


@plugins.metric("k8s-test")
def k8s_test(scores, labels):
    return 0.0
"""
VERSIONS = ["1.28", "1.31", "1.34", "1.36"]
"""The oldest version that sets the label with a pod's index, and later ones."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "with keys": {"keys": Path("keys")},
    "GPU slice": {"gpu": "nvidia.com/mig-1g.10gb", "cpus": "500m", "storage_class": "fast"},
    "download": {"sets": ["data.dataset=mnist"]},
    "data claim": {"sets": ["data.dataset=mnist"], "data_claim": "datasets"},
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(TOY)
    write_new(Path("keys"), {peer: (secrets.token_bytes(32), secrets.token_bytes(32)) for peer in range(12)})
    return Path("toy.yaml")


def build(file: Path, **settings: Any) -> dict[tuple[str, str], Any]:
    """Return the manifests by kind and name, as read from the text."""
    documents = list(yaml.safe_load_all(Manifests(file, "p2pfl:1", **settings).render(["p2pfl"])))
    found = {(document["kind"], document["metadata"]["name"]): document for document in documents}
    assert len(found) == len(documents)
    return found


def pod(found: dict[tuple[str, str], Any]) -> Any:
    return found["StatefulSet", "toy"]["spec"]["template"]["spec"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_manifests_have_only_fields_of_kubernetes(file: Path, version: str, variant: str) -> None:
    for document in build(file, **VARIANTS[variant]).values():
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.exhaustive
def test_the_validator_rejects_a_misspelled_field(file: Path) -> None:
    stateful_set = build(file)["StatefulSet", "toy"]
    stateful_set["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnlyRootFileSystem"):
        kubernetes_validate.validate(stateful_set, VERSIONS[0], strict=True)


def test_one_pod_per_peer_starts_and_restarts_without_order(file: Path) -> None:
    spec = build(file)["StatefulSet", "toy"]["spec"]
    assert spec["replicas"] == 12
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "1Gi"}
    (peer,) = spec["template"]["spec"]["containers"]
    assert peer["args"] == ["--stay"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert peer[probe]["exec"]["command"][-2:] == ["--health", "--stay"]


def test_peers_find_each_other_by_the_name_of_their_pod(file: Path) -> None:
    found = build(file, name="other")
    spec = found["StatefulSet", "other"]["spec"]
    (peer,) = spec["template"]["spec"]["containers"]
    variables = {entry["name"]: entry.get("value") for entry in peer["env"]}
    assert variables.pop("P2PFL_ME") is None
    assert load(file, environment=variables).file.transport.book(12).address_of(11) == "tcp://other-11.other:5711"
    assert load(file, environment=variables).config_hash() == load(file).config_hash()
    service = found["Service", "other"]["spec"]
    assert (spec["serviceName"], service["clusterIP"]) == ("other", "None")
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == spec["selector"]["matchLabels"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_containers_have_no_privileges(file: Path, variant: str) -> None:
    found = build(file, **VARIANTS[variant])
    pods = [
        document["spec"]["template"]["spec"]
        for (kind, _), document in found.items()
        if kind in ("StatefulSet", "Job")
    ]
    for spec in pods:
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*spec.get("initContainers", []), *spec["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] == "2Gi"


def test_a_container_mounts_only_the_private_key_of_its_peer(file: Path) -> None:
    spec = pod(build(file))
    (peer,), (init,) = spec["containers"], spec["initContainers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    paths = {item["path"] for item in volumes["all-keys"]["secret"]["items"]}
    assert {f"{number}/{number:02d}.key" for number in range(12)} | {"public/public.yaml"} == paths
    mounted = [mount for mount in init["volumeMounts"] if mount["name"] == "all-keys"]
    assert [mount.get("subPathExpr") or mount["subPath"] for mount in mounted] == ["$(P2PFL_ME)", "public"]
    assert "all-keys" not in {mount["name"] for mount in peer["volumeMounts"]}


def test_the_secret_has_the_keys_of_the_given_folder(file: Path) -> None:
    assert ("Secret", "toy-keys") not in build(file)
    data = build(file, keys=Path("keys"))["Secret", "toy-keys"]["data"]
    assert {name: base64.b64decode(text) for name, text in data.items()} == {
        path.name: path.read_bytes() for path in Path("keys").iterdir()
    }
    Path("keys/07.key").unlink()
    with pytest.raises(KeysError, match=r"07\.key"):
        build(file, keys=Path("keys"))


def test_network_policy_allows_only_peers_and_dns(file: Path) -> None:
    spec = build(file)["NetworkPolicy", "toy"]["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (ingress,), (peers, dns) = spec["ingress"], spec["egress"]
    assert ingress["from"] == peers["to"] == [{"podSelector": spec["podSelector"]}]
    assert ingress["ports"] == peers["ports"] == [{"protocol": "TCP", "port": 5700, "endPort": 5711}]
    assert {port["port"] for port in dns["ports"]} == {53}


def test_the_config_map_has_all_files_that_the_run_file_names(file: Path) -> None:
    Path("net.txt").write_text("\n".join(f"{peer} {(peer + 1) % 12}" for peer in range(12)))
    Path("mine.py").write_text(PLUGIN)
    found = build(file, sets=["graph={name: file, path: net.txt}", "plugins=[mine.py]"])
    data, volume = found["ConfigMap", "toy"]["data"], next(v for v in pod(found)["volumes"] if v["name"] == "config")
    texts = {item["path"]: data[item["key"]] for item in volume["configMap"]["items"]}
    assert texts == {"toy.yaml": TOY, "net.txt": Path("net.txt").read_text(), "plugins/mine.py": PLUGIN}
    assert all(re.fullmatch("[-._a-zA-Z0-9]+", key) for key in data)


@pytest.mark.exhaustive
def test_files_that_do_not_fit_in_a_config_map_are_rejected(file: Path) -> None:
    file.write_text(TOY + "# " + "x" * MAX_CONFIG)
    with pytest.raises(ManifestError, match=r"toy\.yaml: with this file, .* more than 1 MB"):
        build(file)


def test_the_dataset_is_downloaded_by_a_job_that_may_reach_other_networks(file: Path) -> None:
    found = build(file, sets=["data.dataset=mnist"])
    assert found["NetworkPolicy", "toy-data"]["spec"]["egress"] == [{}]
    assert (
        found["NetworkPolicy", "toy-data"]["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        == "data"
    )
    (job,) = found["Job", "toy-data"]["spec"]["template"]["spec"]["containers"]
    wait = pod(found)["initContainers"][1]
    assert job["command"] == wait["command"]
    assert {"name": "data", "mountPath": "/data"} in job["volumeMounts"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in wait["volumeMounts"]


def test_an_existing_claim_with_the_dataset_needs_no_job(file: Path) -> None:
    found = build(file, sets=["data.dataset=mnist", "data.root=/somewhere"], data_claim="datasets")
    assert not any(kind == "Job" for kind, _ in found)
    assert {"name": "data", "mountPath": "/data/files", "readOnly": True} in pod(found)["containers"][0][
        "volumeMounts"
    ]
    assert "--set=data.root=/data/files" in pod(found)["containers"][0]["args"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sets": ["transport.hosts={0: a}"]}, "pods find each other by name"),
        ({"sets": ["data.dataset=mnist", "data.root=/x"]}, "--data-claim"),
        ({"sets": ["data.dataset=mnist", "data.download=false"]}, "--data-claim"),
    ],
)
def test_run_files_that_name_this_network_or_host_are_rejected(file: Path, settings: Any, words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        build(file, **settings)


def test_a_name_is_derived_or_checked(file: Path) -> None:
    assert ("Service", "my-run-2") in build(file, sets=["name=My_Run.2"])
    with pytest.raises(ManifestError, match=r"name 'Toy': expected .* set another one with --name"):
        build(file, name="Toy")


def test_a_gpu_is_a_limit_of_one_and_selects_cuda(file: Path) -> None:
    (peer,) = pod(build(file, gpu="nvidia.com/gpu.shared"))["containers"]
    assert peer["args"] == ["--stay", "--set=device=cuda"]
    assert peer["resources"]["limits"]["nvidia.com/gpu.shared"] == 1


def test_arguments_are_not_expanded_by_kubernetes(file: Path) -> None:
    (peer,) = pod(build(file, sets=["out=$(HOME)"]))["containers"]
    assert peer["args"] == ["--stay", "--set=out=$$(HOME)"]


@pytest.mark.parametrize(
    ("option", "value"), [("--memory", "2 GB"), ("--cpus", "0"), ("--gpu", "gpu"), ("--storage-class", "a;b")]
)
def test_options_that_kubernetes_would_reject_are_rejected(
    file: Path, invoke: Invoke, option: str, value: str
) -> None:
    outcome = invoke("k8s", file, "--image=p", option, value)
    assert outcome.exit_code == 2
    assert f"{value!r}: expected" in outcome.stderr


@pytest.mark.exhaustive
def test_output_is_a_kustomize_base_with_keys_that_are_kept(file: Path, invoke: Invoke) -> None:
    for words in ("with new keys", "with the existing keys"):
        outcome = invoke("k8s", file, "--image=p", "--output=base")
        assert outcome.exit_code == 0
        assert words in outcome.stdout
    base = yaml.safe_load(Path("base/kustomization.yaml").read_text())
    (generator,) = base["secretGenerator"]
    assert generator["name"] == "toy-keys"
    assert all(Path("base", name).is_file() for name in (*base["resources"], *generator["files"]))
    private = {path.read_text().strip() for path in Path("base/keys").glob("*.key")}
    assert len(private) == 12
    written = Path("base/manifests.yaml").read_text()
    assert not any(key in written for key in private)
    assert Path("base/.gitignore").read_text() == "keys/\n"
    assert invoke("k8s", file, "--image=p", "--output=base", "--keys=keys").exit_code == 2
