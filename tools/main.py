"""`streamload`: build an index, list what shards hold, verify every byte, say what a dataset is and how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated

import typer
from streamload_tools.bench import Limits, bench, bench_lines
from streamload_tools.decoding import undecodable
from streamload_tools.failures import reported_errors, say
from streamload_tools.indexing import index_shards
from streamload_tools.progress import open_progress
from streamload_tools.reading import Reader, tables
from streamload_tools.sizes import counted, shown_bytes
from streamload_tools.stats import as_json, as_lines, dataset_stats
from streamload_tools.storage_options import StorageOption, parse_storage_options
from streamload_tools.usage import PlainUsage
from streamload_tools.verify import Checked, check, class_names, missing_shards, without_checksums

from streamload.environment.launchers import available_processors
from streamload.index.finder import find_shards
from streamload.index.index_lookup import IndexLookup
from streamload.index.listing import Listing, list_shards
from streamload.index.shard_names import folder_and_name
from streamload.storage.protocol import without_secrets
from streamload.storage.storages import Storages
from streamload.tar.table import ShardTable
from streamload.text import printable

__all__ = ["app", "main"]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Index, list, verify and measure sharded tar datasets.",
)

_Urls = Annotated[
    list[str],
    typer.Argument(
        help="Shards, patterns (braces, globs) or folders; local, or s3://, gs://, az://, https:// and the like.",
        metavar="URLS",
        show_default=False,
    ),
]
_Index = Annotated[str | None, typer.Option(help="A folder with the index, where it is not beside the shards.")]
_Workers = Annotated[
    int | None, typer.Option(help="How many shards are read at once; default: one for each core.", min=1)
]


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"streamload {version('streamload')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before the command."""
    del show_version


@app.command("index", cls=PlainUsage, short_help="Read shards once and write their index.")
def index_command(
    urls: _Urls,
    *,
    output: Annotated[
        str | None, typer.Option(help="The folder for the index, local or remote; default: beside the shards.")
    ] = None,
    workers: _Workers = None,
    storage_option: StorageOption = None,
) -> None:
    """Read shards once and write their index, so that loaders start at once and know their length.

    Shards may be compressed. If one of them is damaged, the index stays as it was.
    """
    with reported_errors("the index stays as it was"):
        storages = Storages(parse_storage_options(storage_option or []))
        shards = find_shards(urls, storages)
        with open_progress("indexing", len(shards), "shards") as progress:
            found = index_shards(shards, output, storages, workers or available_processors(), progress.advance)
        typer.echo(f"indexed {counted(len(shards), 'shard')}, {counted(found.samples, 'sample')}")
        if found.gone:
            say(
                f"note: dropped {counted(len(found.gone), 'shard')} from the index, such as {found.gone[0]!r}, "
                "for lack of a file of that name"
            )
        if found.links:
            say(
                f"warning: {counted(found.links, 'link')} skipped, for a link has no bytes of its own; if they "
                "belong to samples, pack the shards with `tar --hard-dereference -h`"
            )


@app.command("ls", cls=PlainUsage)
def ls_command(
    urls: _Urls,
    *,
    samples: Annotated[bool, typer.Option("--samples", help="List every sample with its fields and bytes.")] = False,
    index: _Index = None,
    workers: _Workers = None,
    storage_option: StorageOption = None,
) -> None:
    """List shards with their bytes, samples and fields; or every sample. Shards without an index are read."""
    with reported_errors():
        storages = Storages(parse_storage_options(storage_option or []))
        listing = list_shards(urls, index, storages)
        reader = Reader(storages, workers or available_processors())
        found = tables(listing, IndexLookup(index, storages), reader)
        names = _shown_names(listing)
        if samples:
            for name, (_, table) in zip(names, found, strict=True):
                for line in _sample_lines(name, table):
                    _print(line)
            return
        rows = [("SHARD", "BYTES", "SAMPLES", "FIELDS")]
        total_bytes = total_samples = 0
        for name, (shard_bytes, table) in zip(names, found, strict=True):
            rows.append((name, f"{shard_bytes:,}", f"{len(table):,}", " ".join(table.fields)))
            total_bytes += shard_bytes
            total_samples += len(table)
        for line in _aligned(rows):
            _print(line)
        _print(
            f"{counted(len(listing.shards), 'shard')}, {counted(total_samples, 'sample')}, {shown_bytes(total_bytes)}"
        )


@app.command("verify", cls=PlainUsage, short_help="Read every byte of shards and compare it with the index.")
def verify_command(
    urls: _Urls,
    *,
    decode: Annotated[
        bool, typer.Option("--decode", help="Decode every field of every sample too, as a loader does.")
    ] = False,
    index: _Index = None,
    workers: _Workers = None,
    storage_option: StorageOption = None,
) -> None:
    """Read every byte of shards, strictly, and compare it with the index; exit status 1 if anything is damaged.

    Labels must have names in classes.json, where there is one.
    """
    with reported_errors():
        options = parse_storage_options(storage_option or [])
        storages, workers = Storages(options), workers or available_processors()
        shards = find_shards(urls, storages)
        lookup = IndexLookup(index, storages)
        reader = Reader(storages, workers)
        classes, faults = class_names(dict.fromkeys(folder_and_name(url)[0] for url in shards), storages)
        found, whole, samples = len(faults), list[str](), 0
        for fault in faults:
            _print(str(fault))
        with open_progress("verifying", len(shards), "shards") as progress:

            def checked(url: str) -> Checked:
                return check(url, lookup, reader, classes.get(folder_and_name(url)[0]))

            for url, result in reader.each(shards, checked, progress.advance):
                for damage in result.damages:
                    found += 1
                    _print(str(damage))
                if not result.damages:
                    whole.append(url)
                    samples += result.samples
        for damage in missing_shards(shards, lookup, storages) if index is None else ():
            found += 1
            _print(str(damage))
        if decode and whole:
            with open_progress("decoding", samples, "samples") as progress:
                for error in undecodable(whole, index, options, workers, progress.advance):
                    found += 1
                    _print(str(error))
        if found:
            say(f"error: {counted(found, 'fault')} in {counted(len(shards), 'shard')}")
            raise typer.Exit(1)
        unchecked = without_checksums(shards, lookup)
        typer.echo(f"{counted(len(shards), 'shard')} verified, no damage{_without_index(unchecked)}")


def _without_index(shards: int) -> str:
    if not shards:
        return ""
    return (
        f"; {counted(shards, 'shard')} without an index, of which only the headers could be checked and not what is in "
        "the files: make an index with `streamload index` while they are known to be right"
    )


@app.command("stats", cls=PlainUsage, short_help="Say what a dataset is, in numbers.")
def stats_command(
    urls: _Urls,
    *,
    ranks: Annotated[int, typer.Option(help="How many ranks to reckon with.", min=1)] = 1,
    as_document: Annotated[bool, typer.Option("--json", help="Print JSON, with every label.")] = False,
    index: _Index = None,
    workers: _Workers = None,
    storage_option: StorageOption = None,
) -> None:
    """Say how large shards, fields and classes are, what each rank gets, and what a shuffle takes in memory.

    It is read from the index; shards without one are read, with progress.
    """
    with reported_errors():
        storages = Storages(parse_storage_options(storage_option or []))
        stats = dataset_stats(urls, index, storages, workers=workers or available_processors(), ranks=ranks)
        for line in [json.dumps(as_json(stats), indent=2)] if as_document else as_lines(stats):
            _print(line)


@app.command("bench", cls=PlainUsage, short_help="Measure how fast a loader reads shards here.")
def bench_command(
    urls: _Urls,
    *,
    batch_size: Annotated[int, typer.Option(help="Samples in a batch.", min=1)] = 64,
    loader_workers: Annotated[
        int | None, typer.Option("--workers", help="Worker processes; default: one for each core.", min=0)
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after so many seconds; default 10.", min=0)] = None,
    batches: Annotated[int | None, typer.Option(help="Stop after so many batches.", min=1)] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Read in a shuffled order.")] = False,
    fields: Annotated[
        str | None,
        typer.Option(help="What to read, as in 'jpg;png,cls'; default: the fields that all samples of a shard have."),
    ] = None,
    crop: Annotated[int, typer.Option(help="Pixels that RandomResizedCrop brings images to; 0: none.", min=0)] = 224,
    raw: Annotated[bool, typer.Option("--no-decode", "--raw", help="Leave the fields' bytes as they are.")] = False,
    index: _Index = None,
    storage_option: StorageOption = None,
) -> None:
    """Read shards with a StreamLoader as fast as it goes, pass after pass, and say how fast that is and what limits it.

    The first batch is told apart and not counted. Ctrl-C ends with what was measured so far.
    """
    with reported_errors():
        result, what = bench(
            urls,
            None if fields is None else fields.split(","),
            Limits(10.0 if seconds is None and batches is None else seconds, batches),
            decode=not raw,
            crop=crop,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers="auto" if loader_workers is None else loader_workers,
            index=index,
            storage_options=parse_storage_options(storage_option or []),
        )
        for line in bench_lines(result, what):
            _print(line)
        if result.interrupted:
            raise typer.Exit(130)


def main() -> None:
    """The entry point `streamload`."""
    app(prog_name="streamload")


def _print(line: str) -> None:
    """A line on standard output; `printable`, since keys and fields are whatever an archive says."""
    typer.echo(printable(line))


def _shown_names(listing: Listing) -> list[str]:
    """The shards' names, or where one comes twice, in several folders, their urls."""
    names = [shard.name for shard in listing.shards]
    return names if len(set(names)) == len(names) else [without_secrets(shard.url) for shard in listing.shards]


def _sample_lines(name: str, table: ShardTable) -> Iterator[str]:
    starts, sizes, numbers = table.sample_start.tolist(), table.member_size.tolist(), table.member_field.tolist()
    for sample, key in enumerate(table.keys()):
        members = range(starts[sample], starts[sample + 1])
        fields = "  ".join(f"{table.fields[numbers[member]]} {sizes[member]:,}" for member in members)
        yield f"{name}  {key}  {fields}".replace("\n", "\\n")


def _aligned(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    """Columns of equal width, the numbers to the right."""
    name, size, count = (max(len(row[column]) for row in rows) for column in range(3))
    for row in rows:
        yield f"{row[0]:<{name}}  {row[1]:>{size}}  {row[2]:>{count}}  {row[3]}"


if __name__ == "__main__":
    main()
