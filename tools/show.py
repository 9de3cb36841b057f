"""`streamload show`: a contact sheet of some samples, as they are stored."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from streamload_tools.arguments import Index, StorageOption, Urls, Where, parse_storage_options
from streamload_tools.failures import UsageError, reported_errors
from streamload_tools.output import print_line

import streamload
from streamload.decode.decoders import decoder_for, is_image
from streamload.errors import DatasetIndexError, DecodeError, without_secrets
from streamload.images import unchanged
from streamload.pictures.files import check_picture_path, save_picture
from streamload.pictures.sheet import MOST_SAMPLES, draw_sheet
from streamload.text import counted

__all__ = ["show_command"]

_NAMES = ("__key__", "__url__")


def show_command(
    urls: Urls,
    *,
    output: Annotated[str, typer.Option(metavar="FILE", help="The picture (.png, .jpg, .webp), which is replaced.")],
    samples: Annotated[int, typer.Option(help="How many samples.", min=1, max=MOST_SAMPLES)] = 24,
    columns: Annotated[int | None, typer.Option(help="How many side by side. Default: 6.", min=1, max=100)] = None,
    seed: Annotated[
        int | None, typer.Option(help="Choose them at random, by this seed. Default: spread evenly.", min=0)
    ] = None,
    fields: Annotated[
        str | None, typer.Option(help="Only these fields, such as 'jpg;png,cls,txt?'. Default: all of each sample.")
    ] = None,
    where: Where = None,
    index: Index = None,
    storage_option: StorageOption = None,
) -> None:
    """Draw samples side by side, each with its key, class and other values, to a picture.

    Masks (grey or palette images of the first image's size) and boxes are drawn over the first image of their sample;
    sound (wav) as a curve; other images and arrays below; and all else is text. Boxes are rows of left, top, right,
    bottom and class, also as {"boxes": rows, "labels": ...}; or COCO's objects with "bbox".

    \b
    Examples:
      streamload show shards/train --output sheet.png
      streamload show shards/train --output cats.png --where 'label == 0' --seed 1
      streamload show s3://bucket/train --output boxes.webp --samples 8 --columns 4 --fields jpg,json
    """  # noqa: D301 - "\b" keeps the lines that follow as they are
    with reported_errors():
        check_picture_path("--output", output)
        options = parse_storage_options(storage_option)
        names = None if fields is None else tuple(fields.split(","))
        wanted = None if names is None else (*names, *_NAMES)
        with streamload.TarDataset(
            urls, fields=wanted, decode=False, index=index, storage_options=options, where=where
        ) as dataset:
            numbers = _numbers(len(dataset), samples, seed)
            if not numbers:
                raise UsageError(f"no sample meets --where {where!r}" if where else "there is no sample in the shards")
            how = "spread evenly" if seed is None else f"at random by seed {seed}"
            chosen = f"{len(numbers):,} of {counted(len(dataset), 'sample')}, {how}"
            title = chosen if len(numbers) < len(dataset) else counted(len(numbers), "sample")
            picture = draw_sheet(
                (_decoded(_by_name(dataset[number], wanted)) for number in numbers),
                f"{without_secrets(urls[0])}{' and others' if len(urls) > 1 else ''}: {title}",
                classes=_classes(dataset),
                columns=columns,
            )
        save_picture(picture, output)
        print_line(f"{output}: {counted(len(numbers), 'sample')}, {picture.width} x {picture.height} pixels")


def _numbers(count: int, wanted: int, seed: int | None) -> list[int]:
    """The numbers of the samples to show, in their order."""
    wanted = min(count, wanted)
    if seed is None:
        return [int(number) for number in np.linspace(0, count - 1, wanted)] if wanted else []
    return sorted(np.random.default_rng(seed).choice(count, wanted, replace=False).tolist())


def _classes(dataset: streamload.TarDataset) -> Sequence[str] | None:
    try:
        return dataset.classes
    except DatasetIndexError:  # the folders number their classes in different ways
        return None


def _by_name(sample: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """The bytes of a sample by the names of its fields; those that it lacks are left out."""
    if names is None:
        return dict(sample)
    found = zip((name.removesuffix("?") for name in names), sample, strict=True)
    return {name: value for name, value in found if value is not None}


def _decoded(sample: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of a sample, and its values by the names of its fields.

    Raises:
        DecodeError: a field is not what its extension promises.
    """
    fields = [name for name in sample if name not in _NAMES]
    first_image = min(filter(is_image, fields), key=lambda name: name.count("."), default=None)
    values = {}
    for name in fields:
        try:
            values[name] = _value(name, sample[name], is_first_image=name == first_image)
        except (ValueError, ImportError) as error:
            raise DecodeError(
                f"field {name!r} cannot be decoded: {error}; --fields takes those to show",
                url=sample["__url__"],
                key=sample["__key__"],
            ) from error
    return sample["__key__"], values


def _value(name: str, data: bytes, *, is_first_image: bool) -> Any:
    """A field, decoded to be looked at: masks and depth maps keep their numbers."""
    if name.rpartition(".")[2] == "wav":
        return _decode_wav(data)
    if is_image(name):
        numbers = None if is_first_image else unchanged(data)
        if numbers is not None and (numbers.ndim == 2 or numbers.dtype != np.uint8):
            return numbers
        try:
            return decoder_for(name)(memoryview(data))
        except ValueError:
            return unchanged(data)  # more than 8 bits; what is damaged fails here too
    return decoder_for(name)(memoryview(data))


def _decode_wav(data: bytes) -> NDArray[np.float32]:
    """float32[channels, frames], between -1 and 1."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, frames = file.getnchannels(), file.getsampwidth(), file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"not a WAV file of plain samples: {error or 'it is cut off'}") from error
    whole = np.frombuffer(frames[: len(frames) // (channels * width) * channels * width], np.uint8).reshape(-1, width)
    if width == 1:
        values = whole[:, 0].astype(np.float32) / np.float32(128) - 1
    else:  # little-endian, of 2 to 4 bytes: the most significant ones are the upper bytes of an int32
        padded = np.zeros((len(whole), 4), np.uint8)
        padded[:, 4 - width :] = whole
        values = padded.view("<i4")[:, 0].astype(np.float32) / np.float32(2**31)
    waves: NDArray[np.float32] = values.reshape(-1, channels).T
    return waves
