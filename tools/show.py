"""`streamload show`: a contact sheet of some samples, as they are stored."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np
import typer
from numpy.typing import NDArray
from streamload_tools.arguments import Index, Json, Ray, StorageOption, Urls, Where, parse_storage_options
from streamload_tools.failures import UsageError, reported_errors
from streamload_tools.output import print_document, print_line
from streamload_tools.ray_pool import ON_A_NODE, open_pool

import streamload
from streamload.decode.decoders import decoder_for, is_image
from streamload.errors import DatasetIndexError, DecodeError, without_secrets
from streamload.images import unchanged
from streamload.index.listing import list_shards
from streamload.pictures.files import check_picture_path, save_picture
from streamload.pictures.sheet import MOST_SAMPLES, draw_sheet
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of
from streamload.text import counted

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["show_command"]

_NAMES = ("__key__", "__url__")
_NOTHING = "there is no sample in the shards"
_READ_AT_ONCE = 16


def show_command(
    urls: Urls,
    *,
    output: Annotated[str, typer.Option(metavar="FILE", help="The picture (.png, .jpg, .webp), which is replaced.")],
    samples: Annotated[int, typer.Option(metavar="N", help="How many samples.", min=1, max=MOST_SAMPLES)] = 24,
    columns: Annotated[
        int | None, typer.Option(metavar="N", help="How many side by side. Default: 6.", min=1, max=100)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="Choose them at random, by this seed. Default: spread evenly.", min=0),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="FIELDS", help="Only these fields, such as 'jpg;png,cls,txt?'. Default: all of each sample."
        ),
    ] = None,
    as_document: Json = False,
    where: Where = None,
    index: Index = None,
    ray: Ray = None,
    storage_option: StorageOption = None,
) -> None:
    """Draw samples side by side, each with its key, class and other values, to a picture.

    Of compressed shards, and of remote ones without an index, they are the first ones.

    Masks (grey or palette images of the first image's size) and boxes are drawn over the first image of their sample;
    sound (wav) as a curve; other images and arrays below; and all else is text. Boxes are rows of left, top, right,
    bottom and class, also as {"boxes": rows, "labels": ...}; or COCO's objects with "bbox".

    Examples:
      streamload show shards/train --output sheet.png
      streamload show shards/train --output cats.png --where 'label == 0' --seed 1
      streamload show s3://bucket/train --output boxes.webp --samples 8 --columns 4 --fields jpg,json
    """
    with reported_errors(), open_pool(ray, None) as pool:
        check_picture_path("--output", output)
        options = {"index": index, "storage_options": parse_storage_options(storage_option), "where": where}
        names = None if fields is None else (*fields.split(","), *_NAMES)
        drawing = partial(_draw, urls, samples, seed, names=names, columns=columns, options=options)
        (drawn,) = [drawing()] if pool is None else pool.results([drawing])
        sheet, number, what = drawn
        save_picture(sheet, output)
        if as_document:
            size = {"width": sheet.width, "height": sheet.height}
            print_document({"picture": output, "samples": number, "which": what, **size})
        else:
            print_line(f"{output}: {what}, {sheet.width} x {sheet.height} pixels")


def _draw(
    urls: Sequence[str],
    samples: int,
    seed: int | None,
    _: Callable[[int, int], None] = lambda *_: None,
    *,
    names: Sequence[str] | None,
    columns: int | None,
    options: Mapping[str, Any],
) -> tuple[Image, int, str]:
    """The picture, how many samples are in it, and which these are."""
    reads = _read_by_number if _has_numbers(urls, options) else _read_first
    with reads(urls, samples, seed, {"fields": names, "decode": False, **options}) as (reader, found, number, what):
        sheet = draw_sheet(
            (_decoded(_by_name(sample, names)) for sample in found),
            f"{without_secrets(urls[0])}{' and others' if len(urls) > 1 else ''}: {what}",
            classes=_classes(reader),
            columns=columns,
        )
    return sheet, number, what


_Chosen: TypeAlias = "tuple[streamload.TarDataset | streamload.StreamLoader, Iterator[Any], int, str]"
"""Who reads; the samples, and how many they are; and which, in words."""


def _has_numbers(urls: Sequence[str], options: Mapping[str, Any]) -> bool:
    """Whether samples can be read by number: not in compressed shards, nor in remote ones without an index."""
    storages = Storages(options["storage_options"])
    listing = list_shards(list(urls), options["index"], storages)
    return not any(
        compression_of(shard.url) is not None or (folder is None and not storages.is_local(shard.url))
        for shard, folder in zip(listing.shards, listing.index_of, strict=True)
    )


@contextmanager
def _read_by_number(
    urls: Sequence[str], wanted: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[_Chosen]:
    """Samples from all over the dataset."""
    with streamload.TarDataset(list(urls), **options) as dataset:
        count = len(dataset)
        if not count:
            raise UsageError(_NOTHING)
        numbers = [int(number) for number in np.linspace(0, count - 1, min(count, wanted))]
        if seed is not None:
            numbers = sorted(np.random.default_rng(seed).choice(count, len(numbers), replace=False).tolist())
        groups = (numbers[start : start + _READ_AT_ONCE] for start in range(0, len(numbers), _READ_AT_ONCE))
        how = "spread evenly" if seed is None else f"at random by seed {seed}"
        what = f"{len(numbers):,} of {counted(count, 'sample')}, {how}"
        found = chain.from_iterable(map(dataset.__getitems__, groups))
        yield dataset, found, len(numbers), what if len(numbers) < count else counted(count, "sample")


@contextmanager
def _read_first(urls: Sequence[str], wanted: int, seed: int | None, options: Mapping[str, Any]) -> Iterator[_Chosen]:
    """The first samples of the dataset, or of its order when it is shuffled."""
    order: dict[str, Any] = {"shuffle": seed is not None, "seed": seed or 0}
    with streamload.StreamLoader(
        list(urls), wanted, collate_fn=list, prefetch_batches=1, **ON_A_NODE, **order, **options
    ) as loader:
        batch = next(iter(loader), None)
        if not batch:
            raise UsageError(_NOTHING)
        drawn = counted(len(batch), "sample")
        what = f"the first {drawn}" if seed is None else f"{drawn} at random by seed {seed}"
        yield loader, iter(batch), len(batch), what


def _classes(reader: streamload.TarDataset | streamload.StreamLoader) -> Sequence[str] | None:
    try:
        return reader.classes
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
