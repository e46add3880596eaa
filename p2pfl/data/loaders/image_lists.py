"""Which files below a folder are images, and which are not read although users may believe so."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISDIR

from p2pfl.data.loaders.file_tree import SYSTEM, files_below
from p2pfl.errors import DataError
from p2pfl.terminal import printable

Index = Sequence[tuple[Path, int]]
"""Pairs of image file and label."""

_ALWAYS = ".apng .bmp .dib .gif .ico .jfif .jpe .jpeg .jpg .mpo .pbm .pcx .pgm .png .pnm .ppm .tga .tif .tiff .webp"
_PERHAPS = ".avif .avifs .heic .heif .hif .j2c .j2k .jp2 .jpc .jpf .jpx .jxl .qoi"
_BESIDE = """.aae .bak .cfg .csv .db .doc .docx .html .ini .json .jsonl .lnk .log .lst .md .md5 .pdf .pkl .py .rst
.rtf .sh .sha1 .sha256 .toml .tsv .txt .url .xls .xlsx .xml .xmp .yaml .yml .zip"""

ALWAYS = frozenset(_ALWAYS.split())
"""Types of images that every Pillow reads."""
PERHAPS = frozenset(_PERHAPS.split())
"""Types that Pillow reads if it was built with them, or if a plug-in registers them."""
BESIDE = frozenset(["", *_BESIDE.split()])
"""Types of what lies beside images and needs no word; also files without a type, such as README."""
_EXAMPLES = 3


def is_readable(suffix: str) -> bool:
    """Whether files of a type, in lower case, are read as images here and now."""
    if suffix not in PERHAPS:
        return suffix in ALWAYS
    from PIL import Image

    Image.init()
    return Image.EXTENSION.get(suffix) in Image.OPEN


def is_image(path: Path) -> bool:
    """Whether a file is read as an image, by its type in letters of any case."""
    return is_readable(path.suffix.lower())


def list_images(folder: Path, classes: Sequence[str], *, may_lack: bool = False) -> Index:
    """List all images below ``folder/CLASS``, sorted by class and name; labels are positions in ``classes``.

    Args:
        may_lack: whether a class may have no files, as in the test split; never has one only files of other types.

    Raises:
        DataError: there are no classes, one has no images, or an image is a link to what does not exist.
    """
    if not classes:
        raise DataError(
            f"{printable(str(folder))}: no folders of classes; put the images of each class into a separate folder"
        )
    depth = len(folder.parts)
    images: dict[str, list[Path]] = {name: [] for name in classes}
    others = {name: Counter[str]() for name in classes}
    for path, is_there in _files(folder):
        name = path.parts[depth]
        if name not in images or len(path.parts) == depth + 1:
            continue
        if not is_image(path):
            others[name][path.suffix.lower()] += 1
        elif is_there:
            images[name].append(path)
        else:
            raise DataError(f"{printable(str(path))}: a link to what does not exist; correct or remove it")
    for name in classes:
        if not images[name] and (set(others[name]) - BESIDE or not may_lack):
            raise DataError(_without_images(folder / name, others[name]))
    return [(path, label) for label, name in enumerate(classes) for path in images[name]]


def not_read(folder: Path) -> list[str]:
    """Say which files below a folder of classes are not read, although they may be images: none, or one line."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    loose = 0
    for path, _ in _files(folder):
        if not is_image(path) and (suffix := path.suffix.lower()) not in BESIDE:
            folders[suffix][printable(str(path.parent.relative_to(folder)))] += 1
        loose += path.parent == folder and is_image(path)
    found = []
    for suffix, where in sorted(folders.items()):
        names = [f"{name} ({count})" for name, count in where.most_common(_EXAMPLES)]
        found.append(f"{suffix} in {', '.join(names)}{', …' if len(where) > _EXAMPLES else ''}")
    if loose:
        found.append(f"images in no class ({loose})")
    advice = "; convert images among them to PNG or JPEG" if folders else ""
    return [f"{printable(str(folder))}: not read: {'; '.join(found)}{advice}"] if found else []


def check_folders(folder: Path) -> None:
    """Check the folders of a library that takes each as a class, and follows no links.

    Raises:
        DataError: one has only files that are not read, is a link, or is one of the system.
    """
    folders: dict[Path, Counter[str]] = defaultdict(Counter)
    for path, _ in _files(folder):
        folders[path.parent][path.suffix.lower() if not is_image(path) else ""] += 1
    for parent, types in folders.items():
        if not types[""] and set(types) - BESIDE:
            raise DataError(_without_images(parent, types))
    for found, names, _ in os.walk(folder):
        for below in (Path(found, name) for name in names if not name.startswith((".", "__"))):
            if below.is_symlink() or below.name.lower() in SYSTEM:
                what = "is a link, which is not followed" if below.is_symlink() else "would be taken for a class"
                raise DataError(f"{printable(str(below))} {what}; remove it, or use the dataset `folder`")


def _without_images(folder: Path, others: Counter[str]) -> str:
    found = ", ".join(f"{count} {suffix or 'without a type'}" for suffix, count in others.most_common(_EXAMPLES))
    only = f", only files that are not read ({found}): convert them to PNG or JPEG" if others else ": add some"
    return f"{printable(str(folder))}: no images of class {printable(folder.name)}{only}, or remove the folder"


def _files(folder: Path) -> list[tuple[Path, bool]]:
    """The files below a folder, and whether they exist; none if there is no folder."""
    if not folder.is_dir():
        return []
    found = files_below(folder)
    return [(Path(path), status is not None) for path, status in found if not status or not S_ISDIR(status.st_mode)]
