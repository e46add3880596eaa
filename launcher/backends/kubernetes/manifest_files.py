"""Text files with manifests for Kubernetes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from p2pfl.run_folder.key_files import PUBLIC

Manifest = dict[str, Any]


def kustomization(name: str, peers: int) -> str:
    """Return the text of a kustomization.yaml that adds the keys in folder ``keys`` to manifests.yaml."""
    files = [f"keys/{PUBLIC}", *(f"keys/{peer:02d}.key" for peer in range(peers))]
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["manifests.yaml"],
        "secretGenerator": [{"name": f"{name}-keys", "files": files}],
        "generatorOptions": {"disableNameSuffixHash": True},
    }
    return dump([content])


def dump(manifests: Iterable[Manifest]) -> str:
    """Return the text of a YAML file with these documents."""
    return yaml.dump_all(
        manifests, Dumper=_Dumper, explicit_start=True, sort_keys=False, allow_unicode=True, width=10_000
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and repeats equal values instead of naming them with anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def write_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.write_text)
