"""What is read of image files: as a viewer shows them, or an error that names the file."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, features

from p2pfl.data.loaders.image_decoding import pixels, read_image, to_8_bits
from p2pfl.data.loaders.image_files import load_images
from p2pfl.errors import DataError

FROM_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
"""How a photograph is stored whose orientation tag is the key."""


def quarters() -> Image.Image:
    """Four colors in the corners, 24 wide and 16 high: no two orientations are alike."""
    array = np.zeros((16, 24, 3), np.uint8)
    array[:8, :12, 0], array[:8, 12:, 1], array[8:, :12, 2], array[8:, 12:] = 255, 255, 255, 255
    return Image.fromarray(array)


def oriented(path: Path, image: Image.Image, tag: int, **options: Any) -> Path:
    exif = Image.Exif()
    exif[0x112] = tag
    image.transpose(FROM_UPRIGHT[tag]).save(path, exif=exif, **options)
    return path


def of_bits(path: Path, top: int, dtype: type = np.uint16) -> Path:
    """A gray ramp from 0 to ``top``, 64 wide."""
    Image.fromarray(np.tile(np.linspace(0, top, 64), (4, 1)).astype(dtype)).save(path)
    return path


# --- orientation ---


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", *(["webp"] if features.check("webp") else [])])
@pytest.mark.parametrize("tag", sorted(FROM_UPRIGHT))
def test_photographs_are_turned_upright(tmp_path: Path, suffix: str, tag: int) -> None:
    path = oriented(tmp_path / f"photo.{suffix}", quarters(), tag)
    expected = np.asarray(quarters()).transpose(2, 0, 1).astype(int)
    for read in (read_image(path, None), pixels(Image.open(path).convert("RGB"), None)):  # as torchvision gives it
        assert read.shape == (3, 16, 24)
        assert np.abs(read - expected).mean() < 20
    small = load_images([(path, 0)], 8)[0]
    assert (small[:, 1, 1].argmax(), small[:, 1, 6].argmax(), small[:, 6, 1].argmax()) == (0, 1, 2)
    assert small[:, 6, 6].min() > 200


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_images_of_16_bits_are_turned_too(tmp_path: Path, suffix: str) -> None:
    values = np.arange(6, dtype=np.uint16).reshape(2, 3) * 10_000
    for tag in FROM_UPRIGHT:
        path = oriented(tmp_path / f"{tag}.{suffix}", Image.fromarray(values), tag)
        np.testing.assert_array_equal(read_image(path, None), values[np.newaxis])


def test_damaged_tags_are_ignored(tmp_path: Path) -> None:
    for number, exif in enumerate((b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*")):
        path = tmp_path / f"{number}.jpg"
        quarters().save(path, exif=exif)
        assert read_image(path, None).shape == (3, 16, 24)


# --- more than 8 bits ---


@pytest.mark.parametrize(("top", "bits"), [(65535, 16), (4095, 12), (1023, 10), (40_000, 16), (255, 8), (3, 8)])
def test_gray_values_are_scaled_by_their_bits(tmp_path: Path, top: int, bits: int) -> None:
    ramp = load_images([(of_bits(tmp_path / "ramp.png", top), 0)], 64)[0, 0, 0].astype(int)
    assert abs(ramp.max() - round(255 * top / (2**bits - 1))) <= 1
    assert len(np.unique(ramp)) == min(64, top + 1)
    assert (np.diff(ramp) >= 0).all()


def test_all_images_of_a_dataset_have_the_same_scale(tmp_path: Path) -> None:
    paths = [of_bits(tmp_path / f"{top}.png", top) for top in (4095, 400)]
    bright, dark = load_images([(path, 0) for path in paths], 64)
    assert bright.max() >= 254
    assert 23 <= dark.max() <= 25
    gray = to_8_bits([read_image(path, None) for path in paths])
    assert [image.max() for image in gray] == [255, 25]


def test_images_of_8_bits_keep_their_values_beside_others(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 7).save(tmp_path / "gray.png")
    deep = of_bits(tmp_path / "deep.tif", 4095)
    assert load_images([(tmp_path / "gray.png", 0), (deep, 0)], 4)[0].max() == 7


def test_integers_of_32_bits_and_fractions_are_scaled(tmp_path: Path) -> None:
    for path in (of_bits(tmp_path / "i.tif", 2**17 - 1, np.int32), of_bits(tmp_path / "f.tif", 1, np.float32)):
        [ramp] = to_8_bits([read_image(path, None)])
        assert (ramp.shape, ramp.dtype) == ((1, 4, 64), np.dtype(np.uint8))
        assert (ramp.min(), ramp.max()) == (0, 255)
        assert len(np.unique(ramp)) == 64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.array([[0, 2.5]], np.float32),
            r"floating-point values from 0 to 2\.5, but only those in \[0, 1\] are read",
        ),
        (np.array([[0, np.nan]], np.float32), "floating-point values from nan"),
        (np.array([[-1000, 3000]], np.int32), "integers from -1000 to 3000, but brightness is not negative; convert"),
    ],
)
def test_values_without_a_scale_are_errors(tmp_path: Path, values: npt.NDArray[Any], message: str) -> None:
    path = tmp_path / "values.tif"
    Image.fromarray(values).save(path)
    with pytest.raises(DataError, match=f"^{path}: has {message}"):
        read_image(path, 8)


def colors_of_16_bits(top: int) -> bytes:
    """A PNG of 8x8 pixels, which Pillow cannot write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = np.linspace(0, top, 8 * 8 * 3).reshape(8, -1).astype(">u2")
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_colors_of_16_bits_are_read_unless_their_upper_bits_are_unused() -> None:
    assert read_image(io.BytesIO(colors_of_16_bits(65535)), None, where="x").max() == 255
    with pytest.raises(DataError, match=r"^x: has 16-bit colors, of .* at most 15; convert all"):
        read_image(io.BytesIO(colors_of_16_bits(4095)), None, where="x")


# --- colors and transparency ---


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_transparent_pixels_become_white(mode: str) -> None:
    image = Image.new("RGBA", (2, 1), (9, 9, 9, 255))
    image.putpixel((1, 0), (9, 9, 9, 0))
    if mode == "PA":
        image = Image.new("PA", (2, 1), (0, 255))
        image.putpixel((1, 0), (0, 0))
        image.putpalette([9, 9, 9])
    elif mode in ("LA", "La"):
        image = image.convert("LA")
    image = image.convert(mode)
    read = pixels(image, None)
    assert read.shape == ((1 if mode in ("LA", "La") else 3), 1, 2)
    assert (read == [[9, 255]]).all()


@pytest.mark.parametrize(("mode", "color"), [("L", 7), ("RGB", (1, 2, 3)), ("P", 0), ("1", 0)])
def test_color_that_stands_for_transparency_becomes_white(tmp_path: Path, mode: str, color: Any) -> None:
    Image.new(mode, (4, 4), color).save(tmp_path / "a.png", transparency=color)
    assert (read_image(tmp_path / "a.png", None) == 255).all()
    Image.fromarray(np.full((4, 4), 7, np.uint16)).save(tmp_path / "deep.png", transparency=7)
    with pytest.raises(DataError, match=r"deep\.png: has 16-bit gray with a transparent value; save it without"):
        read_image(tmp_path / "deep.png", None)


def test_half_transparent_pixels_are_mixed_with_white(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (0, 100, 255, 128)).save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png", None)[:, 0, 0].tolist() == [127, 177, 255]


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "HSV", "P", "RGBX"])
def test_other_colors_become_rgb(mode: str) -> None:
    expected = np.asarray(quarters()).transpose(2, 0, 1).astype(int)
    assert np.abs(pixels(quarters().convert(mode), None) - expected).max() <= 3


def test_black_and_white_become_gray() -> None:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert pixels(image, None).tolist() == [[[0, 255]]]
    assert pixels(image, None, rgb=True).shape == (3, 1, 2)


# --- files that are no single image ---


@pytest.mark.parametrize("suffix", ["gif", "png", "tif"])
def test_several_frames_are_an_error(tmp_path: Path, suffix: str) -> None:
    first, *others = (Image.new("RGB", (4, 4), (50 * n, 0, 0)) for n in range(3))
    path = tmp_path / f"film.{suffix}"
    first.save(path, save_all=True, append_images=others)
    with pytest.raises(
        DataError, match=f"^{path}: has 3 frames or pages, but a sample is one image; save the one to"
    ):
        read_image(path, 8)


def test_of_a_photograph_with_further_pictures_the_first_is_read(tmp_path: Path) -> None:
    first, second = Image.new("RGB", (4, 4), (200, 0, 0)), Image.new("RGB", (4, 4))
    first.save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=[second])
    assert read_image(tmp_path / "phone.jpg", None)[0].min() > 190


def test_the_content_tells_the_type(tmp_path: Path) -> None:
    quarters().save(tmp_path / "lie.jpg", "PNG")
    np.testing.assert_array_equal(read_image(tmp_path / "lie.jpg", None)[0], np.asarray(quarters())[..., 0])


def test_damaged_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    whole = io.BytesIO()
    quarters().save(whole, "PNG")
    for name, content, reason in (
        ("empty.png", b"", "it is empty"),
        ("page.jpg", b"<html>", "its content is of no type that Pillow reads"),
        ("short.png", whole.getvalue()[:70], "image file is truncated"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_images([(tmp_path / name, 0)], 8)
        assert str(caught.value) == f"{tmp_path / name}: not an image, or damaged: {reason}; replace or remove it"
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DataError, match=r"folder.png: cannot be read: Is a directory; mend or remove it"):
        read_image(tmp_path / "folder.png", 8)


def test_names_of_any_bytes_are_printable_in_errors(tmp_path: Path) -> None:
    path = tmp_path / b"caf\xe9.png".decode(errors="surrogateescape")
    path.touch()
    with pytest.raises(DataError, match=r"caf\\udce9\.png: not an image") as caught:
        read_image(path, 8)
    assert str(caught.value).encode()


def test_too_large_images_are_one_line_and_large_ones_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "large.png"
    Image.new("1", (50, 30)).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_image(path, 4).shape == (3, 4, 4)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    with pytest.raises(
        DataError, match=f"^{path}: has more than the 1,400 pixels that are read; save it in a smaller"
    ):
        load_images([(path, 0)], 4)


def test_images_that_do_not_fit_into_memory_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quarters().save(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"1000 images of size 9000000 do not fit into memory; lower size"):
        load_images([(tmp_path / "a.png", 0)] * 1000, 9_000_000)

    def exhausted(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "resize", exhausted)
    with pytest.raises(
        DataError, match=r"a\.png: too large for the memory of this machine; save it in a smaller size"
    ):
        read_image(tmp_path / "a.png", 8)
