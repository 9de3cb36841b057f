"""Refuses what a listing shows to be impossible, before a feeder starts, and warns of what has no effect."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from streamload.arguments import alternatives
from streamload.decode.decoders import DECODED_EXTENSIONS, applies_to
from streamload.fetch.budget import check_window
from streamload.fetch.fetched_listing import fetched_shards, is_all_local
from streamload.fetch.parts import PART_BYTES
from streamload.images.decoders import palette, unchanged
from streamload.images.joint import draws_geometry
from streamload.index.listing import Listing
from streamload.options import Options
from streamload.order.options import OrderOptions
from streamload.order.sampling import Stretched
from streamload.order.share import least_lanes_of_rank
from streamload.sampling.mixture import Portion
from streamload.tar.decompression import compression_of
from streamload.tar.scan import LABEL_FIELD
from streamload.text import listed
from streamload.warn_at_caller import warn_at_caller

# Parts of a field's name that say that it belongs to the picture of another one.
_MASKS = {"mask", "masks", "seg", "segm", "segmentation", "semantic", "instance", "panoptic", "depth", "disparity"}


@contextmanager
def naming_dataset(name: str) -> Iterator[None]:
    """Name a dataset of a mixture in a TypeError or ValueError of the block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"dataset {name!r}: {error}") from None


def check_fields(portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> None:
    """Refuse fields that a dataset does not have; without an index, the first batch shows.

    Raises:
        TypeError, ValueError: names the dataset and the field.
    """
    for (name, portion), listing in zip(portions.items(), listings, strict=True):
        with naming_dataset(name):
            own = portion.transform
            wanted = options if own is None else replace(options, transform=own)
            if listing.counts is not None:
                wanted.check_fields_exist(listing.fields)


def labelled_folders(
    portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options
) -> list[tuple[str, ...]]:
    """Return the folders whose labels are read as the same classes: groups of at least two, mostly one or none.

    A dataset with a transform of its own is a group of its own, since it may give its labels another meaning.
    """
    groups: dict[str, list[str]] = {}
    for (name, portion), listing in zip(portions.items(), listings, strict=True):
        if options.field_names is not None:
            labelled = any(LABEL_FIELD in entry.split(";") for entry in options.field_names)
        else:
            labelled = listing.counts is None or LABEL_FIELD in listing.fields
        if labelled:
            group = "" if portion.transform is None else f"of {name}"
            groups.setdefault(group, []).extend(shard.folder for shard in listing.shards)
    distinct = [tuple(dict.fromkeys(folders)) for folders in groups.values()]
    return [folders for folders in distinct if len(folders) > 1]


def check_window_fits(listing: Listing, order: OrderOptions, options: Options, world_size: int) -> None:
    """Refuse a shuffle window that needs more memory than the budget allows, if that is known.

    It is not if sizes are missing, if samples are larger than a part (of which only some fields may be fetched), if
    only some samples take part, or if sidecars are joined.

    Raises:
        ValueError: says how much is needed, and the ways out.
    """
    fetched = fetched_shards(listing, options.storages)
    if not (order.shuffle and fetched) or options.cache_dir is not None or listing.sidecars or listing.counts is None:
        return
    if isinstance(order.sampling, Stretched) and order.sampling.selected is not None:
        return
    sizes, samples = [shard.bytes for shard in listing.shards], sum(listing.counts)
    is_compressed = any(compression_of(listing.shards[shard].url) for shard in fetched)
    if min(sizes) < 0 or is_compressed or sum(sizes) > samples * PART_BYTES:
        return
    fetching = options.fetching(listing.fields)
    check_window(
        fetching.budget_bytes,
        expands=fetching.expands,
        window=order.window,
        samples=samples,
        data_bytes=sum(sizes),
        lanes=order.lanes,
        lanes_read=least_lanes_of_rank(order.lanes, world_size, order.batch_size),
        shards=len(sizes),
    )


def warn_of_no_effect(options: Options, listings: Sequence[Listing]) -> None:
    """Warn, at the line of the user's program, of arguments that other arguments or local shards make meaningless."""
    storages = options.storages
    if options.cache_dir is not None and not any(fetched_shards(listing, storages) for listing in listings):
        warn_at_caller(
            f"cache_dir={options.cache_dir!r} has no effect: all shards are local files, read where they lie"
        )
    folders = {folder for listing in listings for folder in listing.folders}
    if options.storage_options and is_all_local([f"{folder}/" for folder in folders], storages):
        warn_at_caller("storage_options= has no effect: all shards are local files")
    known = all(listing.counts is not None for listing in listings)
    warn_of_unused_decoders(options, [name for listing in listings for name in listing.fields] if known else [])


def warn_of_unused_decoders(options: Options, existing: Sequence[str]) -> None:
    """Warn of decoders for fields that are neither read nor requested, as a misspelt extension's.

    One mapping may serve several datasets, so decoders for extensions that have a meaning elsewhere are not mentioned,
    unless none of the mapping is used. `existing` are the fields of the shards, if known; else the requested ones
    count.
    """
    if isinstance(options.decode, bool):
        return
    requested = [name for entry in options.field_names or () for name in entry.split(";")]
    read = [name for name in dict.fromkeys(existing) if name in requested or options.field_names is None] or requested
    given = [name for key in options.decode for name in alternatives(key)]
    unused = [name for name in given if not any(applies_to(name, field) for field in (*read, *requested))]
    if not read or not unused:
        return
    for name in unused if len(unused) == len(given) else (name for name in unused if name not in DECODED_EXTENSIONS):
        alike = difflib.get_close_matches(name, read, 1)
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        warn_at_caller(f"decode has a function for {name!r}, which no field is read by: they are {listed(read)}{hint}")


def warn_of_separate_crops(options: Options) -> None:
    """Warn of an image and a mask that are cropped or flipped at random by separate functions.

    Its decoder or its field's name says what is a mask; two pictures, as of a pair, may be meant to be cropped so.
    """
    if not isinstance(options.transform, Mapping):
        return
    drawn = [name for name, function in options.transform.items() if draws_geometry(function)]
    masks = [name for name in drawn if any(_is_mask(field, options.decode) for field in alternatives(name))]
    if masks and len(drawn) > 1:
        other = next(name for name in drawn if name != masks[0])
        warn_at_caller(
            f"transform crops or flips {other!r} and {masks[0]!r} at random, each in a way of its own, so they do not "
            "fit each other any more; streamload.images.Joint, as a transform of the whole sample, draws once for both"
        )


def _is_mask(field: str, decode: bool | Mapping[str, Callable[[bytes], object]]) -> bool:
    if isinstance(decode, Mapping) and any(
        applies_to(k, field) and f in (palette, unchanged) for k, f in decode.items()
    ):
        return True
    return not _MASKS.isdisjoint(re.split("[._-]", field.lower()))
