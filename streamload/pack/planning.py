"""Assign samples to shards, by pure functions of the samples, their sizes and the options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streamload.pack.output import UsageError
from streamload.pack.pools import Pool
from streamload.pack.sources.source import SPLIT_NAME, Source, SourceSample
from streamload.pack.tasks import Work, measure
from streamload.tar.header_chain import BLOCK_BYTES
from streamload.tar.header_writer import END_OF_ARCHIVE, member_bytes, member_header
from streamload.tar.scan import LABEL_FIELD

_ORDER, _SPLIT = 0, 1  # the purposes of random streams
_NO_LABEL = -(1 << 63)
_USTAR_NAME_BYTES = 100
_USTAR_SIZE = 8**11
_SHARDS_AT_LEAST = 16
_MOST_MEASURED = 128
_FILLED = 0.9

Span = tuple[int, int]  # consecutive samples: the first, and one after the last


def planned_parts(
    source: Source, fractions: Mapping[str, float] | None, *, shuffle: bool, seed: int
) -> Mapping[str, Sequence[int]]:
    """Return each split's positions in packing order; without splits, one part named ""."""
    parts: Mapping[str, Sequence[int]] = source.parts or {"": range(len(source.samples))}
    if source.parts is None and fractions is not None:
        parts = split_by_class([sample.label for sample in source.samples], fractions, seed)
    if not shuffle:
        return parts
    return {name: [part[at] for at in permutation(len(part), seed).tolist()] for name, part in parts.items()}


def sample_bytes(sample: SourceSample) -> int:
    """Return a sample's bytes in a shard, with its label, headers and padding."""
    key, total = sample.key, 0
    fields = [(member.field or "", max(0, member.size)) for member in sample.members]
    fields += [(field, len(value)) for field, value in sample.values]
    if sample.label is not None:
        fields.append((LABEL_FIELD, len(str(sample.label))))
    for field, size in fields:
        # Most headers are one block; building a header to measure it takes several microseconds.
        if len(key) + 1 + len(field) <= _USTAR_NAME_BYTES and key.isascii() and size < _USTAR_SIZE:
            total += BLOCK_BYTES + size + -size % BLOCK_BYTES
        else:
            total += member_bytes(member_header(f"{key}.{field}", size), size)
    return total


def shard_spans(sizes: Iterable[tuple[int, int]], max_bytes: int, max_count: int | None) -> list[Span]:
    """Split consecutive items, given as (bytes, samples), into shards as full as allowed; a larger item is alone."""
    spans: list[Span] = []
    start = end = filled = samples = 0
    for size, count in sizes:
        too_many = max_count is not None and samples + count > max_count
        if end > start and (filled + size + len(END_OF_ARCHIVE) > max_bytes or too_many):
            spans.append((start, end))
            start, filled, samples = end, 0, 0
        end, filled, samples = end + 1, filled + size, samples + count
    return [*spans, (start, end)] if end > start else spans


def numbered(spans: Iterable[Span]) -> list[tuple[Span, str]]:
    """Return spans with the names of their shards."""
    return [(span, f"shard-{number:06d}.tar") for number, span in enumerate(spans)]


def estimated_spans(pool: Pool, works: Sequence[Work], max_bytes: int | None, max_count: int | None) -> list[Span]:
    """Split items, given the work of packing each, into equal spans that fill a shard to about nine tenths.

    One item in sixteen, at most 128, evenly spaced, is packed on trial. There are at least sixteen spans, to keep many
    processes busy, unless spans would be shorter than sixteen items.
    """
    count = len(works)
    number = min(_MOST_MEASURED, count // _SHARDS_AT_LEAST)
    trials = [partial(measure, works[position * count // number]) for position in range(number)]
    measured = list(pool(trials))
    all_bytes, samples = sum(size for size, _ in measured), sum(samples for _, samples in measured)
    each = max(_SHARDS_AT_LEAST, -(-count // _SHARDS_AT_LEAST))
    if all_bytes and max_bytes is not None:
        each = min(each, int(_FILLED * max_bytes * number / all_bytes))
    if max_count is not None:
        each = min(each, max_count * number // samples if samples else max_count)
    each = max(1, each)
    return [(start, min(start + each, count)) for start in range(0, count, each)]


def parse_split(text: str) -> dict[str, float]:
    """Parse splits such as `train=0.9,val=0.1`. Raises UsageError, also if the fractions do not sum to 1."""
    fractions: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, number = part.partition("=")
        try:
            fraction = float(number)
        except ValueError:
            fraction = -1
        if not SPLIT_NAME.fullmatch(name) or not 0 <= fraction <= 1 or name in fractions:
            advice = "as in train=0.9,val=0.1, with different names and fractions from 0 to 1"
            raise UsageError(f"--split: {part!r} must be NAME=FRACTION, {advice}")
        fractions[name] = fraction
    if not math.isclose(total := sum(fractions.values()), 1, abs_tol=1e-6):
        raise UsageError(f"--split: the fractions add up to {total:g}, and must add up to 1")
    return fractions


def permutation(count: int, seed: int, label: int = 0, purpose: int = _ORDER) -> NDArray[np.int64]:
    """Return a permutation, int64[count], that depends only on the arguments; by default the shuffle's.

    Philox's raw output is stable between versions of NumPy.
    """
    key = np.array([seed, 0x5348415244494659], np.uint64)
    raw = np.random.Philox(key=key, counter=np.array([0, 0, label, purpose], np.uint64)).random_raw(count)
    return np.argsort(raw, kind="stable")


def split_by_class(labels: Sequence[int | None], fractions: Mapping[str, float], seed: int) -> dict[str, list[int]]:
    """Return ascending positions in `labels` for each split, chosen at random within each class.

    Each split with a nonzero fraction gets a sample of each class that has enough.
    """
    chosen: dict[str, list[int]] = {name: [] for name in fractions}
    if not labels:
        return chosen
    all_labels = np.array([_NO_LABEL if label is None else label for label in labels], np.int64)
    by_class = np.argsort(all_labels, kind="stable")
    classes, starts = np.unique(all_labels[by_class], return_index=True)
    for label, members in zip(classes.tolist(), np.split(by_class, starts[1:]), strict=True):
        shuffled = members[permutation(len(members), seed, label % 2**64, _SPLIT)]
        start = 0
        for name, share in zip(fractions, _shares(len(members), list(fractions.values())), strict=True):
            chosen[name] += shuffled[start : start + share].tolist()
            start += share
    return {name: sorted(positions) for name, positions in chosen.items()}


def _shares(count: int, fractions: list[float]) -> list[int]:
    """Return integers near `count * fraction` that sum to `count`, without a 0 if possible."""
    quotas = [count * fraction for fraction in fractions]
    least = [1 if fraction > 0 and count >= sum(f > 0 for f in fractions) else 0 for fraction in fractions]
    shares = [max(low, math.floor(quota + 1e-9)) for low, quota in zip(least, quotas, strict=True)]
    numbers = range(len(fractions))
    while sum(shares) > count:
        shares[max((n for n in numbers if shares[n] > least[n]), key=lambda n: shares[n] - quotas[n])] -= 1
    while sum(shares) < count:
        shares[max((n for n in numbers if fractions[n] > 0), key=lambda n: quotas[n] - shares[n])] += 1
    return shares
