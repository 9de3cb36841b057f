"""`shardify SOURCE DEST`: pack an ImageFolder into shards with an index and the names of the classes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

import typer
from streamload_tools.failures import UsageError, say, told_errors
from streamload_tools.imagefolder import ImageFile, ImageFolder, ImageFolderError, find_images
from streamload_tools.packing import NAMES, Fault, PackedPart, find_faults, pack, publish, staging_folder
from streamload_tools.progress import open_progress
from streamload_tools.sizes import counted, parse_bytes, shown_bytes, shown_time
from streamload_tools.split import order_of, parse_split, split_by_class

__all__ = ["app", "main"]

_FAULTS_SHOWN = 20
_T = TypeVar("_T")

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class _Options:
    max_bytes: int
    max_count: int | None
    shuffle: bool
    seed: int
    fractions: dict[str, float] | None
    overwrite: bool
    skip_bad: bool


@app.command()
def shardify(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The ImageFolder: a folder for each class.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="The folder for the shards; made if needed.")],
    *,
    max_bytes: Annotated[str, typer.Option(help="Largest shard, as in 256MB, 1GB or 100KiB.")] = "256MB",
    max_count: Annotated[int | None, typer.Option(help="Most images in a shard.", min=1)] = None,
    shuffle: Annotated[bool, typer.Option(help="Mix the classes, or keep images sorted by class and path.")] = True,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal shards.", min=0, max=2**64 - 1)] = 0,
    split: Annotated[
        str | None,
        typer.Option(help="Divide each class at random into folders of DEST, as in train=0.9,val=0.1."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the shards that DEST holds.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out files that are no whole images, instead of failing.")
    ] = False,
) -> None:
    """Pack an ImageFolder into shards, with an index and classes.json.

    Images are stored as they are, under their extension (jpeg as jpg), with the number of their class as cls. The same
    images and options give the same bytes. Nothing is published unless everything could be packed.
    """
    with told_errors():
        options = _Options(
            _usage(parse_bytes, "--max-bytes", max_bytes),
            max_count,
            shuffle,
            seed,
            None if split is None else _usage(parse_split, "--split", split),
            overwrite,
            skip_bad,
        )
        _run(source, dest, options)


def main() -> None:
    """The entry point `shardify`."""
    app(prog_name="shardify")


def _run(source: str, dest: str, options: _Options) -> None:
    start = time.monotonic()
    _check_places(source, dest, list(options.fractions or [""]), options.overwrite)
    try:
        found = find_images(source)
    except ImageFolderError as exc:
        raise UsageError(str(exc)) from exc
    _tell_oddities(found)
    files, faults = list(found.files), []
    if options.skip_bad and options.fractions:
        # Before splitting, so that every class keeps its share of whole images in every split.
        with open_progress("checking", len(files), "images") as progress:
            faults = find_faults(files, progress)
        bad = {fault.path for fault in faults}
        files = [file for file in files if file.path not in bad]
    parts = _parts(files, options)
    with staging_folder(dest) as staging:
        with open_progress("packing", len(files), "images") as progress:
            packed, found_now = pack(
                parts,
                staging,
                progress,
                max_bytes=options.max_bytes,
                max_count=options.max_count,
                skip_faults=options.skip_bad,
            )
        faults += found_now
        _tell_faults(faults)
        if faults and not options.skip_bad:
            say(
                f"error: {len(faults):,} of {len(found.files):,} files are no whole images, so nothing was published; "
                "repair or remove them, or leave them out with --skip-bad"
            )
            raise typer.Exit(1)
        if not any(part.writer.samples for part in packed):
            say("error: no image is left to pack, so nothing was published")
            raise typer.Exit(1)
        publish([part for part in packed if part.writer.samples], dest, found.classes)
    _tell_result(packed, dest, found, len(faults), time.monotonic() - start)


def _usage(parse: Callable[[str], _T], option: str, text: str) -> _T:
    try:
        return parse(text)
    except ValueError as exc:
        raise UsageError(f"{option}: {exc}") from exc


def _check_places(source: str, dest: str, splits: Sequence[str], overwrite: bool) -> None:
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
    targets = [os.path.join(dest, split) if split else dest for split in splits]
    for folder in targets:
        existing = NAMES.existing(folder)
        if existing and not overwrite:
            raise UsageError(
                f"{folder!r} holds {counted(len(existing), 'shard')} already; replace them with --overwrite, "
                "or choose another DEST"
            )
    for folder in _left_overs(dest, targets) if splits != [""] else []:
        raise UsageError(
            f"{folder!r} holds shards of another split, which would stay beside the new ones; remove them first"
        )


def _left_overs(dest: str, targets: Sequence[str]) -> list[str]:
    """Folders of an earlier run of shardify that this one would not replace."""
    if not os.path.isdir(dest):
        return []
    folders = [dest, *(os.path.join(dest, name) for name in sorted(os.listdir(dest)) if not name.startswith("."))]
    return [
        folder
        for folder in folders
        if folder not in targets and os.path.exists(os.path.join(folder, "classes.json")) and NAMES.existing(folder)
    ]


def _parts(files: list[ImageFile], options: _Options) -> dict[str, list[ImageFile]]:
    """The images of each split, in the order in which they are packed; one nameless part without splits."""
    parts = {"": files}
    if options.fractions is not None:
        chosen = split_by_class([file.label for file in files], options.fractions, options.seed)
        parts = {name: [files[number] for number in numbers] for name, numbers in chosen.items()}
    if not options.shuffle:
        return parts
    return {
        name: [part[number] for number in order_of(len(part), options.seed).tolist()] for name, part in parts.items()
    }


def _tell_oddities(found: ImageFolder) -> None:
    if found.hidden or found.strays:
        hidden, strays = counted(found.hidden, "hidden name"), counted(found.strays, "file")
        say(f"note: passed over {hidden}, and {strays} outside of the class folders")
    empty = sorted(set(range(len(found.classes))) - {file.label for file in found.files})
    if empty:
        names = ", ".join(repr(found.classes[label]) for label in empty[:5])
        say(
            f"note: {len(empty)} class folders are empty and keep their numbers: {names}" + ("..." if empty[5:] else "")
        )
    if set(found.classes) <= {"train", "training", "val", "valid", "validation", "test"}:
        say(f"note: the classes are {', '.join(found.classes)}; if these are splits, pack each of them by itself")


def _tell_faults(faults: Sequence[Fault]) -> None:
    for fault in faults[:_FAULTS_SHOWN]:
        say(f"{fault.path}: {fault.reason}")
    if len(faults) > _FAULTS_SHOWN:
        say(f"... and {len(faults) - _FAULTS_SHOWN:,} more")


def _tell_result(packed: Sequence[PackedPart], dest: str, found: ImageFolder, skipped: int, seconds: float) -> None:
    written = [part for part in packed if part.writer.samples]
    for part in written:
        if part.name:
            typer.echo(f"{part.name}: {_counts([part])}")
    left_out = f", {skipped:,} files left out" if skipped else ""
    typer.echo(f"packed {_counts(written)}, {len(found.classes):,} classes, in {shown_time(seconds)}{left_out}")
    stored = {field for part in written for _, table in part.writer.tables for field in table.fields} - {"cls"}
    fields = (";".join(sorted(stored, key=lambda field: (field != "jpg", field))), "cls")
    folder = os.path.join(dest, written[0].name) if written[0].name else dest
    shown_fields = f'("{fields[0]}", "cls")'
    transform = f'transform={{"{fields[0]}": RandomResizedCrop(224)}}'
    typer.echo("read it with:")
    typer.echo("  from streamload import StreamLoader")
    typer.echo("  from streamload.images import RandomResizedCrop")
    typer.echo(f"  StreamLoader({folder!r}, batch_size=64, shuffle=True, fields={shown_fields}, {transform})")


def _counts(parts: Sequence[PackedPart]) -> str:
    shards = sum(len(part.writer.shards) for part in parts)
    samples = sum(part.writer.samples for part in parts)
    size = shown_bytes(sum(part.writer.bytes for part in parts))
    return f"{counted(shards, 'shard')}, {counted(samples, 'sample')}, {size}"


if __name__ == "__main__":
    main()
