"""Arguments that have no effect beside others, or here: a warning, since one set of them may serve many runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from streamload.decode.decoders import DECODED_EXTENSIONS, applies_to
from streamload.fetch.fetched_listing import fetched_shards
from streamload.index.listing import Listing
from streamload.options import DEFAULT_WINDOW, Options
from streamload.text import listed
from streamload.warn_at_caller import warn_at_caller

__all__ = ["warn_of_no_effect", "warn_of_unused_decoders"]


def warn_of_no_effect(options: Options, listings: Sequence[Listing]) -> None:
    """Warn, at the line of the user's program, of arguments that other arguments or local shards make meaningless.

    Args:
        options: what was asked for.
        listings: of each dataset.
    """
    for message in _without_effect(options, listings):
        warn_at_caller(message)
    known = all(listing.counts is not None for listing in listings)
    warn_of_unused_decoders(options, [name for listing in listings for name in listing.fields] if known else [])


def _without_effect(options: Options, listings: Sequence[Listing]) -> Iterator[str]:
    if options.max_errors is not None and options.on_error == "raise":
        yield (
            f"max_errors={options.max_errors} has no effect with on_error='raise', which ends the pass at the first "
            "sample that fails; on_error='skip' or 'replace' goes on"
        )
    if options.shuffle_window != DEFAULT_WINDOW and not options.shuffle:
        yield f"shuffle_window={options.shuffle_window} has no effect without shuffle=True"
    storages = options.storages
    if options.cache_dir is not None and not any(fetched_shards(listing, storages) for listing in listings):
        yield f"cache_dir={options.cache_dir!r} has no effect: all shards are local files, read where they lie"
    folders = {shard.folder for listing in listings for shard in listing.shards}
    folders |= {folder for listing in listings for folder in listing.index_of if folder is not None}
    if options.storage_options and all(storages.is_local(f"{folder}/") for folder in folders):
        yield "storage_options= has no effect: all shards are local files"


def warn_of_unused_decoders(options: Options, existing: Sequence[str]) -> None:
    """Warn of decoders for fields that are not read, as a misspelt extension's.

    One mapping may serve several datasets. So decoders for extensions that have a meaning elsewhere are not spoken of,
    unless all of the mapping is of no use.

    Args:
        options: what was asked for.
        existing: the fields of the shards, where they are known; else those that were asked for are gone by.
    """
    if isinstance(options.decode, bool):
        return
    asked = [name for entry in options.fields or () for name in entry.split(";")]
    read = [name for name in dict.fromkeys(existing) if name in asked or options.fields is None] or asked
    unused = [key for key in options.decode if not any(applies_to(key, field) for field in read)]
    if not read or not unused:
        return
    for key in (
        unused if len(unused) == len(options.decode) else (key for key in unused if key not in DECODED_EXTENSIONS)
    ):
        alike = difflib.get_close_matches(key, read, 1)
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        warn_at_caller(f"decode has a function for {key!r}, which no field is read by: they are {listed(read)}{hint}")
