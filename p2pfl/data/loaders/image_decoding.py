"""The one reader of image files, for all datasets: what users see in a viewer becomes uint8, or an error.

Images are turned as their orientation tag says. Transparent ones are laid on white. Integers of more than 8 bits stay
as they are, as float32, until ``to_8_bits`` scales all images of a dataset by the same factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from p2pfl.data.loaders.base import Images
from p2pfl.errors import DataError
from p2pfl.terminal import printable

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[Any]
"""An image [C, H, W]: uint8, or float32 with integers of more than 8 bits."""

_ORIENTATION = 0x0112
_SEVERAL_PICTURES = ("MPO",)
"""Formats whose first picture is the photograph, and whose others are for displays of another kind."""


def read_image(source: Path | str | BinaryIO, size: int | None, *, rgb: bool = False, where: str = "") -> Pixels:
    """Read an image file.

    Args:
        source: a path, or a file that is open.
        size, rgb: as of ``pixels``.
        where: what errors name; by default the path.

    Raises:
        DataError: the file is missing, damaged, too large, or of a kind that is not read.
    """
    from PIL import Image

    where = where or printable(str(source))
    try:
        with warnings.catch_warnings(), ExitStack() as files:
            warnings.simplefilter("ignore")  # about damaged metadata, and more pixels than a screen has
            # Not by its path: Pillow would map some TIFF files, and turn these wrongly.
            file = files.enter_context(open(source, "rb")) if isinstance(source, Path | str) else source
            return pixels(files.enter_context(Image.open(file)), size, rgb=rgb)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except FileNotFoundError as error:
        raise DataError(f"{where}: missing, but listed by the dataset; fetch the dataset again") from error
    except MemoryError as error:
        raise DataError(f"{where}: too large for the memory of this machine; save it in a smaller size") from error
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise DataError(
            f"{where}: has more than the {most:,} pixels that are read; save it in a smaller size"
        ) from error
    except Exception as error:  # the decoders of Pillow raise whatever a damaged file leads to
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{where}: cannot be read: {error.strerror}; mend or remove it") from error
        raise DataError(
            f"{where}: not an image, or damaged: {_reason(source, error)}; replace or remove it"
        ) from error


def _reason(source: Path | str | BinaryIO, error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(source, Path | str) and Path(source).stat().st_size == 0:
        return "it is empty"
    if isinstance(error, UnidentifiedImageError):
        return "its content is of no type that Pillow reads"
    return " ".join(str(error).split()) or type(error).__name__


def pixels(image: Image, size: int | None, *, rgb: bool = False) -> Pixels:
    """Convert a PIL image to an array, upright and without transparency.

    Args:
        size: resize it to a square of this height and width, and convert it to RGB; None keeps size, and gray images.
        rgb: convert it to RGB in any case.

    Returns:
        [1 or 3, H, W]: uint8, or float32 with integers of more than 8 bits.

    Raises:
        DataError: it is of a kind that is not read; the message does not name it.
    """
    from PIL import Image as images

    if getattr(image, "is_animated", False) and image.format not in _SEVERAL_PICTURES:
        frames = getattr(image, "n_frames", "several")
        raise DataError(f"has {frames} frames or pages, but a sample is one image; save the one to use in a file")
    fine = _sixteen_bit_colors(image)
    image.load()
    if image.mode.startswith(("I", "F")):
        plain = images.fromarray(_numbers(image))
    else:
        plain = _eight_bits(image)
        if rgb or size is not None:
            plain = plain.convert("RGB")
        if fine and 0 < (top := int(np.asarray(plain).max())) < 16:
            raise DataError(
                f"has 16-bit colors, of which the upper 8 bits are read, and these are at most {top}; convert all "
                "images of the dataset to 8 bits by the same factor"
            )
    if (turn := _turn(image)) is not None:
        plain = plain.transpose(turn)
    if size is not None:
        plain = plain.resize((size, size), images.Resampling.BILINEAR)
    array = np.asarray(plain)
    if image.mode == "F":
        array = np.rint(array * 255).astype(np.uint8)
    if array.ndim == 3:
        return np.ascontiguousarray(array.transpose(2, 0, 1))
    return np.broadcast_to(array, (3 if rgb or size is not None else 1, *array.shape))


def _sixteen_bit_colors(image: Image) -> bool:
    """Whether a file that was not decoded yet has more bits than Pillow decodes."""
    return any(";16" in str(tile[3]) for tile in getattr(image, "tile", ())) and not image.mode.startswith("I")


def _numbers(image: Image) -> npt.NDArray[np.float32]:
    """The values of a gray image of more than 8 bits, [H, W]. Raises DataError if they have no scale."""
    values = np.asarray(image).astype(np.float32)
    low, high = values.min(), values.max()
    if "transparency" in image.info:
        raise DataError("has 16-bit gray with a transparent value; save it without transparency")
    if image.mode == "F" and not 0 <= low <= high <= 1:  # nor if there is a NaN
        raise DataError(
            f"has floating-point values from {low:g} to {high:g}, but only those in [0, 1] are read; convert all "
            "images of the dataset to that range by the same factor, or store the values as vectors in an .npz file"
        )
    if low < 0:
        raise DataError(
            f"has integers from {low:g} to {high:g}, but brightness is not negative; convert all images of the "
            "dataset to 8 bits by the same window"
        )
    return values


def _eight_bits(image: Image) -> Image:
    """Convert to gray or RGB; what is transparent becomes white."""
    from PIL import Image as images

    gray = image.mode in ("1", "L", "LA", "La")
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        if image.mode == "La":
            image = image.convert("LA")
        image = images.alpha_composite(images.new("RGBA", image.size, "white"), image.convert("RGBA"))
    if image.mode in ("L", "RGB"):
        return image
    try:
        return image.convert("L" if gray else "RGB")
    except ValueError as error:
        raise DataError(f"its colors are {image.mode}, which Pillow cannot convert; save it in RGB") from error


def _turn(image: Image) -> Any:
    """How to turn an image so that it is upright, by its tag in EXIF or XMP; None if it is.

    Not by ``ImageOps.exif_transpose``, which also writes the tags anew, and fails if one of them is damaged.
    """
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        return turns.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # tags that cannot be parsed say nothing about the orientation
        return None


def to_8_bits(images: Iterable[Pixels]) -> list[Images]:
    """Scale the images of a dataset: all of more than 8 bits by one factor, so that they stay comparable.

    White is 2^b − 1 with as many bits b, at least 8, as the brightest of them needs: 4095 for scanners of 12 bits.

    Args:
        images: as ``pixels`` returns them.

    Returns:
        uint8 [C, H, W] each.
    """
    images = list(images)
    top = int(max((image.max() for image in images if image.dtype != np.uint8), default=0))
    factor = 255 / (2 ** max(8, top.bit_length()) - 1)
    return [image if image.dtype == np.uint8 else np.rint(image * factor).astype(np.uint8) for image in images]
