"""The arguments and options of `shardify` as types: their names, metavars, ranges and help."""

from __future__ import annotations

from typing import Annotated

import typer

from streamload.cli.arguments import show_version

DEFAULT_QUALITY = 90

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder with one folder of images per class, or with folders such as train and val of these; a folder "
        "of any files that share names (0.jpg, 0.txt, 0.mask.png); a .csv, .tsv, .jsonl or .parquet with columns of "
        "paths, labels, texts; a .npz or .npy, by rows; or, with --labels, a folder of .pt, .npy or image files.",
    ),
]
Dest = Annotated[
    str,
    typer.Argument(
        metavar="DEST", help="The folder for the shards, created if needed; or a bucket: s3://, gs://, az://, ..."
    ),
]
MaxBytes = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Maximum size of a shard, such as 256MB, 1GB or 100MiB; 1 MB is 1,000,000 bytes."
    ),
]
MaxCount = Annotated[int | None, typer.Option(metavar="N", help="Maximum number of samples in a shard.", min=1)]
Shuffle = Annotated[
    bool, typer.Option(help="Shuffle the samples, or keep the order of classes and paths, or of the table.")
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N", help="Seed of the shuffle and of --split; equal seeds give equal shards.", min=0, max=2**64 - 1
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        metavar="NAME=FRACTION,...",
        help="Split each class at random into folders of DEST, as in train=0.9,val=0.1.",
    ),
]
Resize = Annotated[
    int | None,
    typer.Option(
        metavar="PIXELS",
        help="Resize larger images so that the shorter side has this many pixels, and store them as JPEG, whatever "
        "they were. EXIF orientation is applied, CMYK becomes RGB, grey stays grey; transparency, colour profiles "
        "and other metadata are dropped. Images that are small enough are stored unchanged.",
        min=1,
    ),
]
Quality = Annotated[
    int | None,
    typer.Option(
        metavar="N", help=f"Quality of the JPEG files of --resize. Default: {DEFAULT_QUALITY}.", min=1, max=100
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Number of processes; the shards do not depend on it. Default: one per core.", min=1
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help='The labels of files that are named by ID: JSON, {"ID": label, ...}, or a table with columns id and '
        "label. Default: labels.json (or a table of that name) in SOURCE.",
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A classes.json that numbers the classes, such as that of the training data. Labels are then names of "
        "classes, and one that it does not contain is an error.",
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(metavar="FILE", help='With --labels: the splits, as JSON: {"train": ["ID", ...], ...}.'),
]
PathColumn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="The table's column of paths or IDs; several times for several files in a sample. Default: found by its "
        "name.",
    ),
]
LabelColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The column of labels in a table, or array of a .npz. Default: found by its name."
    ),
]
TextColumn = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A column of the table to store as txt, such as captions; may be repeated."),
]
LabelsAsNames = Annotated[
    bool,
    typer.Option(
        "--labels-as-names", help="Treat labels as names of classes even if they are numbers; sort and number them."
    ),
]
KeepColumns = Annotated[bool, typer.Option("--keep-columns", help="Store the table's other columns as the field json.")]
Stems = Annotated[
    bool | None,
    typer.Option(
        "--stems/--no-stems",
        help="Whether files that share a name up to its first dot are one sample: 0.jpg, 0.txt, 0.mask.png, and 0.cls "
        "with its label. Default: if the folder holds no folders, or most images have other files of their name.",
    ),
]
FollowSymlinks = Annotated[
    bool, typer.Option("--follow-symlinks", help="Follow links to folders. Links to files are always followed.")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip files that are damaged or of another kind, instead of failing.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run, and keep the shards that it finished.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the shards in DEST, or discard an interrupted run.")
]
Staging = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="With a remote DEST: the local folder for shards that are not uploaded yet, a few at a time, or all "
        "of them with --resize; with --ray, one that all nodes have. Default: in the folder for temporary files.",
    ),
]
Sync = Annotated[
    bool, typer.Option("--sync", help="Flush everything to disk, so that it survives a power cut; slower.")
]
Version = Annotated[
    bool, typer.Option("--version", help="Show the version.", callback=show_version("shardify"), is_eager=True)
]
