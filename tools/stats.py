"""`streamload stats`: what a dataset is in numbers, and what that means for those who train on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from streamload_tools.figures import DatasetFigures, Labels, Tally, least_budget_bytes, samples_of_a_rank
from streamload_tools.progress import open_progress
from streamload_tools.reading import Reader, tables
from streamload_tools.sizes import counted, shown_bytes

from streamload.index.index_lookup import IndexLookup
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages
from streamload.tar.decompression import compression_of

__all__ = ["DatasetStats", "as_json", "as_lines", "dataset_stats"]

WINDOW = 10_000
_LABELS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class DatasetStats:
    """The figures, and what follows from them.

    Attributes:
        ranks: the world size that the rest is for.
        budget_bytes: the least `memory_budget` for a shuffle_window of 10,000, if the shards lie remotely; None for
            compressed shards, of which more has to be held than can be said before.
        rank_samples: what each rank gets in an epoch, and the fewest that one gets with `pad=False`.
    """

    figures: DatasetFigures
    ranks: int
    budget_bytes: int | None
    rank_samples: tuple[int, int]


def dataset_stats(
    urls: Sequence[str], index: str | None, storages: Storages, *, workers: int, ranks: int
) -> DatasetStats:
    """Read the indexes, or the shards where there is none, with progress on standard error.

    Args:
        urls: shards, patterns or folders.
        index: the index's folder, if it is not beside the shards.
        storages: where all this lies.
        workers: how many shards are read at once.
        ranks: the world size to reckon with.

    Raises:
        StreamloadError: an index or a shard cannot be read, or is damaged.
    """
    listing = list_shards(urls, index, storages)
    tally = Tally()
    with open_progress("reading", len(listing.shards), "shards") as progress:
        found = tables(
            listing, IndexLookup(index, storages), Reader(storages, workers), labels=True, advance=progress.advance
        )
        for shard_bytes, table in found:
            tally.add(shard_bytes, table)
    figures = tally.figures()
    compressed = any(compression_of(shard.url) for shard in listing.shards)
    return DatasetStats(
        figures=figures,
        ranks=ranks,
        budget_bytes=None if compressed else least_budget_bytes(figures, window=WINDOW, ranks=ranks),
        rank_samples=samples_of_a_rank(figures.samples, ranks),
    )


def as_json(stats: DatasetStats) -> dict[str, Any]:
    """All figures, and all labels, as values that JSON can hold."""
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
        "shuffle_window": WINDOW,
        "memory_budget_bytes": stats.budget_bytes,
    }


def as_lines(stats: DatasetStats) -> Iterator[str]:
    """The same for people."""
    figures = stats.figures
    least, median, most = figures.samples_per_shard
    yield f"{counted(figures.shards, 'shard')}, {counted(figures.samples, 'sample')}, {shown_bytes(figures.bytes)}"
    yield f"samples per shard: min {least:,}, median {median:,.0f}, max {most:,}"
    yield ""
    rows: list[tuple[str, ...]] = [("FIELD", "SAMPLES", "BYTES", "MEAN", "MIN", "MAX")]
    for name, field in figures.fields.items():
        sizes = (field.bytes, field.mean_bytes, field.min_bytes, field.max_bytes)
        rows.append((name, f"{field.samples:,}", *map(shown_bytes, sizes)))
    yield from _aligned(rows)
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
    yield from _aligned(rows)
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
        yield f"memory_budget for shuffle_window={WINDOW:,}: not known beforehand where shards are compressed"
    else:
        budget = f"{max(1, -(-stats.budget_bytes // 10**6)):,}MB"
        yield f"remote shards need a memory_budget of at least {budget} on each rank for shuffle_window={WINDOW:,}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Columns of equal width, all but the first to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *rest in rows:
        yield "  ".join((f"{first:<{widths[0]}}", *(f"{text:>{w}}" for text, w in zip(rest, widths[1:], strict=True))))
