"""`shardify SOURCE DEST`: pack images or arrays into shards with an index and the names of the classes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Annotated, Any, TypeVar

import typer
from streamload_tools.failures import UsageError, say, told_errors
from streamload_tools.packing.packing import PackOptions, pack
from streamload_tools.packing.publishing import Part, publish
from streamload_tools.packing.records import kept
from streamload_tools.packing.remote_staging import remote_staging
from streamload_tools.packing.report import tell_faults, tell_notes, tell_result
from streamload_tools.packing.resizing import Resizing
from streamload_tools.packing.split import parse_split
from streamload_tools.packing.staging import Run, Staging, is_being_published, staging_folder
from streamload_tools.packing.targets import Start, check_local, check_places, check_remote, refuse_shards
from streamload_tools.sizes import parse_bytes
from streamload_tools.sources.kinds import SourceOptions, open_source
from streamload_tools.sources.listing import Listing, list_files
from streamload_tools.sources.source import ARRAY_FIELDS, Source, SourceError
from streamload_tools.sources.table import TableColumns
from streamload_tools.storage_options import STORAGE_OPTION_HELP, parse_storage_options

from streamload.fetch.listing.shard_names import WEB
from streamload.fetch.storage.protocol import Storage, protocol_of
from streamload.fetch.storage.storages import Storages
from streamload.options import available_processors

__all__ = ["app", "main"]

_T = TypeVar("_T")
_DEFAULT_QUALITY = 90
_EXAMPLES = """
Examples:

\b
  shardify photos shards                            photos/<class>/*.jpg
  shardify photos shards --split train=0.9,val=0.1  into shards/train and shards/val
  shardify photos shards --resize 256               smaller images, for faster training
  shardify photos.csv shards                        a table with columns path and label
  shardify data shards --labels labels.json         data/<ID>.pt or .npy, {"<ID>": label, ...}
  shardify photos shards --resume                   go on after a crash, Ctrl-C or a full disk
  shardify photos s3://bucket/photos                into a bucket
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where shards go.

    Attributes:
        dest: a path, or a url without a slash at its end.
        storage: what writes there, if it is remote.
        staging: where shards grow then, or None.
    """

    dest: str
    storage: Storage | None
    staging: str | None


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardify {version('streamload')}")
        raise typer.Exit


@app.command(epilog=_EXAMPLES)
def shardify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder with one folder of images for each class; a .csv, .tsv or .jsonl of paths and labels; or, "
            "with --labels, a folder of .pt, .npy or image files.",
        ),
    ],
    dest: Annotated[
        str,
        typer.Argument(
            metavar="DEST", help="The folder for the shards, made if needed; or s3://, gs://, az://... in a bucket."
        ),
    ],
    *,
    max_bytes: Annotated[str, typer.Option(help="Largest shard, as in 256MB, 1GB or 100KiB.")] = "256MB",
    max_count: Annotated[int | None, typer.Option(help="Most samples in a shard.", min=1)] = None,
    shuffle: Annotated[
        bool, typer.Option(help="Mix the classes, or keep the order of class and path, or table.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal shards.", min=0, max=2**64 - 1)] = 0,
    split: Annotated[
        str | None,
        typer.Option(help="Divide each class at random into folders of DEST, as in train=0.9,val=0.1."),
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(
            help="Bring the shorter side of larger images to so many pixels, as JPEG, also if it was PNG or another "
            "kind. EXIF orientation is applied, CMYK becomes RGB, grey stays grey; transparency, colour profiles and "
            "other metadata are dropped. Images that are small enough stay as they are, to the byte.",
            min=1,
        ),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(help=f"Of the JPEG files that --resize makes; default {_DEFAULT_QUALITY}.", min=1, max=100),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes; default: one for each core. The shards do not depend on it.", min=1)
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help='For a folder of files named by ID: JSON, {"ID": label, ...}, or a table with columns id and label. '
            "Default: labels.json (.csv, .tsv, .jsonl) in SOURCE."
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help='With --labels, the splits as JSON: {"train": ["ID", ...], ...}.')
    ] = None,
    path_column: Annotated[
        str | None, typer.Option(help="A table's column of paths or IDs; default: by its name.")
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="A table's column of labels; default: by its name.")] = None,
    keep_columns: Annotated[
        bool, typer.Option("--keep-columns", help="Store the table's other columns too, as the field json.")
    ] = False,
    follow_symlinks: Annotated[
        bool, typer.Option("--follow-symlinks", help="Go into folders behind links. Links to files always count.")
    ] = False,
    skip_bad: Annotated[
        bool,
        typer.Option("--skip-bad", help="Leave out files that are damaged or of another kind, instead of failing."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the shards that a run that was stopped has finished.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the shards, or the unfinished run, that DEST holds.")
    ] = False,
    staging: Annotated[
        str | None,
        typer.Option(
            help="Where shards grow before they are uploaded, if DEST is remote; default: in the folder for temporary "
            "files. A few shards lie there at a time; with --resize, all of them."
        ),
    ] = None,
    storage_option: Annotated[
        list[str] | None, typer.Option("--storage-option", metavar="KEY=VALUE", help=STORAGE_OPTION_HELP)
    ] = None,
    sync: Annotated[
        bool, typer.Option("--sync", help="Wait until all is on the disk, against a power cut; slower.")
    ] = False,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Pack images or arrays into shards, with an index and classes.json.

    Files are stored as they are, under their extension (jpeg as jpg), with the number of their class as cls. The same
    files and options give the same bytes. Nothing is published unless everything could be packed.

    In a bucket, each shard is uploaded as soon as it is finished, and the index comes last; if not everything can be
    packed, what was uploaded is removed again. With --overwrite, what is there is removed before the first upload.
    """
    del show_version
    with told_errors():
        if quality is not None and resize is None:
            raise UsageError("--quality is that of the JPEG files that --resize makes; give --resize too")
        if split is not None and partition is not None:
            raise UsageError("--split and --partition both say what goes where; give one of them")
        options = PackOptions(
            _usage(parse_bytes, "--max-bytes", max_bytes),
            max_count,
            shuffle,
            seed,
            None if split is None else _usage(parse_split, "--split", split),
            skip_bad,
            None if resize is None else Resizing(resize, quality or _DEFAULT_QUALITY),
            workers or available_processors(),
            sync,
        )
        columns = TableColumns(path_column, label_column, keep_columns)
        place = _place(dest, staging, storage_option or [])
        start = Start(overwrite, resume)
        _run(source, place, SourceOptions(labels, partition, columns, follow_symlinks), options, start)


def main() -> None:
    """The entry point `shardify`."""
    app(prog_name="shardify")


def _usage(parse: Callable[[str], _T], option: str, text: str) -> _T:
    try:
        return parse(text)
    except ValueError as exc:
        raise UsageError(f"{option}: {exc}") from exc


def _place(dest: str, staging: str | None, storage_options: Sequence[str]) -> _Place:
    options = parse_storage_options(storage_options)
    if "://" not in dest:
        if staging is not None or options:
            raise UsageError("--staging and --storage-option are for a remote DEST, and this one is a local folder")
        return _Place(dest, None, None)
    storages = Storages(options)
    if storages.is_local(dest):
        return _Place(storages.for_url(dest).absolute(dest), None, None)
    if not dest.partition("://")[2].strip("/"):
        raise UsageError(f"DEST {dest!r} names no bucket or folder; give one, as in s3://bucket/train")
    if protocol_of(dest) in WEB:
        raise UsageError(f"DEST is {dest!r}, but a web server cannot be written to; name a folder or a bucket")
    return _Place(dest.rstrip("/"), storages.for_url(dest), staging)


def _run(source: str, place: _Place, source_options: SourceOptions, options: PackOptions, start: Start) -> None:
    began = time.monotonic()
    dest = place.dest
    check_places(source, dest, remote=place.storage is not None)
    try:
        found = open_source(source, source_options)
    except SourceError as exc:
        raise UsageError(str(exc)) from exc
    if options.resizing is not None and any(file.field in ARRAY_FIELDS for file in found.files):
        raise UsageError("--resize is for images, and the source holds arrays or tensors too")
    tell_notes(found)
    splits = list(options.fractions or found.parts or [""])
    if place.storage is None:
        something_to_do = check_local(dest, splits, start)
    else:
        something_to_do = check_remote(place.storage, dest, splits, start)
    if not something_to_do:
        return
    listing = list_files(found)
    run = Run(dest, _remembered(source, options), listing, start.resume, start.overwrite)
    if place.storage is not None:
        with remote_staging(run, place.storage, splits, place.staging) as staging:
            _tell_whether_resumed(staging, start)
            parts, skipped = _packed(found, listing, options, staging)
            staging.publish(parts, found.classes)
    else:
        with staging_folder(run) as staging:
            _tell_whether_resumed(staging, start)
            if not is_being_published(dest):  # another run may have published while this one waited for the lock
                refuse_shards(dest, splits, start)
            parts, skipped = _pack_and_publish(found, listing, dest, options, staging)
    tell_result(_not_empty(parts), dest, found, skipped, time.monotonic() - began)


def _tell_whether_resumed(staging: Staging, start: Start) -> None:
    if start.resume and not staging.resumed:
        say("note: there is no unfinished run to resume; packing from the start")


def _pack_and_publish(
    found: Source, listing: Listing, dest: str, options: PackOptions, staging: Staging
) -> tuple[list[Part], int]:
    """The parts, and how many files were left out."""
    begun = staging.publishing() if staging.resumed else None
    if begun is not None:
        parts = [_part_of_before(name, paths) for name, paths in begun.items()]
        publish(parts, dest, found.classes, sync=options.sync, again=True)
        return parts, len(found.files) - sum(part.samples for part in parts)
    parts, skipped = _packed(found, listing, options, staging)
    staging.begin_publishing({part.name: [shard.path for shard in part.shards] for part in parts})
    publish(parts, dest, found.classes, sync=options.sync)
    return parts, skipped


def _packed(found: Source, listing: Listing, options: PackOptions, staging: Staging) -> tuple[list[Part], int]:
    """The parts, of which at least one holds something, and how many files were left out. Else the command ends."""
    parts, faults = pack(found, listing, options, staging)
    tell_faults(faults)
    if faults and not options.skip_bad:
        staging.abandon()
        kind = "no whole images" if found.noun == "image" else "damaged or of another kind"
        say(
            f"error: {len(faults):,} of {len(found.files):,} files are {kind}, so nothing was published; "
            "repair or remove them, or leave them out with --skip-bad"
        )
        raise typer.Exit(1)
    if not _not_empty(parts):
        staging.abandon()
        say(f"error: no {found.noun} is left to pack, so nothing was published")
        raise typer.Exit(1)
    return parts, len(faults)


def _not_empty(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if part.shards]


def _part_of_before(name: str, paths: Sequence[str]) -> Part:
    shards = [kept(path, check=False) for path in paths]
    if None in shards:
        raise ValueError("the unfinished run is damaged; start anew with --overwrite")
    return Part(name, [shard for shard in shards if shard is not None])


def _remembered(source: str, options: PackOptions) -> dict[str, Any]:
    """All that the bytes of the shards depend on beside the files, by the names that users know."""
    remembered: dict[str, Any] = {
        "SOURCE": os.path.realpath(source),
        "--max-bytes": options.max_bytes,
        "--max-count": options.max_count,
        "--shuffle": options.shuffle,
        "--seed": options.seed,
        # Pairs, for the order decides what goes where, and dictionaries are equal in any order.
        "--split": None if options.fractions is None else [list(share) for share in options.fractions.items()],
        "--skip-bad": options.skip_bad,
        "--resize": None if options.resizing is None else options.resizing.size,
        "--quality": None if options.resizing is None else options.resizing.quality,
        "streamload": version("streamload"),
    }
    if options.resizing is not None:
        names = ("simplejpeg", "opencv-python-headless", "pillow", "numpy")
        remembered |= {name: version(name) for name in names}
    return remembered


if __name__ == "__main__":
    main()
