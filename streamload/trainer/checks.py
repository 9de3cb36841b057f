"""What a listing shows to be impossible, refused before a feeder is told to do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from streamload.decode.decoders import is_array, is_image
from streamload.errors import StorageError
from streamload.fetch.budget import check_budget
from streamload.fetch.fetched_listing import fetched_shards
from streamload.fetch.parts import PART_BYTES
from streamload.index.listing import Listing
from streamload.options import Options
from streamload.order.options import OrderOptions
from streamload.sampling.mixture import Portion
from streamload.tar.decompression import compression_of
from streamload.tar.extensions import INTEGER
from streamload.tar.scan import LABEL_FIELD

__all__ = ["check_classes", "check_fields", "check_window_fits", "labelled_folders"]


def check_fields(portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> None:
    """Refuse fields that a dataset does not have; where there is no index, the first batch tells.

    Args:
        portions: the datasets, by name; the name is empty where there is only one.
        listings: of each of them.
        options: what is wanted of them.

    Raises:
        TypeError, ValueError: names the dataset and the field.
    """
    for (name, portion), listing in zip(portions.items(), listings, strict=True):
        try:
            own = portion.transform
            wanted = options if own is None else replace(options, transform=own)
            if listing.counts is not None:
                wanted.check_fields_exist(listing.fields)
        except (TypeError, ValueError) as error:
            if not name:
                raise
            raise type(error)(f"dataset {name!r}: {error}") from error


def check_classes(read_names: Callable[[], object]) -> None:
    """Refuse folders whose classes differ, by reading their names; a file that may not be read is not there.

    Raises:
        DatasetIndexError: they differ, or a `classes.json` is damaged.
        StorageError: the storage cannot be reached.
    """
    try:
        read_names()
    except StorageError as exc:
        if type(exc) is not StorageError:
            raise  # else whoever may read objects but not list them is refused what is not there, too


def labelled_folders(
    portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options
) -> list[tuple[str, ...]]:
    """The folders of shards whose labels are read as the same classes: groups of at least two, mostly one or none.

    A dataset with a transform of its own is a group of its own, since it may give its labels another meaning.

    Args:
        portions: the datasets, by name.
        listings: of each of them.
        options: what is wanted of them.
    """
    groups: dict[str, list[str]] = {}
    for (name, portion), listing in zip(portions.items(), listings, strict=True):
        if options.fields is not None:
            labelled = any(LABEL_FIELD in entry.split(";") for entry in options.fields)
        else:
            labelled = listing.counts is None or LABEL_FIELD in listing.fields
        if labelled:
            group = "" if portion.transform is None else f"of {name}"
            groups.setdefault(group, []).extend(shard.folder for shard in listing.shards)
    distinct = [tuple(dict.fromkeys(folders)) for folders in groups.values()]
    return [folders for folders in distinct if len(folders) > 1]


def check_window_fits(listing: Listing, order: OrderOptions, options: Options, world_size: int) -> None:
    """Refuse a shuffle window or a batch that needs more memory at once than the budget allows, where that is known.

    It is not where sizes are missing, and where only some fields of samples larger than a part are read.

    Raises:
        ValueError: says how much is needed, and the ways out.
    """
    fetched = fetched_shards(listing, options.storages)
    if not fetched or listing.counts is None or options.cache_dir is not None:
        return
    sizes = [shard.bytes for shard in listing.shards]
    if min(sizes) < 0 or any(compression_of(listing.shards[shard].url) for shard in fetched):
        return
    samples = sum(listing.counts)
    reads_all = set(listing.fields).issubset(_surely_read(listing, options))
    if sum(sizes) > samples * PART_BYTES and not reads_all:
        return  # what lies in other parts of a sample is not fetched
    check_budget(
        options.fetching().budget_bytes,
        window=order.window if order.shuffle else 0,
        batch_size=order.batch_size if reads_all and order.choice is None else 1,  # a choice may repeat samples
        drop_last=order.drop_last,
        samples=samples,
        data_bytes=sum(sizes),
        lanes=order.lanes,
        lanes_read=order.lanes // world_size if order.lanes % world_size == 0 else order.lanes,
        shards=len(sizes),
        ranks=world_size,
        batch_copies=_batch_copies(listing, options) if reads_all and order.choice is None else 0,
    )


def _batch_copies(listing: Listing, options: Options) -> int:
    """How often the bytes of its samples exist, at the least, in what is made for one batch.

    Functions of the user's may make anything of them. Arrays and images lie in the batch's memory; other values are
    Python objects too, in the worker that makes the batch, and then in the trainer.
    """
    if options.transform is not None or options.collate_fn is not None or not isinstance(options.decode, bool):
        return 0
    fields = set(listing.fields) - INTEGER
    return 1 if options.decode and any(is_array(field) or is_image(field) for field in fields) else 2


def _surely_read(listing: Listing, options: Options) -> set[str]:
    """The fields that are read of every sample that has them; of alternatives, where only one of them exists."""
    if options.fields is None:
        return set(listing.fields)
    alternatives = [set(entry.split(";")).intersection(listing.fields) for entry in options.fields]
    return set().union(*(names for names in alternatives if len(names) == 1))
