"""`shardify SOURCE DEST`: pack images or arrays into shards with an index and the names of the classes."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from streamload_tools import shardify_options as option
from streamload_tools.failures import UsageError, reported_errors
from streamload_tools.packing.packing import PackOptions
from streamload_tools.packing.resizing import Resizing
from streamload_tools.packing.source_to_shards import Place, source_to_shards
from streamload_tools.packing.split import parse_split
from streamload_tools.packing.targets import Start
from streamload_tools.sources.kinds import SourceOptions
from streamload_tools.sources.table import TableColumns
from streamload_tools.storage_options import StorageOption, parse_storage_options
from streamload_tools.usage import PlainUsage

from streamload.arguments import parse_bytes
from streamload.environment.launchers import available_processors
from streamload.errors import ShardNotFoundError
from streamload.index.class_names import MOST_CLASSES_BYTES, parse_class_names
from streamload.index.shard_names import WEB
from streamload.storage.local_files import refuse_url
from streamload.storage.protocol import protocol_of, without_secrets
from streamload.storage.storages import Storages

__all__ = ["app", "main"]

_EXAMPLES = """
Examples:

\b
  shardify photos shards                            photos/<class>/*.jpg
  shardify photos shards --split train=0.9,val=0.1  into shards/train and shards/val
  shardify data shards                              data/train/<class> and data/val/<class>, the same
  shardify val shards-val --classes shards/classes.json  labels as in shards
  shardify photos shards --resize 256               smaller images, for faster training
  shardify photos.csv shards                        a table with columns path and label
  shardify data shards --labels labels.json         data/<ID>.pt or .npy, {"<ID>": label, ...}
  shardify photos shards --resume                   go on after a crash, Ctrl-C or a full disk
  shardify photos s3://bucket/photos                into a bucket
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command(epilog=_EXAMPLES, cls=PlainUsage)
def shardify(
    source: option.Source,
    dest: option.Dest,
    *,
    max_bytes: option.MaxBytes = "256MB",
    max_count: option.MaxCount = None,
    shuffle: option.Shuffle = True,
    seed: option.Seed = 0,
    split: option.Split = None,
    resize: option.Resize = None,
    quality: option.Quality = None,
    workers: option.Workers = None,
    labels: option.Labels = None,
    classes: option.Classes = None,
    partition: option.Partition = None,
    path_column: option.PathColumn = None,
    label_column: option.LabelColumn = None,
    labels_as_names: option.LabelsAsNames = False,
    keep_columns: option.KeepColumns = False,
    follow_symlinks: option.FollowSymlinks = False,
    skip_bad: option.SkipBad = False,
    resume: option.Resume = False,
    overwrite: option.Overwrite = False,
    staging: option.Staging = None,
    storage_option: StorageOption = None,
    sync: option.Sync = False,
    show_version: option.ShowVersion = False,
) -> None:
    """Pack images or arrays into shards, with an index and classes.json.

    Files are stored as they are, under their extension (jpeg as jpg), with the number of their class as cls. The same
    files and options give the same bytes. Nothing is published unless everything could be packed.

    In a bucket, each shard is uploaded as soon as it is finished, and the index comes last; if not everything can be
    packed, what was uploaded is removed again. With --overwrite, what is there is removed before the first upload.
    """
    del show_version
    with reported_errors("nothing of what was in flight is published"):
        _refuse_pairs(resize=resize, quality=quality, split=split, partition=partition)
        source_to_shards(
            source,
            SourceOptions(
                labels,
                partition,
                TableColumns(path_column, label_column, keep=keep_columns, as_names=labels_as_names),
                follow_symlinks,
                None if classes is None else _classes(classes, storage_option or []),
            ),
            PackOptions(
                max_bytes=_max_bytes(max_bytes),
                max_count=max_count,
                shuffle=shuffle,
                seed=seed,
                fractions=None if split is None else _fractions(split),
                skip_bad=skip_bad,
                resizing=None if resize is None else Resizing(resize, quality or option.DEFAULT_QUALITY),
                workers=workers or available_processors(),
                sync=sync,
            ),
            _place(dest, staging, storage_option or []),
            Start(overwrite=overwrite, resume=resume),
        )


def main() -> None:
    """The entry point `shardify`."""
    app(prog_name="shardify")


def _refuse_pairs(*, resize: int | None, quality: int | None, split: str | None, partition: str | None) -> None:
    """Refuse options of which one makes no sense without, or beside, the other."""
    if quality is not None and resize is None:
        raise UsageError("--quality is that of the JPEG files that --resize makes; give --resize too")
    if split is not None and partition is not None:
        raise UsageError("--split and --partition both say what goes where; give one of them")


def _max_bytes(text: str) -> int:
    try:
        return parse_bytes("--max-bytes", text)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc


def _fractions(text: str) -> dict[str, float]:
    try:
        return parse_split(text)
    except ValueError as exc:
        raise UsageError(f"--split: {exc}") from exc


def _classes(path: str, storage_options: Sequence[str]) -> tuple[str, ...]:
    storages = Storages(parse_storage_options(storage_options))
    try:
        content = storages.for_url(path).read_bytes(path, most_bytes=MOST_CLASSES_BYTES)
    except ShardNotFoundError as exc:
        raise UsageError(f"--classes: {path!r} does not exist; give the classes.json of a packed dataset") from exc
    return parse_class_names(content, path)


def _place(dest: str, staging: str | None, storage_options: Sequence[str]) -> Place:
    options = parse_storage_options(storage_options)
    if staging is not None:
        try:
            refuse_url("--staging", staging)
        except ValueError as exc:
            raise UsageError(str(exc)) from exc
    if "://" not in dest:
        try:
            Storages({}).is_local(dest)
        except ValueError as exc:
            raise UsageError(f"DEST: {exc}") from exc
        if staging is not None or options:
            raise UsageError("--staging and --storage-option are for a remote DEST, and this one is a local folder")
        return Place(dest, None, None)
    storages = Storages(options)
    if storages.is_local(dest):
        return Place(storages.for_url(dest).absolute(dest), None, None)
    if not dest.partition("://")[2].strip("/"):
        raise UsageError(f"DEST {dest!r} names no bucket or folder; give one, as in s3://bucket/train")
    if protocol_of(dest) in WEB:
        shown = without_secrets(dest)
        raise UsageError(f"DEST is {shown!r}, but a web server cannot be written to; name a folder or a bucket")
    return Place(dest.rstrip("/"), storages.for_url(dest), staging)


if __name__ == "__main__":
    main()
