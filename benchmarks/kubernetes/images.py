"""Archives of images, as `docker save` writes them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import click

MANIFEST = "manifest.json"


def _manifest(archive: Path) -> dict[str, Any]:
    """Return the description of the only image in an archive. Raises click.ClickException."""
    try:
        with tarfile.open(archive, "r:") as tar:
            file = tar.extractfile(MANIFEST)
            assert file is not None  # it is not a folder
            (image,) = json.load(file)
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        text = "expected an archive of one image, as `docker save NAME --output FILE` writes it"
        raise click.ClickException(f"{archive}: {text}: {error}") from None
    if not isinstance(image, dict) or not image.get("RepoTags"):
        raise click.ClickException(f"{archive}: the image has no name; use `docker save NAME`, not `docker save ID`")
    return image


def name(archive: Path) -> str:
    """Return the full name of the image in an archive. Raises click.ClickException."""
    tag: str = _manifest(archive)["RepoTags"][0]
    host, slash, _ = tag.partition("/")
    if not slash:
        return f"docker.io/library/{tag}"
    return tag if "." in host or ":" in host or host == "localhost" else f"docker.io/{tag}"


def digest(archive: Path) -> str:
    """Return what identifies the image's content: the name of its configuration. Raises click.ClickException."""
    return str(_manifest(archive)["Config"])


def write_pause(archive: Path, tag: str, program: Path) -> None:
    """Write an image whose only file is ``program``: a static catatonit, which holds a pod's namespaces."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        info = tar.gettarinfo(program, "pause")
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        with program.open("rb") as file:
            tar.addfile(info, file)
    diff = f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"
    configuration = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause", "-P"]},
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for path, content in (
            ("config.json", json.dumps(configuration).encode()),
            ("layer.tar", layer.getvalue()),
            (MANIFEST, json.dumps(manifest).encode()),
        ):
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
