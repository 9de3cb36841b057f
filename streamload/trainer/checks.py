"""Refuse impossible arguments before a feeder starts, and warn of those without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from streamload.arguments import alternatives, did_you_mean
from streamload.index.listing import Listing
from streamload.options import Options
from streamload.sampling.mixture import Portion
from streamload.tar.extensions import KIND_OF, applies_to
from streamload.tar.header_chain import LINK, MISSING_END
from streamload.tar.scan import LABEL_FIELD
from streamload.text import counted, listed
from streamload.warn_at_caller import warn_at_caller


@contextmanager
def naming_dataset(name: str) -> Iterator[None]:
    """Name a dataset of a mixture in errors of the block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not name:
            raise
        raise type(error)(f"dataset {name!r}: {error}") from None


def check_fields(portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> None:
    """Refuse fields that an indexed dataset does not have.

    Raises:
        TypeError, ValueError: names the dataset and the field.
    """
    for (name, portion), listing in zip(portions.items(), listings, strict=True):
        with naming_dataset(name):
            own = portion.transform
            wanted = options if own is None else replace(options, transform=own)
            if listing.counts is not None:
                wanted.check_fields_exist(listing.fields)


def labelled_folders(portions: Mapping[str, Portion], listings: Sequence[Listing], options: Options) -> tuple[str, ...]:
    """Return the folders whose labels must mean the same classes: not of datasets with a transform of their own."""
    folders: dict[str, None] = {}
    for portion, listing in zip(portions.values(), listings, strict=True):
        unknown = (LABEL_FIELD,) if listing.counts is None else listing.fields
        names = unknown if options.field_names is None else options.field_names
        if portion.transform is None and any(LABEL_FIELD in entry.split(";") for entry in names):
            folders |= dict.fromkeys(shard.folder for shard in listing.shards)
    return tuple(folders)


def warn_of_unused_decoders(options: Options, existing: Sequence[str]) -> None:
    """Warn of decoders for fields that are not read, such as a misspelt extension.

    One mapping may serve several datasets, so known extensions are mentioned only if none of the mapping is used.
    `existing` are the fields of the shards, if known.
    """
    if not isinstance(options.decode, Mapping):
        return
    requested = [name for entry in options.field_names or () for name in entry.split(";")]
    read = [name for name in dict.fromkeys(existing) if name in requested or options.field_names is None] or requested
    given = [name for key in options.decode for name in alternatives(key)]
    unused = [name for name in given if not any(applies_to(name, field) for field in (*read, *requested))]
    if not read or not unused:
        return
    for name in unused if len(unused) == len(given) else (name for name in unused if name not in KIND_OF):
        hint = did_you_mean(name, read)
        warn_at_caller(f"decode has a function for {name!r}, which no field is read by: they are {listed(read)}{hint}")


class SkippedMembers:
    """Warn once of skipped links, of shards without an end-of-archive marker, and of epochs without a batch."""

    def __init__(self) -> None:
        self._skipped: Mapping[str, int] = {}
        self._reported: set[str] = set()

    def inspect(self, skipped: Mapping[str, int]) -> None:
        """Record the members that scans have skipped, by reason; warn of those that may be missed."""
        self._skipped = skipped
        if links := skipped.get(LINK, 0):
            self._warn_once(
                "links",
                f"{counted(links, 'link')} skipped in the shards read so far: a link in an archive has no bytes of its "
                "own, and `tar` makes links of symbolic links and of files that have several names; if they belong to "
                "samples, pack the shards with `tar --hard-dereference -h`",
            )
        if cut := skipped.get(MISSING_END, 0):
            self._warn_once(
                "cut",
                f"{counted(cut, 'shard')} without an end-of-archive marker among those read so far, so it may have "
                "been cut after a member; `streamload verify` names each: fetch or pack it again",
            )

    def explain_emptiness(self) -> None:
        """Warn that no shard has a sample."""
        reasons = [f"{count:,} {reason}" for reason, count in self._skipped.items() if reason != MISSING_END]
        skipped = f": all their members were skipped ({', '.join(reasons)})" if reasons else ""
        self._warn_once(
            "empty",
            f"no sample is in the shards, so there is nothing to give{skipped}; the files of a sample are regular ones "
            "named KEY.FIELD, such as 0001.jpg and 0001.cls",
        )

    def explain_dropped_epoch(self, samples: int, batch_size: int, world_size: int) -> None:
        """Warn that `drop_last` leaves no batch of an epoch."""
        ranks = f" on each of {counted(world_size, 'rank')}" if world_size > 1 else ""
        self._warn_once(
            "dropped",
            f"drop_last=True drops the whole epoch, so there is no batch: it has {counted(samples, 'sample')}, and one "
            f"batch of batch_size={batch_size}{ranks} takes {batch_size * world_size:,}; give a smaller batch_size, or "
            "drop_last=False",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            warn_at_caller(message)
