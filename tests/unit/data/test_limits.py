"""docs/limits.md: what is not read is refused with the words that the page quotes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from p2pfl.data import DATASETS, open_dataset
from p2pfl.errors import DataError

PAGE = (Path(__file__).parents[3] / "docs" / "limits.md").read_text(encoding="utf-8")
QUOTED = {
    quoted
    for row in re.findall(r"^\|.*\|$", PAGE, flags=re.MULTILINE)
    for quoted in re.findall(r"`(.*?)`", row.split("|")[2])
}


def arrays(
    x: np.ndarray | None = None, y: np.ndarray | None = None, **others: np.ndarray
) -> Callable[[Path], object]:
    """Return what opens a dataset of these arrays, the same for training and test."""
    parts = {"x": np.zeros((6, 2)) if x is None else x, "y": np.arange(6) % 2 if y is None else y, **others}

    def opened(folder: Path) -> object:
        named: Any = {f"{name}_{split}": array for name, array in parts.items() for split in ("train", "test")}
        np.savez(folder / "d.npz", **named)
        return open_dataset("npz", DATASETS["npz"].parse({"path": "d.npz"}), folder, download=False)

    return opened


def table(text: str) -> Callable[[Path], object]:
    def opened(folder: Path) -> object:
        (folder / "t.csv").write_text(text)
        options = DATASETS["table"].parse({"path": "t.csv", "label": "y"})
        return open_dataset("table", options, folder, download=False)

    return opened


def frames(folder: Path) -> object:
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
    first, second = (Image.fromarray(np.full((8, 8), value, np.uint8)) for value in (0, 255))
    first.save(folder / "images" / "a" / "1.gif", save_all=True, append_images=[second])
    first.save(folder / "images" / "b" / "1.png")
    return open_dataset("folder", DATASETS["folder"].parse({"path": "images", "test": 0.5}), folder, download=False)


ragged = np.empty(6, object)
ragged[:] = [[0] * length for length in range(6)]
CASES: list[tuple[str, Callable[[Path], object]]] = [
    ("volumes or video", arrays(np.zeros((6, 4, 8, 8, 3), np.uint8))),
    ("volumes or video", arrays(np.zeros((6, 8, 8, 8)))),
    ("frames or pages", frames),
    ("images of floating-point numbers", arrays(np.zeros((6, 8, 8, 3)))),
    ("images of more than 8 bits", arrays(np.zeros((6, 8, 8), np.uint16))),
    ("transparency or more channels", arrays(np.zeros((6, 8, 8, 4), np.uint8))),
    ("a sample has one input", arrays(x2=np.zeros((6, 2)))),
    ("text or lists", arrays(np.array(["some text"] * 6))),
    ("has text", table("a,y\nsome text,0\nmore text,1\n")),
    ("it contains Python objects", arrays(ragged)),
    ("2 values for 3 columns", table("a,b,y\n1,2,0\n1,1\n")),
    ("measurements and NaN are not classes", arrays(y=np.linspace(0, 1, 6))),
    ("labels must be classes", table("a,y\n1,0.5\n2,0.25\n")),
    ("a sample has one class", arrays(y=np.ones((6, 3), int))),
    ("a sample has one class", arrays(y=np.zeros((6, 8, 8), int))),
]


def test_every_quoted_error_is_tried() -> None:
    assert {quoted for quoted, _ in CASES} == QUOTED


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("quoted", "opened"), CASES)
def test_what_is_not_read_is_refused_in_these_words(
    quoted: str, opened: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=re.escape(quoted)):
        opened(tmp_path)
