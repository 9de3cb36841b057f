"""Decoders for images whose pixels are not colours: masks, depth maps, grey pictures.

As in `decode={"mask.png": images.palette}`. Damage, sizes and formats are treated as by the default decoder of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamload.images.files import channel_bits, check_depth, read_with_pillow, to_rgb
from streamload.images.placing import opencv

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

# The largest number in the pixels of PNG with fewer than 8 bits, which Pillow scales to 255.
_LEVELS = {"L;2": 3, "L;4": 15}


def unchanged(data: bytes) -> NDArray[Any]:
    """Decode the numbers that an image file stores, unconverted: of depth maps, and of masks of all kinds.

    Returns:
        (height, width) for grey and palette images (the numbers of the colours); (height, width, channels) for all
        others: 2 of grey with alpha, 3 of RGB, 4 of RGBA or CMYK. uint8 or uint16; float32 or int32 of such a TIFF.

    Raises:
        ValueError: not a known format, damaged, cut off, too large, or of a depth that no array has.
    """
    view = memoryview(data)
    return read_with_pillow(view, lambda image: _stored_numbers(image, view))


def palette(data: bytes) -> NDArray[np.uint8]:
    """Decode the class of each pixel from a mask with a palette, or a grey one.

    Returns:
        uint8 (height, width): the number of the colour in the palette; of a grey image the grey as stored.

    Raises:
        ValueError: the image has several numbers for each pixel, or wider ones; or as for `unchanged`.
    """
    numbers = unchanged(data)
    if numbers.ndim != 2 or numbers.dtype != np.uint8:
        raise ValueError(
            f"the image has no palette: its pixels are {numbers.dtype} of shape {numbers.shape}; a decoder that takes "
            "them as they are is images.unchanged"
        )
    return numbers


def grey(data: bytes) -> NDArray[np.uint8]:
    """Decode the lightness of each pixel, as Pillow's `convert("L")` computes it from colours.

    Returns:
        uint8 (height, width).

    Raises:
        ValueError: not a known format, damaged, cut off, too large, or with more than 8 bits a channel.
    """

    def read(image: ImageFile) -> NDArray[np.uint8]:
        check_depth(image)
        image.load()
        return np.array(image if image.mode == "L" else to_rgb(image).convert("L"))

    return read_with_pillow(memoryview(data), read)


def _stored_numbers(image: ImageFile, data: memoryview) -> NDArray[Any]:
    bits = channel_bits(image)
    if 8 < bits < 32:
        # Pillow would halve 16 bits of several channels, or scale them.
        is_grey_with_alpha = any("LA;16" in str(tile.args) for tile in image.tile)
        cv2, pixels = opencv(), None
        if bits == 16:
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        if pixels is None or pixels.dtype != np.uint16 or pixels.shape[:2] != (image.height, image.width):
            raise ValueError(
                f"the {image.format} image of {bits} bits a channel is damaged, cut off or of an unusual kind; write "
                "the sample again, or store its values as npy"
            )
        if pixels.ndim == 2:
            return pixels  # type: ignore[no-any-return]
        order = [0, 3] if is_grey_with_alpha else [2, 1, 0, *range(3, pixels.shape[2])]  # from blue, green, red
        return np.ascontiguousarray(pixels[:, :, order])
    arguments = [tile.args for tile in image.tile]
    if image.format == "PPM":
        most = next((int(each[-1]) for each in arguments if isinstance(each, tuple)), 255)
    else:
        most = next((_LEVELS[str(each)] for each in arguments if str(each) in _LEVELS), 255)
    image.load()
    numbers: NDArray[Any] = np.array(image)
    if numbers.dtype == np.bool_:
        return numbers.astype(np.uint8)
    return numbers if most == 255 else np.rint(numbers * (most / 255)).astype(np.uint8)
