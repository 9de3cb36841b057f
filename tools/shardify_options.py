"""The arguments and options of `shardify`: their types, limits and help."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

__all__ = [
    "DEFAULT_QUALITY",
    "Classes",
    "Dest",
    "FollowSymlinks",
    "KeepColumns",
    "LabelColumn",
    "Labels",
    "LabelsAsNames",
    "MaxBytes",
    "MaxCount",
    "Overwrite",
    "Partition",
    "PathColumn",
    "Quality",
    "Resize",
    "Resume",
    "Seed",
    "ShowVersion",
    "Shuffle",
    "SkipBad",
    "Source",
    "Split",
    "Staging",
    "Sync",
    "Workers",
]

DEFAULT_QUALITY = 90


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shardify {version('streamload')}")
        raise typer.Exit


Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder with one folder of images for each class, or with folders train and val of such folders; a "
        ".csv, .tsv or .jsonl of paths and labels; or, with --labels, a folder of .pt, .npy or image files.",
    ),
]
Dest = Annotated[
    str,
    typer.Argument(
        metavar="DEST", help="The folder for the shards, made if needed; or s3://, gs://, az://... in a bucket."
    ),
]
MaxBytes = Annotated[str, typer.Option(help="Largest shard, as in 256MB, 1GB or 100MiB; M and MB are 1000 * 1000.")]
MaxCount = Annotated[int | None, typer.Option(help="Most samples in a shard.", min=1)]
Shuffle = Annotated[bool, typer.Option(help="Mix the classes, or keep the order of class and path, or table.")]
Seed = Annotated[int, typer.Option(help="Equal seeds give equal shards.", min=0, max=2**64 - 1)]
Split = Annotated[
    str | None,
    typer.Option(help="Divide each class at random into folders of DEST, as in train=0.9,val=0.1."),
]
Resize = Annotated[
    int | None,
    typer.Option(
        help="Bring the shorter side of larger images to so many pixels, as JPEG, also if it was PNG or another "
        "kind. EXIF orientation is applied, CMYK becomes RGB, grey stays grey; transparency, colour profiles and "
        "other metadata are dropped. Images that are small enough stay as they are, to the byte.",
        min=1,
    ),
]
Quality = Annotated[
    int | None,
    typer.Option(help=f"Of the JPEG files that --resize makes; default {DEFAULT_QUALITY}.", min=1, max=100),
]
Workers = Annotated[
    int | None, typer.Option(help="Processes; default: one for each core. The shards do not depend on it.", min=1)
]
Labels = Annotated[
    str | None,
    typer.Option(
        help='For a folder of files named by ID: JSON, {"ID": label, ...}, or a table with columns id and label. '
        "Default: labels.json (.csv, .tsv, .jsonl) in SOURCE."
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        help="The classes.json that numbers the classes, such as that of the training data, if SOURCE is packed apart "
        "from it. Labels are then names of classes; one that is not in it is an error."
    ),
]
Partition = Annotated[str | None, typer.Option(help='With --labels, the splits as JSON: {"train": ["ID", ...], ...}.')]
PathColumn = Annotated[str | None, typer.Option(help="A table's column of paths or IDs; default: by its name.")]
LabelColumn = Annotated[str | None, typer.Option(help="A table's column of labels; default: by its name.")]
LabelsAsNames = Annotated[
    bool,
    typer.Option(
        "--labels-as-names",
        help="A table's labels are names of classes, also where they are numbers, and are numbered in their order.",
    ),
]
KeepColumns = Annotated[
    bool, typer.Option("--keep-columns", help="Store the table's other columns too, as the field json.")
]
FollowSymlinks = Annotated[
    bool, typer.Option("--follow-symlinks", help="Go into folders behind links. Links to files always count.")
]
SkipBad = Annotated[
    bool,
    typer.Option("--skip-bad", help="Leave out files that are damaged or of another kind, instead of failing."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the shards that a run that was stopped has finished.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the shards, or the unfinished run, that DEST holds.")
]
Staging = Annotated[
    str | None,
    typer.Option(
        help="Where shards grow before they are uploaded, if DEST is remote; default: in the folder for temporary "
        "files. A few shards lie there at a time; with --resize, all of them."
    ),
]
Sync = Annotated[bool, typer.Option("--sync", help="Wait until all is on the disk, against a power cut; slower.")]
ShowVersion = Annotated[
    bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
]
