"""Files that a run file names by path, which other hosts get as copies in the run folder."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from launcher.backends.named_files import copy_named_files
from p2pfl.run_file.load import load
from p2pfl.run_folder.folder import RunFolder
from tests.launcher_fixtures import RING, MakeFolder


def test_files_named_by_path_come_into_the_run_folder(make_folder: MakeFolder, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "root").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("a.npz", "beside/à b.npz", "root/b.npz", "elsewhere/a.npz", "large.npz"):
        (tmp_path / name).write_bytes(name.encode())
    os.truncate(tmp_path / "large.npz", 65 << 20)
    encoder = make_folder("pretrained", peers=2)
    encoder.peer(1).checkpoint.write_bytes(b"encoder")
    file = tmp_path / "beside" / "toy.yaml"
    text = tmp_path / "a.npz"
    splits = {"own": "à b.npz", "other": "../elsewhere/a.npz", "large": "../large.npz", "below": "../root/b.npz"}
    tree = yaml.safe_load(RING) | {
        "data": {"root": "../root", "dataset": {"name": "huggingface", "path": str(text), "data_files": splits}},
        "algorithm": {"name": "meta-l2c", "encoder": str(encoder.root)},
        "models": {"module": "my_nets.Net", "args": {"weights": "à b.npz"}, "head": "fc"},
    }
    file.write_text(yaml.safe_dump(tree))
    folder = make_folder(peers=1)
    for beside in (file, folder.run_file):
        beside.with_name("my_nets.py").write_text("class Net: ...\n")
    run = load(file)
    folder.run_file.write_text(run.to_yaml())

    undeclared, large = copy_named_files(folder, run)
    assert undeclared == (
        f"data.dataset.path: {text} is not declared as a path, so it is not sent: each host needs it there"
    )
    assert large.startswith("data.dataset.data_files.large: ")
    assert "large.npz has more than 67.1 MB, too much to send" in large
    read = load(folder.run_file)
    found: dict[str, Path] = read.loader.data_files  # type: ignore[attr-defined]
    for name in ("own", "other"):
        assert found[name].is_relative_to(folder.root)
        assert found[name].read_bytes() == (file.parent / splits[name]).read_bytes()
    assert found["large"].samefile(tmp_path / "large.npz")
    assert found["below"].samefile(tmp_path / "root" / "b.npz")  # each host has what is below data.root
    weights = folder.root / "files" / "2" / "à b.npz"
    assert read.file.models.name == f"my_nets.Net(weights={str(weights)!r}):fc"
    assert weights.read_bytes() == (file.parent / "à b.npz").read_bytes()
    copied = RunFolder.open(read.hyper.encoder)  # type: ignore[attr-defined]
    assert [files.checkpoint.read_bytes() for files in copied.peers()] == [b"encoder"]


def test_a_folder_with_links_is_copied_with_what_they_lead_to(make_folder: MakeFolder, tmp_path: Path) -> None:
    for part in ("images/train/a", "images/test/a"):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "1.png").write_bytes(part.encode())
    for split in ("train", "test"):
        (tmp_path / "images" / split / "b").symlink_to("a")
        (tmp_path / "images" / split / "a" / "all").symlink_to(tmp_path / "images")  # leads back
    file = tmp_path / "toy.yaml"
    file.write_text(f"{RING.replace('digits', '{name: folder, path: images, test: null}')}")
    run = load(file)
    folder = make_folder(peers=1)
    folder.run_file.write_text(run.to_yaml())
    assert copy_named_files(folder, run) == []
    copy = load(folder.run_file).loader.path  # type: ignore[attr-defined]
    assert copy == folder.root / "files" / "images"
    found = sorted(str(part.relative_to(copy)) for part in copy.rglob("*") if part.is_file())
    assert found == [f"{split}/{name}/1.png" for split in ("test", "train") for name in "ab"]
