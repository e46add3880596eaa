"""The command ``p2pfl k8s``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.commands.group import FILE, SETS
from launcher.formatting.console import echo, echo_file

if TYPE_CHECKING:
    from launcher.backends.kubernetes import Manifests

QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
RESOURCE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9][-A-Za-z0-9_.]*")


def _quantity(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None and (not QUANTITY.fullmatch(text) or not re.search("[1-9]", text)):
        raise click.BadParameter(f"{text!r}: expected a number of at least one unit, e.g. 500m, 2, 1.5Gi")
    return text


def _resource(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None and not RESOURCE.fullmatch(text):
        raise click.BadParameter(f"{text!r}: expected a resource name, e.g. nvidia.com/gpu or nvidia.com/mig-1g.10gb")
    return text


def _label(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    if text is not None and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", text):
        raise click.BadParameter(f"{text!r}: expected a name of a-z, 0-9, - and .")
    return text


@click.command()
@FILE
@SETS
@click.option("--image", metavar="NAME", required=True, help="Image that the cluster can pull.")
@click.option("--name", metavar="NAME", help="Prefix of the names of all objects. Default: the run's name.")
@click.option(
    "--keys",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with the peers' keys: print the Secret too. Default: you create it.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a kustomize base to this folder, and create keys in its folder `keys` unless they exist.",
)
@click.option("--cpus", metavar="QUANTITY", callback=_quantity, help="CPUs of a peer. Default: threads in FILE.")
@click.option("--memory", metavar="QUANTITY", callback=_quantity, default="2Gi", show_default=True, help="Of a peer.")
@click.option(
    "--gpu",
    metavar="RESOURCE",
    callback=_resource,
    help="Give each peer one GPU, or a part of one: nvidia.com/gpu, nvidia.com/gpu.shared, nvidia.com/mig-1g.10gb, …",
)
@click.option(
    "--storage", metavar="QUANTITY", callback=_quantity, default="1Gi", show_default=True, help="Volume of a peer."
)
@click.option("--storage-class", metavar="NAME", callback=_label, help="Of the volumes. Default: the cluster's.")
@click.option(
    "--data-claim",
    metavar="NAME",
    callback=_label,
    help="Existing PersistentVolumeClaim with the dataset's files. Default: download them in the cluster.",
)
def k8s(file: Path, output: Path | None, **options: Any) -> None:
    """Print Kubernetes manifests for FILE: one pod per peer.

    Pipe them into `kubectl apply -f -`, or write them with --output and run `kubectl apply -k FOLDER`. They are a
    StatefulSet and what it needs.
    """
    from launcher.backends.kubernetes import Manifests

    manifests = Manifests(file, **options)
    if output is not None:
        if manifests.keys is not None:
            raise click.UsageError(f"--output uses the keys in {output / 'keys'}: copy yours there and omit --keys")
        _write(manifests, output)
        return
    text = manifests.render(_command(manifests))
    if manifests.keys is not None and sys.stdout.isatty():
        raise click.UsageError("the output contains private keys: pipe it into `kubectl apply -f -` or a file")
    echo_file(text)


def _write(manifests: Manifests, folder: Path) -> None:
    """Write a kustomize base, and the keys that it lacks."""
    from launcher.backends.manifest_files import kustomization
    from launcher.errors import ManifestError
    from p2pfl.run_folder.key_files import check

    text = manifests.render([*_command(manifests), f"--output={folder}"])
    name, peers = manifests.identity()
    keys = folder / "keys"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("keys/\n", encoding="utf-8")
        (folder / "manifests.yaml").write_text(text, encoding="utf-8")
        (folder / "kustomization.yaml").write_text(kustomization(name, peers), encoding="utf-8")
    except OSError as error:
        raise ManifestError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None
    created = not keys.exists()
    if created:
        # Another process creates the keys, with ZeroMQ, which this one does not import.
        command = [sys.executable, "-P", "-m", "peers.keys", str(keys), *map(str, range(peers))]
        if code := subprocess.run(command).returncode:
            sys.exit(code)
    check(keys, peers, range(peers))
    echo(f"{folder}: kustomize base of {peers} peers, with {'new' if created else 'the existing'} keys in {keys}")
    echo(f"start them: kubectl apply -k {folder}")


def _command(manifests: Manifests) -> list[str]:
    """Return the command line that prints these manifests, without defaults."""
    from dataclasses import fields

    words = ["p2pfl", "k8s", os.fspath(manifests.file), *(f"--set={item}" for item in manifests.sets)]
    for field in fields(manifests):
        value = getattr(manifests, field.name)
        if field.name not in ("file", "sets") and value != field.default:
            words.append(f"--{field.name.replace('_', '-')}={value}")
    return words
