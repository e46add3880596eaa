"""Folders of classes: which files are samples, and that every change of them is noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.data.loaders.fingerprint import fingerprint
from p2pfl.errors import DataError
from tests.dataset_files import opened, photo, write_npz, write_usps

pytestmark = pytest.mark.usefixtures("cache")

Open = Callable[..., Dataset]

IMAGE_FOLDER = {"class": "ImageFolder"}


@pytest.fixture(params=["folder", "torchvision"])
def read(request: pytest.FixtureRequest, root: Path) -> Open:
    """Open the folder ``pics``, half of it for testing."""
    options: dict[str, Any] = {"path": "pics", "test": 0.5, "size": 4}
    if request.param == "torchvision":
        options |= IMAGE_FOLDER
    return lambda **more: opened(request.param, root, **options, **more)


@pytest.fixture
def pics(root: Path) -> Path:
    """Two classes of four images in different shades."""
    for label, name in enumerate("ab"):
        for number in range(4):
            photo(root / "pics" / name / f"{number}.png", 10 * number + 100 * label, (8, 8))
    return root / "pics"


def shades(dataset: Dataset) -> list[int]:
    splits = dataset.train.images, dataset.test.images
    return sorted(np.concatenate([images[:, 0, 0, 0] for images in splits]).tolist())


def per_class(dataset: Dataset) -> list[int]:
    return [int((dataset.pool.labels == label).sum()) for label in range(dataset.classes)]


ALL = [0, 10, 20, 30, 100, 110, 120, 130]

# --- which files are samples ---


def test_folders_and_files_of_the_system_are_no_data(pics: Path, read: Open) -> None:
    for name in (".git", ".ipynb_checkpoints", "__MACOSX", "@eaDir", "$RECYCLE.BIN", "lost+found"):
        photo(pics / name / "1.png", 250)
        photo(pics / "a" / name / "1.png", 250)
    photo(pics / "b" / "site" / ".thumbnails" / "1.png", 250)
    (pics / "a" / "._1.png").write_bytes(b"\0\5\26\7")
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini", "README", "labels.json", "1.XML"):
        (pics / "a" / name).touch()
    dataset = read()
    assert (shades(dataset), dataset.classes, dataset.notes) == (ALL, 2, ())


def test_classes_are_sorted_as_text(root: Path, read: Open) -> None:
    for shade, name in enumerate(("10", "9", "B", "a", "ä")):
        for number in range(2):
            photo(root / "pics" / name / f"{number}.png", shade, (8, 8))
    dataset = read()
    assert dataset.train.labels.tolist() == dataset.train.images[:, 0, 0, 0].tolist() == list(range(5))


def test_types_are_told_in_letters_of_any_case_and_at_any_depth(pics: Path, read: Open) -> None:
    photo(pics / "a" / "site 1" / "X.JPG", 60)
    photo(pics / "a" / "folder.png" / "x.jfif", 70)
    photo(pics / "a" / "x.tga", 80)
    assert shades(read()) == sorted([*ALL, 60, 70, 80])


def test_a_class_without_images_is_an_error(pics: Path, read: Open) -> None:
    (pics / "c").mkdir()
    with pytest.raises(DataError, match=f"^{pics}/c: no images of class c: add some, or remove the folder$"):
        read()
    for name in ("1.heic", "2.heic", "3.MP4"):
        (pics / "c" / name).touch()
    only = r"only files that are not read \(2 .heic, 1 .mp4\): convert them to PNG or JPEG, or remove the folder"
    with pytest.raises(DataError, match=f"^{pics}/c: no images of class c, {only}$"):
        read()


def test_files_beside_others_that_are_not_read_are_named(pics: Path, read: Open) -> None:
    for name in ("b/1.npy", "b/2.npy", "a/more/3.npy", "a/scan.dcm"):
        (pics / name).parent.mkdir(exist_ok=True)
        (pics / name).touch()
    photo(pics / "overview.png", 1)
    dataset = read()
    assert dataset.notes == (
        f"{pics}: not read: .dcm in a (1); .npy in b (2), a/more (1); images in no class (1); convert images among "
        "them to PNG or JPEG",
    )
    assert (shades(dataset), read().notes) == (ALL, dataset.notes)


def test_a_folder_without_classes_is_an_error(root: Path, read: Open) -> None:
    photo(root / "pics" / "1.png", 1)
    with pytest.raises(DataError, match=f"^{root}/pics: no folders of classes; put the images of each class into a"):
        read()


def test_the_test_split_may_lack_classes_but_not_have_only_unread_files(root: Path) -> None:
    for half, names in (("train", "abc"), ("test", "ab")):
        for name in names:
            photo(root / half / name / "1.png", 1)
    (root / "test" / "c").mkdir()
    (root / "test" / "c" / "notes.txt").touch()
    assert opened("folder", root, size=4).classes == 3
    (root / "test" / "c" / "1.heic").touch()
    with pytest.raises(DataError, match=f"{root}/test/c: no images of class c, only files that are not read"):
        opened("folder", root, size=4)


def test_types_that_this_pillow_newly_reads_are_read(pics: Path, read: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    Image.new("RGB", (8, 8), (60, 60, 60)).save(pics / "a" / "new.jxl", "PNG")
    assert (shades(read()), len(read().notes)) == (ALL, 1)
    monkeypatch.setitem(Image.EXTENSION, ".jxl", "PNG")
    assert (shades(read()), read().notes) == (sorted([*ALL, 60]), ())


def test_images_of_torchvision_are_read_as_those_of_folder(pics: Path, root: Path) -> None:
    values = np.tile(np.linspace(0, 4095, 8), (8, 1)).astype(np.uint16)
    Image.fromarray(values).save(pics / "a" / "deep.png")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(pics / "a" / "clear.png")
    options = {"path": "pics", "test": 0.5}
    torchvision = opened("torchvision", root, **IMAGE_FOLDER, **options)
    folder = opened("folder", root, **options, size=8)
    for one, other in ((torchvision.train, folder.train), (torchvision.test, folder.test)):
        np.testing.assert_array_equal(one.images, other.images)
    assert {0, 255} <= set(folder.pool.take(np.arange(10))[0][:, 0, 0].flatten().tolist())


# --- links ---


def test_links_are_followed(root: Path, pics: Path, read: Open) -> None:
    shutil.move(pics / "b", root / "elsewhere")
    (pics / "b").symlink_to(root / "elsewhere")
    photo(root / "single.png", 60)
    (pics / "a" / "4.png").symlink_to(root / "single.png")
    (root / "more").mkdir()
    (pics / "a" / "site").symlink_to(root / "more")
    assert shades(read()) == sorted([*ALL, 60])
    photo(root / "elsewhere" / "9.png", 61)
    photo(root / "more" / "1.png", 62)
    photo(root / "single.png", 63)
    assert shades(read()) == sorted([*ALL, 61, 62, 63])


def test_links_to_folders_above_end(pics: Path, read: Open) -> None:
    (pics / "a" / "up").symlink_to("..")
    (pics / "a" / "here").symlink_to(".")
    (pics / "a" / "itself").symlink_to("itself")
    (pics / "b" / "other").symlink_to("../a")
    assert shades(read()) == sorted([*ALL, 0, 10, 20, 30])


@pytest.mark.parametrize("name", ["c", "a/9.png"])
def test_links_to_nothing_are_errors(pics: Path, read: Open, name: str) -> None:
    (pics / name).symlink_to("nowhere")
    with pytest.raises(DataError, match=f"^{pics / name}: a link to what does not exist; correct or remove it"):
        read()


def test_pipes_are_not_waited_for(pics: Path, read: Open) -> None:
    os.mkfifo(pics / "a" / "pipe.png")
    assert shades(read()) == ALL


# --- changes are noticed ---


def pass_time(folder: Path) -> None:
    """Wait until the clock of the file system, which may be coarse, goes on."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.touch()


def test_an_image_that_was_edited_in_place_is_read_again(root: Path, pics: Path, read: Open) -> None:
    assert shades(read()) == ALL
    path = pics / "a" / "1.png"
    before = path.stat()
    pass_time(root)
    photo(path, 60, (8, 8))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert shades(read()) == sorted({*ALL, 60} - {10})


def test_an_image_that_was_replaced_is_read_again(root: Path, pics: Path, read: Open) -> None:
    path, new = pics / "a" / "1.png", root / "new.png"
    photo(new, 60, (8, 8))
    shutil.copystat(path, new)
    assert shades(read()) == ALL
    pass_time(root)
    os.replace(new, path)
    assert shades(read()) == sorted({*ALL, 60} - {10})


def test_removed_renamed_and_moved_files_are_noticed(pics: Path, read: Open) -> None:
    assert per_class(read()) == [4, 4]
    (pics / "a" / "1.png").unlink()
    assert per_class(read()) == [3, 4]
    (pics / "a" / "2.png").rename(pics / "b" / "9.png")
    assert per_class(read()) == [2, 5]
    (pics / "a").rename(pics / "z")
    assert per_class(read()) == [5, 2]
    (pics / "c").mkdir()
    with pytest.raises(DataError, match="no images of class c"):
        read()


def test_unchanged_files_are_not_read_again(root: Path, pics: Path, read: Open, cache: Path) -> None:
    read()
    (pics / ".DS_Store").touch()
    read()
    [_] = cache.glob("*/metadata.json")
    (root / "link").symlink_to("pics")
    assert fingerprint(root / "link") == fingerprint(pics)


def test_a_file_of_arrays_that_was_replaced_is_read_again(root: Path) -> None:
    path = root / "mine.npz"
    write_npz(path)
    before = path.stat()
    assert opened("npz", root, path="mine.npz").test.labels.tolist() == [1, 2]
    pass_time(root)
    write_npz(path, y_test=np.array([0, 1], np.int32))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert opened("npz", root, path="mine.npz").test.labels.tolist() == [0, 1]


def test_changes_are_noticed_within_styles_and_their_notes_kept(root: Path, pics: Path) -> None:
    part = {"name": "folder", "path": "pics", "test": 0.5, "size": 4}
    loader = DATASETS["styles"].parse({"of": [part, {**part, "size": 5}], "size": 4})
    assert len(open_dataset("styles", loader, root).pool) == 16
    photo(pics / "a" / "9.png", 60)
    (pics / "b" / "9.npy").touch()
    dataset = open_dataset("styles", loader, root)
    assert (len(dataset.pool), len(dataset.notes)) == (18, 2)


def test_published_files_keep_their_entries(root: Path, cache: Path) -> None:
    """The times of their status change when they are copied or their owner does: no reason to convert them again."""
    write_usps(root)
    opened("usps", root)
    pass_time(root)
    (root / "usps.bz2").chmod(0o600)
    opened("usps", root)
    [_] = cache.glob("usps-*/metadata.json")
