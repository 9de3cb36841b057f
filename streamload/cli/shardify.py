"""`shardify`: pack files into shards. `streamload map`: write a function's results for the samples of a dataset."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from streamload.arguments import parse_bytes
from streamload.cli import command
from streamload.errors import ShardNotFoundError, StorageError, without_secrets
from streamload.index.dataset import MOST_CLASSES_BYTES, parse_class_names
from streamload.index.listing import list_shards
from streamload.pack.packing import map_shards
from streamload.pack.run import Target, UsageError, shown_bytes
from streamload.pack.source_to_shards import as_lines, parse_split, source_to_shards
from streamload.pack.sources.loading import Resizing
from streamload.pack.sources.source import SourceOptions
from streamload.storage.protocol import escaped
from streamload.storage.storages import Storages
from streamload.text import counted
from streamload.write.shard_writer import Destination

app = typer.Typer(pretty_exceptions_enable=False)


@app.command(cls=command.Command)
def shardify(
    source: str = typer.Argument(
        ...,
        metavar="SOURCE",
        help="A folder of class folders, or of train and val with class folders; a folder of files that share names "
        "(0.jpg, 0.txt, or images/0, masks/0); a .csv, .jsonl, .parquet, .npz, .npy, .pt; with --labels, files by ID.",
    ),
    dest: str = typer.Argument(..., metavar="DEST", help="The folder for the shards, or a bucket: s3://, ..."),
    *,
    max_bytes: str = typer.Option("256MB", help="Maximum shard size, such as 1GB or 100MiB; 1 MB is 1,000,000 bytes."),
    max_count: int | None = typer.Option(None, help="Maximum number of samples in a shard.", min=1),
    shuffle: bool = typer.Option(True, help="Shuffle; otherwise keep the order of classes and paths, or of rows."),
    seed: int = typer.Option(0, help="Seed of the shuffle and of --split.", min=0, max=2**64 - 1),
    split: str | None = typer.Option(None, help="Split each class at random into folders: train=0.9,val=0.1."),
    resize: int | None = typer.Option(None, help="Shrink larger images to this shorter side (pixels), as JPEG.", min=1),
    quality: int | None = typer.Option(None, help="JPEG quality of --resize. Default: 90.", min=1, max=100),
    workers: int | None = typer.Option(None, help="Processes or Ray tasks. Default: 1 (Ray: 4) per core.", min=1),
    ray: command.Ray = None,
    labels: str | None = typer.Option(None, help="JSON or a table of labels by ID. Default: SOURCE/labels.*."),
    classes: str | None = typer.Option(None, help="The classes.json of the training data, which numbers the classes."),
    path_column: Annotated[
        list[str] | None, typer.Option(help="A column of files or IDs; repeatable. Default: usual names.")
    ] = None,
    label_column: str | None = typer.Option(None, help="Column of labels, or array of a .npz. Default: usual names."),
    text_column: Annotated[
        list[str] | None, typer.Option(help="A column to store as txt, such as captions; repeatable.")
    ] = None,
    labels_as_names: bool = typer.Option(False, "--labels-as-names", help="Treat all labels as names, numbers too."),
    keep_columns: bool = typer.Option(False, "--keep-columns", help="Store the table's other columns as json."),
    split_column: str | None = typer.Option(None, help="The column of splits; each is packed into DEST/SPLIT."),
    stems: bool | None = typer.Option(
        None,
        "--stems/--no-stems",
        help="Pack files that share a name up to its first dot as one sample. Default: by the folder's content.",
    ),
    follow_symlinks: bool = typer.Option(False, "--follow-symlinks", help="Follow links to folders, too."),
    skip_bad: bool = typer.Option(False, "--skip-bad", help="Skip samples with damaged or unexpected files."),
    resume: bool = typer.Option(False, "--resume", help="Continue an interrupted run; unchanged shards stay."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Remove the shards or interrupted run in DEST first."),
    storage_option: command.StorageOption = None,
    as_document: command.Json = False,
    version: bool = typer.Option(False, "--version", callback=command.show_version, is_eager=True),
) -> None:
    """Pack images, arrays or any files into shards, with an index and classes.json.

    Unless resized, files are stored unchanged, under their extension (jpeg as jpg), with the number of their class as
    cls. The same files and options give the same bytes. Readers refuse DEST until everything is packed.

    Examples:
      shardify photos shards                                 photos/<class>/*.jpg
      shardify photos shards --split train=0.9,val=0.1       into shards/train and shards/val
      shardify data shards                                   data/train/<class> and data/val/<class>
      shardify val shards-val --classes shards/classes.json  the same labels as in shards
      shardify photos shards --resize 256                    smaller images, for faster training
      shardify pairs shards                                  pairs/0.jpg, pairs/0.txt, pairs/0.mask.png, ...
      shardify photos.csv shards                             a table with columns path and label
      shardify pairs.parquet shards --text-column caption    columns of paths and of texts
      shardify texts.jsonl shards                            texts, numbers and labels of each row
      shardify data.npz shards                               each row of x, with the label in y
      shardify data shards --labels labels.json              data/<ID>.pt or .npy, {"<ID>": label, ...}
      shardify photos s3://bucket/photos                     to a bucket
      shardify photos shards --ray auto                      on all nodes of a Ray cluster
    """
    del version
    if quality is not None and resize is None:
        raise UsageError("--quality is the quality of the JPEG files that --resize writes; give --resize too")
    if seed and not shuffle and split is None:
        raise UsageError("--seed has no effect with --no-shuffle unless --split is given; leave --seed out")
    try:
        shard_bytes = parse_bytes("--max-bytes", max_bytes)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    storages = Storages(dict(storage_option or ()))
    report = source_to_shards(
        source,
        SourceOptions(
            labels=labels,
            stems=stems,
            follow_symlinks=follow_symlinks,
            classes=None if classes is None else _classes(classes, storages),
            label_column=label_column,
            labels_as_names=labels_as_names,
            path_column=tuple(path_column or ()),
            text_column=tuple(text_column or ()),
            keep_columns=keep_columns,
            split_column=split_column,
        ),
        Target(
            _checked_dest(source, dest, storages),
            storages,
            max_bytes=shard_bytes,
            max_count=max_count,
            skip_bad=skip_bad,
            resume=resume,
            overwrite=overwrite,
            workers=workers,
            ray=ray,
        ),
        shuffle=shuffle,
        seed=seed,
        fractions=None if split is None else parse_split(split),
        resizing=None if resize is None else Resizing(resize, quality or 90),
    )
    if as_document:
        command.print_document(report)
    elif report is not None:
        command.print_line("\n".join(as_lines(report)))


def _classes(path: str, storages: Storages) -> tuple[str, ...]:
    try:
        content = storages.for_url(path).read_bytes(path, most_bytes=MOST_CLASSES_BYTES)
    except ShardNotFoundError as exc:
        raise UsageError(f"--classes: {path!r} does not exist; give the classes.json of a packed dataset") from exc
    return parse_class_names(content, path)


def _checked_dest(source: str, dest: str, storages: Storages) -> str:
    """Return DEST as a path or url. Raise UsageError if SOURCE is not local or DEST cannot be used."""
    if "://" in source:
        raise UsageError(f"SOURCE is {source!r}, but this version packs local files only")
    try:
        folder = Destination(dest.rstrip("/") or "/", storages)
    except (ValueError, StorageError) as exc:
        raise UsageError(f"DEST: {exc}") from exc
    if folder.path is None:
        return folder.folder
    real_source, real_dest = os.path.realpath(source), os.path.realpath(folder.path)
    if os.path.isdir(source) and os.path.commonpath([real_source, real_dest]) == real_source:
        raise UsageError(
            f"DEST {folder.path!r} lies in SOURCE {source!r}, where shards would look like a class; choose another DEST"
        )
    return folder.path


def map_command(
    function: str = typer.Argument(..., metavar="FUNCTION", help="MODULE:FUNCTION, from this folder or installed."),
    source: str = typer.Argument(..., metavar="SOURCE", help="Shards, a pattern or a folder."),
    dest: str = typer.Argument(..., metavar="DEST", help="A folder or a url for the new shards."),
    *,
    sidecar: bool = typer.Option(False, "--sidecar", help="Write only new fields, for join= of a loader."),
    batch_size: int | None = typer.Option(None, help="Pass lists of at most this many samples.", min=1),
    max_bytes: str | None = typer.Option(None, help="Write new shards of at most this size."),
    max_count: int | None = typer.Option(None, help="Write new shards of at most this many samples.", min=1),
    decode: bool = typer.Option(False, "--decode", help="Pass decoded fields instead of bytes."),
    where: command.Where = None,
    resume: bool = typer.Option(False, "--resume", help="Continue an interrupted run."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the shards in DEST."),
    as_document: command.Json = False,
    workers: command.Workers = None,
    ray: command.Ray = None,
    storage_option: command.StorageOption = None,
) -> None:
    """Call a function for each sample and write the result: a sample, a list of samples, or nothing for None.

    A sample is a dict of "__key__", "__url__" and the fields. Shards keep their names if all are unique and end in
    .tar; with --max-bytes or --max-count they are numbered. Readers refuse DEST until everything is done.

    Examples:
      streamload map filters:large_enough shards/train shards/large
      streamload map embed:vectors shards/train vectors --sidecar --batch-size 64
      streamload map filters:large_enough shards/train shards/large --resume
      streamload map filters:large_enough s3://bucket/train s3://bucket/large --ray auto
    """
    options = dict(storage_option or ())
    map_shards(
        _imported(function),
        source,
        dest,
        sidecar=sidecar,
        batch_size=batch_size,
        decode=decode,
        where=where,
        workers=workers,
        max_bytes=max_bytes,
        max_count=max_count,
        resume=resume,
        overwrite=overwrite,
        storage_options=options,
        ray=ray,
    )
    listing = list_shards(escaped(dest), None, Storages(options))
    shards, samples = len(listing.shards), sum(listing.counts or ())
    size = sum(shard.bytes for shard in listing.shards)
    if as_document:
        command.print_document({"shards": shards, "samples": samples, "bytes": size})
    else:
        counts = f"{counted(shards, 'shard')}, {counted(samples, 'sample')}, {shown_bytes(size)}"
        command.print_line(f"{without_secrets(dest)}: {counts}")


def _imported(name: str) -> Callable[[Any], Any]:
    sys.path.insert(0, os.getcwd())
    try:
        function: Callable[[Any], Any] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise UsageError(
            f"{name!r} cannot be imported ({exc}); write MODULE:FUNCTION, such as filters:large_enough for a function "
            "in filters.py; the module must be in this folder or installed"
        ) from exc
    if not callable(function):
        raise UsageError(f"{name!r} is not a function; write MODULE:FUNCTION")
    return function


if __name__ == "__main__":
    app(prog_name="shardify")
