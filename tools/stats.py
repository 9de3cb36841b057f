"""`streamload stats`: a dataset in numbers, and what follows from them for a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from streamload_tools import decoded, values
from streamload_tools.arguments import Index, Json, Ray, StorageOption, Urls, Where, Workers, parse_storage_options
from streamload_tools.failures import UsageError, reported_errors
from streamload_tools.output import aligned, print_document, print_line, shown_bytes
from streamload_tools.progress import open_progress
from streamload_tools.ray_pool import RayPool, open_pool
from streamload_tools.reading import Reader, tables
from streamload_tools.value_charts import draw_values

from streamload.decode.decoders import may_expand
from streamload.environment.launchers import available_processors
from streamload.fetch.budget import check_budget
from streamload.index.index_lookup import IndexLookup
from streamload.index.listing import Listing, list_shards
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of
from streamload.tar.table import ShardTable
from streamload.text import counted

__all__ = ["stats_command"]

_WINDOW = 10_000
_BUDGET_MARGIN = 1.05
_LABELS_SHOWN = 20
_GOES_ON = "run the same command again to go on"

BatchSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Also decode some samples, and report the memory of them, of batches and of an epoch.",
        min=1,
    ),
]
Pixels = Annotated[
    bool, typer.Option("--pixels", help="Also measure images: mean, deviation and histogram of each channel.")
]
FieldNames = Annotated[
    list[str] | None,
    typer.Option(help="Also measure the numbers of a field, such as npy; repeatable.", metavar="NAME"),
]
Output = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.json",
        help="Where --pixels and --field save what they find. Default: statistics.json beside the shards.",
        show_default=False,
    ),
]


def stats_command(
    urls: Urls,
    *,
    ranks: Annotated[int, typer.Option(metavar="N", help="World size: how many ranks share the dataset.", min=1)] = 1,
    batch_size: BatchSize = None,
    pixels: Pixels = False,
    field: FieldNames = None,
    output: Output = None,
    as_document: Json = False,
    where: Where = None,
    index: Index = None,
    workers: Workers = None,
    ray: Ray = None,
    storage_option: StorageOption = None,
) -> None:
    """Report the sizes of shards, fields and classes, the samples per rank, and the memory that a shuffle takes.

    The numbers come from the index; shards without an index are read. With --pixels or --field all samples are read and
    decoded, once: what is found is saved as JSON, which images.Normalize.of reads, and as a picture.

    Examples:
      streamload stats shards/train --ranks 8 --batch-size 64
      streamload stats shards/train --pixels
      streamload stats shards/train --field npy --output values.json --json
    """
    with reported_errors(_GOES_ON if pixels or field else ""), open_pool(ray, workers) as pool:
        options = parse_storage_options(storage_option)
        storages = Storages(options)
        processors = workers or available_processors()
        listing = list_shards(urls, index, storages)
        files = _result_files(output, listing, storages, wanted=pixels or bool(field))
        stats = dataset_stats(listing, index, storages, workers=processors, ranks=ranks, where=where, pool=pool)
        memory = None
        if batch_size is not None:
            stored_bytes = sum(field.bytes for field in stats.figures.fields.values())
            memory = decoded.decoded_memory(
                urls, index, options, where=where, batch_size=batch_size, window=_WINDOW, stored_bytes=stored_bytes
            )
        found = as_json(stats) | ({} if memory is None else {"decoded": decoded.as_json(memory)})
        measured: Mapping[str, values.FieldValues] = {}
        if files is not None:
            measured = values.measure_values(
                urls,
                values.chosen_fields(list(stats.figures.fields), field or (), pixels=pixels),
                stats.figures.samples,
                files=files,
                where=where,
                nodes=None if pool is None else values.Nodes(pool, stats.shards),
                index=index,
                num_workers="auto" if workers is None else workers,
                storage_options=options,
            )
            found["values"] = values.as_json(measured)
            files.publish(found, draw_values(found))
        if as_document:
            print_document(found)
            return
        for line in chain(as_lines(stats), () if memory is None else decoded.as_lines(memory)):
            print_line(line)
        if files is not None:
            print_line("")
            for line in values.as_lines(measured):
                print_line(line)
            print_line(f"saved in {files.url} and {files.picture_url}")


def _result_files(
    output: str | None, listing: Listing, storages: Storages, *, wanted: bool
) -> values.ResultFiles | None:
    if wanted:
        return values.ResultFiles(output, [shard.url for shard in listing.shards], storages)
    if output is not None:
        raise UsageError("--output is for what --pixels and --field find; give one of these too")
    return None


@dataclass(frozen=True, slots=True)
class FieldFigures:
    """One field: how many samples have it, and the sizes of its members in bytes."""

    samples: int
    bytes: int
    mean_bytes: float
    min_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Labels:
    """The integers in `cls`.

    Attributes:
        counts: each label with its number of samples, the most frequent first.
        unknown: number of samples in shards where some `cls` is not an integer.
    """

    counts: tuple[tuple[int, int], ...]
    unknown: int

    @property
    def imbalance(self) -> float:
        """Samples of the most frequent label per sample of the rarest."""
        return self.counts[0][1] / self.counts[-1][1]


@dataclass(frozen=True, slots=True)
class DatasetFigures:
    """A dataset.

    Attributes:
        bytes: size of the shards as stored.
        samples_per_shard: min, median and max.
        fields: by name, in the order of their first appearance.
        labels: None if no shard has an integer `cls` in every sample.
    """

    shards: int
    samples: int
    bytes: int
    samples_per_shard: tuple[int, float, int]
    fields: dict[str, FieldFigures]
    labels: Labels | None


class _FieldTally:
    """The totals of one field."""

    def __init__(self) -> None:
        self.samples = self.bytes = self.max_bytes = 0
        self.min_bytes: int | None = None

    def add(self, sizes: NDArray[np.int64]) -> None:
        least = int(sizes.min())
        self.samples += len(sizes)
        self.bytes += int(sizes.sum())
        self.min_bytes = least if self.min_bytes is None else min(self.min_bytes, least)
        self.max_bytes = max(self.max_bytes, int(sizes.max()))

    def figures(self) -> FieldFigures:
        return FieldFigures(self.samples, self.bytes, self.bytes / self.samples, self.min_bytes or 0, self.max_bytes)


class Tally:
    """Totals over the tables of shards, which it does not keep."""

    def __init__(self) -> None:
        self._shard_samples: list[int] = []
        self._bytes = self._unlabelled = 0
        self._fields: dict[str, _FieldTally] = {}
        self._labels: Counter[int] = Counter()

    def add(self, shard_bytes: int, table: ShardTable) -> None:
        """Add one shard; `shard_bytes` is its size as stored."""
        self._shard_samples.append(len(table))
        self._bytes += shard_bytes
        for number, name in enumerate(table.fields):
            sizes = table.member_size[table.member_field == number]
            if len(sizes):
                self._fields.setdefault(name, _FieldTally()).add(sizes)
        if table.labels is None:
            self._unlabelled += len(table)
            return
        values, counts = np.unique(table.labels, return_counts=True)
        self._labels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def figures(self) -> DatasetFigures:
        """The totals of at least one shard."""
        counts = sorted(self._labels.items(), key=lambda item: (-item[1], item[0]))
        shards = np.array(self._shard_samples)
        return DatasetFigures(
            shards=len(shards),
            samples=int(shards.sum()),
            bytes=self._bytes,
            samples_per_shard=(int(shards.min()), float(np.median(shards)), int(shards.max())),
            fields={name: tally.figures() for name, tally in self._fields.items()},
            labels=Labels(tuple(counts), self._unlabelled) if counts else None,
        )


def least_budget_bytes(figures: DatasetFigures, *, window: int, ranks: int) -> int:
    """The memory_budget that a StreamLoader requires on each rank for remote shards without a cache.

    As in the error for a smaller one, this is the minimum and 5 % more.

    Args:
        figures: the dataset; its shards are not compressed.
        window: the shuffle_window in samples.
        ranks: the world size, and so the number of lanes.
    """

    def fits(budget_bytes: int) -> bool:
        try:
            check_budget(
                budget_bytes,
                window=window,
                batch_size=1,
                samples=figures.samples,
                data_bytes=figures.bytes,
                lanes_read=1,
                lanes=ranks,
                shards=figures.shards,
                expands=any(map(may_expand, figures.fields)),
            )
        except ValueError:
            return False
        return True

    too_small, enough = 0, 1
    while not fits(enough):
        too_small, enough = enough, 2 * enough
    while enough - too_small > 1:
        middle = (too_small + enough) // 2
        too_small, enough = (too_small, middle) if fits(middle) else (middle, enough)
    return int(enough * _BUDGET_MARGIN)


def samples_of_a_rank(samples: int, ranks: int) -> tuple[int, int]:
    """Samples per rank and epoch with `pad=True`, and the fewest that a rank gets with `pad=False`."""
    return -(-samples // ranks), samples // ranks


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """The figures, and what follows from them.

    Attributes:
        shards: in order, each with the number of its samples.
        ranks: the world size.
        budget_bytes: the minimum `memory_budget` for a shuffle_window of 10,000 and remote shards; None for compressed
            shards, whose need is not known in advance.
        rank_samples: as `samples_of_a_rank` has them.
    """

    figures: DatasetFigures
    shards: Sequence[tuple[str, int]]
    ranks: int
    budget_bytes: int | None
    rank_samples: tuple[int, int]


def dataset_stats(
    listing: Listing,
    index: str | None,
    storages: Storages,
    *,
    workers: int,
    ranks: int,
    where: str | None = None,
    pool: RayPool | None = None,
) -> DatasetStats:
    """Read the indexes, or the shards without one, with progress on standard error.

    Args:
        listing: the shards.
        index: the folder of the index, if it is not beside the shards.
        storages: their storages.
        workers: how many shards to read at once.
        ranks: the world size.
        where: a condition that samples have to meet.
        pool: reads shards without an index on the nodes of a cluster.

    Raises:
        StreamloadError: an index or a shard cannot be read, or is damaged.
    """
    tally = Tally()
    with open_progress("reading", len(listing.shards), "shards") as progress:
        reader, lookup = Reader(storages, workers, pool), IndexLookup(index, storages)
        found = tables(listing, lookup, reader, labels=True, where=where, advance=progress.advance)
        shards = []
        for shard, (shard_bytes, table) in zip(listing.shards, found, strict=True):
            tally.add(shard_bytes, table)
            shards.append((shard.url, len(table)))
    figures = tally.figures()
    compressed = any(compression_of(shard.url) for shard in listing.shards)
    return DatasetStats(
        figures=figures,
        shards=shards,
        ranks=ranks,
        budget_bytes=None if compressed else least_budget_bytes(figures, window=_WINDOW, ranks=ranks),
        rank_samples=samples_of_a_rank(figures.samples, ranks),
    )


def as_json(stats: DatasetStats) -> dict[str, Any]:
    """All figures and labels as a JSON object."""
    figures = stats.figures
    least, median, most = figures.samples_per_shard
    return {
        "shards": figures.shards,
        "samples": figures.samples,
        "bytes": figures.bytes,
        "samples_per_shard": {"min": least, "median": median, "max": most},
        "fields": {name: asdict(field) for name, field in figures.fields.items()},
        "labels": None if figures.labels is None else _labels_json(figures.labels),
        "ranks": stats.ranks,
        "samples_per_rank": stats.rank_samples[0],
        "samples_per_rank_unpadded_min": stats.rank_samples[1],
        "shuffle_window": _WINDOW,
        "memory_budget_bytes": stats.budget_bytes,
    }


def as_lines(stats: DatasetStats) -> Iterator[str]:
    """The figures as text."""
    figures = stats.figures
    least, median, most = figures.samples_per_shard
    yield f"{counted(figures.shards, 'shard')}, {counted(figures.samples, 'sample')}, {shown_bytes(figures.bytes)}"
    yield f"samples per shard: min {least:,}, median {median:,.0f}, max {most:,}"
    yield ""
    rows: list[tuple[str, ...]] = [("FIELD", "SAMPLES", "BYTES", "MEAN", "MIN", "MAX")]
    for name, field in figures.fields.items():
        sizes = (field.bytes, field.mean_bytes, field.min_bytes, field.max_bytes)
        rows.append((name, f"{field.samples:,}", *map(shown_bytes, sizes)))
    yield from aligned(rows, numbers=len(rows[0]) - 1)
    if figures.labels is not None:
        yield ""
        yield from _label_lines(figures.labels)
    yield ""
    yield from _advice(stats)


def _labels_json(labels: Labels) -> dict[str, Any]:
    counts = [{"label": label, "samples": count} for label, count in labels.counts]
    return {"counts": counts, "imbalance": labels.imbalance, "samples_of_shards_without_labels": labels.unknown}


def _label_lines(labels: Labels) -> Iterator[str]:
    known = sum(count for _, count in labels.counts)
    rows = [("LABEL", "SAMPLES", "SHARE")]
    rows += [(str(label), f"{count:,}", f"{count / known:.2%}") for label, count in labels.counts[:_LABELS_SHOWN]]
    yield from aligned(rows, numbers=len(rows[0]) - 1)
    if len(labels.counts) > _LABELS_SHOWN:
        rest = labels.counts[_LABELS_SHOWN:]
        samples = counted(sum(count for _, count in rest), "sample")
        yield f"and {counted(len(rest), 'more label')} with {samples}, the rarest with {rest[-1][1]:,}"
    if len(labels.counts) > 1:
        hint = '; weights="balanced" draws all equally often' if labels.imbalance >= 2 else ""
        yield f"the most frequent label is {labels.imbalance:,.1f} times as frequent as the rarest{hint}"
    if labels.unknown:
        yield f"not counted: {counted(labels.unknown, 'sample')} of shards in which not every cls is a whole number"


def _advice(stats: DatasetStats) -> Iterator[str]:
    padded, fewest = stats.rank_samples
    ranks = "1 rank gets" if stats.ranks == 1 else f"each of {stats.ranks:,} ranks gets"
    unpadded = "" if padded == fewest else f" ({fewest:,} or {padded:,} with pad=False)"
    yield f"{ranks} {counted(padded, 'sample')} an epoch{unpadded}"
    if stats.budget_bytes is None:
        yield f"memory_budget for shuffle_window={_WINDOW:,}: not known beforehand for compressed shards"
    else:
        budget = f"{max(1, -(-stats.budget_bytes // 10**6)):,}MB"
        yield f"remote shards need a memory_budget of at least {budget} on each rank for shuffle_window={_WINDOW:,}"
