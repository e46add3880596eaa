"""Local files through the library ``datasets``; skipped without the extra ``huggingface``."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from p2pfl.data import DATASETS, Dataset, open_dataset
from p2pfl.errors import DataError, MissingExtra
from p2pfl.inputs import Tokens

pytestmark = pytest.mark.filterwarnings("default")  # of the library's dependencies


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("P2PFL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def opened(root: Path, **options: Any) -> Dataset:
    return open_dataset("huggingface", DATASETS["huggingface"].parse(options), root, download=False)


def needs_library() -> None:
    pytest.importorskip("datasets", reason="needs the extra `huggingface`", exc_type=ImportError)


def write(path: Path, **columns: Any) -> None:
    needs_library()
    from pyarrow import parquet, table

    parquet.write_table(table(columns), path)


def test_parquet_has_vectors_of_one_or_of_several_columns(folder: Path) -> None:
    for name, count in (("a", 6), ("b", 4)):
        numbers = [float(n) for n in range(count)]
        pairs = [[n, 2 * n] for n in numbers]
        labels, writers = [("x", "y")[n % 2] for n in range(count)], [7 + n % 3 for n in range(count)]
        write(folder / f"{name}.parquet", p=numbers, q=numbers, pair=pairs, kind=labels, writer=writers)
    files = {"path": "parquet", "data_files": {"train": "a.parquet", "later": "b.parquet"}, "label": "kind"}
    one = opened(folder, **files, test="later", inputs="pair", groups=["writer"])
    assert one.train.images.tolist() == [[n, 2 * n] for n in range(6)]
    assert (one.train.labels.tolist(), one.test.labels.tolist()) == ([0, 1] * 3, [0, 1] * 2)
    assert one.columns["writer"].values == ("7", "8", "9")
    assert one.columns["writer"].test.tolist() == [0, 1, 2, 0]
    two = opened(folder, **files, test="later", inputs=["p", "q"])
    assert two.test.images.tolist() == [[n, n] for n in range(4)]
    part = opened(folder, **files, train="train[:4]", test=0.5, inputs="pair")
    assert (len(part.train), len(part.test)) == (2, 2)


def test_parquet_has_series_and_tokens(folder: Path) -> None:
    series = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]] * 6
    write(folder / "a.parquet", series=series, tokens=[[1, 2, 3, 8]] * 6, label=[0, 1] * 3, ragged=[[1], [1, 2]] * 3)
    files: dict[str, Any] = {"path": "parquet", "data_files": {"train": "a.parquet"}, "test": 0.5}
    assert opened(folder, **files, inputs="series").size == (3,)
    tokens = opened(folder, **files, inputs="tokens")
    assert (tokens.channels, tokens.size) == (9, Tokens((4,)))
    with pytest.raises(DataError, match="huggingface parquet: ragged: its lists differ in length"):
        opened(folder, **files, inputs="ragged")
    with pytest.raises(DataError, match=r"no column 'token'; it has series, tokens, .*; did you mean 'tokens'"):
        opened(folder, **files, inputs="token")


def test_folders_of_images_are_classes(folder: Path) -> None:
    needs_library()
    for split, count in (("train", 4), ("test", 2)):
        for shade, name in ((50, "dark"), (200, "light")):
            (folder / "photos" / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (6, 4), (shade, number, 0)).save(folder / "photos" / split / name / f"{number}.png")
    dataset = opened(folder, path="imagefolder", data_dir="photos")
    assert dataset.train.images.shape == (8, 3, 4, 6)
    assert dataset.train.labels.tolist() == [0] * 4 + [1] * 4
    assert dataset.class_names == ("dark", "light")
    assert np.unique(dataset.test.images[:, 0]).tolist() == [50, 200]
    assert opened(folder, path="imagefolder", data_dir="photos", size=5).size == (5, 5)


def named(path: Path, labels: list[int], names: list[str]) -> None:
    """Write a file whose labels are classes with names."""
    needs_library()
    from datasets import ClassLabel, Features, Value
    from pyarrow import parquet, table

    features = Features({"x": Value("float64"), "label": ClassLabel(names=names)})
    columns = {"x": [float(k * k) for k in range(len(labels))], "label": labels}
    parquet.write_table(table(columns, schema=features.arrow_schema), path)


def test_classes_have_the_names_and_the_order_of_the_library(folder: Path) -> None:
    files: dict[str, Any] = {"path": "parquet", "data_files": {"train": "a.parquet", "test": "b.parquet"}}
    for name in ("a", "b"):
        named(folder / f"{name}.parquet", [0, 2, 0, 2], ["zebra", "NA", "cat"])
    dataset = opened(folder, **files, inputs=["x", "x"])
    assert (dataset.class_names, dataset.train.labels.tolist()) == (("zebra", "cat"), [0, 1, 0, 1])


def test_samples_without_a_label_are_an_error(folder: Path) -> None:
    files: dict[str, Any] = {"path": "parquet", "data_files": {"train": "a.parquet", "test": "b.parquet"}}
    named(folder / "a.parquet", [0, 1], ["zebra", "cat"])
    named(folder / "b.parquet", [-1, -1], ["zebra", "cat"])
    with pytest.raises(DataError, match="split 'test': column 'label' has -1, which means that samples"):
        opened(folder, **files, inputs=["x", "x"])


@pytest.mark.parametrize("mode", [None, "RGB", "L"])
def test_images_in_tables_are_read_as_files_are(folder: Path, mode: str | None) -> None:
    needs_library()
    from datasets import Dataset as Table
    from datasets import Features, Value
    from datasets import Image as Images

    def write(*images: bytes) -> None:
        rows = {"image": [{"bytes": image, "path": f"{row}.png"} for row, image in enumerate(images)]}
        features = Features({"image": Images(mode=mode), "label": Value("int64")})
        Table.from_dict({**rows, "label": [0, 1] * 2}, features=features).to_parquet(folder / "a.parquet")

    def png(image: Image.Image, **options: Any) -> bytes:
        file = io.BytesIO()
        image.save(file, "PNG", **options)
        return file.getvalue()

    source = {"path": "parquet", "data_files": {"train": "a.parquet"}, "test": 0.5}
    exif = Image.Exif()
    exif[0x112] = 6
    write(*[png(Image.new("L", (6, 4), 10), exif=exif)] * 4)
    assert opened(folder, **source).train.images.shape == (2, 3 if mode == "RGB" else 1, 6, 4)
    if mode != "L":  # to which the library converts them
        write(*(png(Image.fromarray(np.full((4, 4), 1000 * row, np.uint16))) for row in range(1, 5)))
        assert opened(folder, **source).pool.take(np.arange(4))[0][:, 0, 0, 0].tolist() == [62, 125, 187, 249]
        write(*[png(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))] * 4)
        assert opened(folder, **source).train.images.min() == 255
        write(*[png(Image.new("L", (4, 4)))] * 3, b"")
        with pytest.raises(
            DataError, match=r"huggingface parquet: image: row 3 \(3\.png\): not an image, or damaged"
        ):
            opened(folder, **source)


def test_folders_of_images_that_the_library_would_misread_are_errors(folder: Path) -> None:
    needs_library()
    for name in ("a", "b", "@eaDir"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (4, 4)).save(folder / "photos" / name / f"{number}.png")
    source = {"path": "imagefolder", "data_dir": "photos", "test": 0.5}
    with pytest.raises(DataError, match=f"^{folder}/photos/@eaDir would be taken for a class; remove it, or use the"):
        opened(folder, **source)
    (folder / "photos" / "@eaDir").rename(folder / "elsewhere")
    (folder / "photos" / "c").symlink_to(folder / "elsewhere")
    with pytest.raises(
        DataError, match=f"^{folder}/photos/c is a link, which is not followed; remove it, or use the"
    ):
        opened(folder, **source)
    (folder / "photos" / "c").unlink()
    (folder / "photos" / "a" / "x.npy").touch()
    assert opened(folder, **source).notes == (
        f"{folder}/photos: not read: .npy in a (1); convert images among them to PNG or JPEG",
    )
    for number in range(2):
        (folder / "photos" / "a" / f"{number}.png").unlink()
    with pytest.raises(DataError, match=f"^{folder}/photos/a: no images of class a, only files that are not read"):
        opened(folder, **source)


def test_errors_of_the_library_name_the_dataset(folder: Path) -> None:
    needs_library()
    (folder / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(DataError, match="huggingface parquet: "):
        opened(folder, path="parquet", data_files={"train": "a.parquet"}, test=0.5)


def test_missing_local_file_is_an_error(folder: Path) -> None:
    with pytest.raises(DataError, match=r"huggingface: missing a\.parquet; looked in"):
        opened(folder, path="parquet", data_files={"train": "a.parquet"})


def test_dataset_of_the_hub_lies_below_the_root(folder: Path) -> None:
    loader = DATASETS["huggingface"].parse({"path": "someone/letters", "config": "small"})
    assert loader.files(folder) == (folder / "huggingface" / "someone--letters--small",)
    with pytest.raises(DataError, match=r"missing someone--letters--small; .*data\.download: true"):
        opened(folder, path="someone/letters", config="small")


def test_without_the_library_the_error_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (folder / "a.parquet").write_bytes(b"")
    with pytest.raises(MissingExtra, match=r"needs datasets, .*p2pfl-mesh\[huggingface\]"):
        opened(folder, path="parquet", data_files={"train": "a.parquet"})
