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
from streamload_tools.listing import Listing, list_files
from streamload_tools.packing import PackOptions, pack
from streamload_tools.publishing import CLASSES, NAMES, Part, publish
from streamload_tools.records import kept
from streamload_tools.report import tell_faults, tell_notes, tell_result
from streamload_tools.resizing import Resizing
from streamload_tools.sizes import counted, parse_bytes
from streamload_tools.source import ARRAY_FIELDS, Source, SourceError
from streamload_tools.source_table import TableColumns
from streamload_tools.sources import SourceOptions, open_source
from streamload_tools.split import parse_split
from streamload_tools.staging import Run, Staging, is_being_published, is_unfinished, remove_remains, staging_folder

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
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class _Start:
    """How a run begins: with what is there, or anew."""

    overwrite: bool
    resume: bool


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
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder for the shards; made if needed.")],
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
        start = _Start(overwrite, resume)
        _run(source, dest, SourceOptions(labels, partition, columns, follow_symlinks), options, start)


def main() -> None:
    """The entry point `shardify`."""
    app(prog_name="shardify")


def _usage(parse: Callable[[str], _T], option: str, text: str) -> _T:
    try:
        return parse(text)
    except ValueError as exc:
        raise UsageError(f"{option}: {exc}") from exc


def _run(source: str, dest: str, source_options: SourceOptions, options: PackOptions, start: _Start) -> None:
    began = time.monotonic()
    _check_places(source, dest)
    try:
        found = open_source(source, source_options)
    except SourceError as exc:
        raise UsageError(str(exc)) from exc
    if options.resizing is not None and any(file.field in ARRAY_FIELDS for file in found.files):
        raise UsageError("--resize is for images, and the source holds arrays or tensors too")
    tell_notes(found)
    splits = list(options.fractions or found.parts or [""])
    if not _check_dest(dest, splits, start):
        return
    listing = list_files(found)
    run = Run(dest, _remembered(source, options), listing, start.resume, start.overwrite)
    with staging_folder(run) as staging:
        if start.resume and not staging.resumed:
            say("note: there is no unfinished run to resume; packing from the start")
        if not is_being_published(dest):  # another run may have published while this one waited for the lock
            _refuse_shards(_targets(dest, splits), start)
        parts, skipped = _pack_and_publish(found, listing, dest, options, staging)
    tell_result(parts, dest, found, skipped, time.monotonic() - began)


def _pack_and_publish(
    found: Source, listing: Listing, dest: str, options: PackOptions, staging: Staging
) -> tuple[list[Part], int]:
    """The parts that hold anything, and how many files were left out."""
    begun = staging.publishing() if staging.resumed else None
    if begun is not None:
        parts = [_part_of_before(name, paths) for name, paths in begun.items()]
        publish(parts, dest, found.classes, sync=options.sync, again=True)
        return _not_empty(parts), len(found.files) - sum(part.samples for part in parts)
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
    staging.begin_publishing({part.name: [shard.path for shard in part.shards] for part in parts})
    publish(parts, dest, found.classes, sync=options.sync)
    return _not_empty(parts), len(faults)


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


def _check_places(source: str, dest: str) -> None:
    for name, place in (("SOURCE", source), ("DEST", dest)):
        if "://" in place:
            raise UsageError(f"{name} is {place!r}, but this version packs from and to local folders only")
    real_source, real_dest = os.path.realpath(source), os.path.realpath(dest)
    if os.path.isdir(source) and os.path.commonpath([real_source, real_dest]) == real_source:
        raise UsageError(
            f"DEST {dest!r} lies in SOURCE {source!r}, where shards would be taken for a class; choose another"
        )
    if os.path.exists(dest) and not os.path.isdir(dest):
        raise UsageError(f"DEST {dest!r} is a file; give a folder")


def _check_dest(dest: str, splits: Sequence[str], start: _Start) -> bool:
    """Refuse to write over what is there; False if there is nothing to do."""
    if is_being_published(dest):
        return True  # the shards there may be those of the run that is unfinished
    targets = _targets(dest, splits)
    for folder in targets:
        existing = NAMES.existing(folder)
        if existing and start.resume and not start.overwrite and not is_unfinished(dest):
            remove_remains(dest)
            say(
                f"note: there is no unfinished run to resume, and {folder!r} holds "
                f"{counted(len(existing), 'shard')} already; to pack anew, add --overwrite"
            )
            return False
    _refuse_shards(targets, start)
    for folder in _left_overs(dest, targets) if splits != [""] else []:
        raise UsageError(
            f"{folder!r} holds shards of another split, which would stay beside the new ones; remove them first"
        )
    return True


def _targets(dest: str, splits: Sequence[str]) -> list[str]:
    return [os.path.join(dest, split) if split else dest for split in splits]


def _refuse_shards(targets: Sequence[str], start: _Start) -> None:
    for folder in targets:
        existing = NAMES.existing(folder)
        if existing and not start.overwrite:
            raise UsageError(
                f"{folder!r} holds {counted(len(existing), 'shard')} already; replace them with --overwrite, "
                "or choose another DEST"
            )


def _left_overs(dest: str, targets: Sequence[str]) -> list[str]:
    """Folders of an earlier run of shardify that this one would not replace."""
    if not os.path.isdir(dest):
        return []
    folders = [dest, *(os.path.join(dest, name) for name in sorted(os.listdir(dest)) if not name.startswith("."))]
    return [
        folder
        for folder in folders
        if folder not in targets and os.path.exists(os.path.join(folder, CLASSES)) and NAMES.existing(folder)
    ]


if __name__ == "__main__":
    main()
